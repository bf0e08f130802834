"""What a stage's job takes of the cluster's settings."""

import pytest

from tasks.config.cluster import ClusterConfig
from tasks.orchestration.job_spec import shape

pytestmark = pytest.mark.unit
WORKSPACE = {
    "subscription_id": "s",
    "resource_group": "g",
    "workspace": "w",
    "compute": "gpus",
    "environment": "azureml:own:1",
}
H100 = "Standard_ND96isr_H100_v5"


@pytest.mark.parametrize(
    ("backend", "section"),
    [
        ("slurm", {"sku": H100}),
        ("ssh", {"sku": H100, "hosts": ["gpu-1"]}),
        ("ray", {"sku": H100}),
        ("azureml", {"size": H100, **WORKSPACE}),
    ],
)
def test_every_backend_says_the_size_of_its_machines(backend, section):
    assert shape(ClusterConfig.model_validate({"backend": backend, backend: section}))["size"] == H100


def test_a_size_of_another_backend_is_none_of_the_jobs():
    assert shape(ClusterConfig.model_validate({"azureml": {"size": H100}}))["size"] == ""


def test_a_size_that_nothing_is_known_of_is_an_error_only_where_azure_would_not_say_so():
    ml = {"backend": "azureml", "azureml": {"size": "Standard_D4s_v5", **WORKSPACE}}
    assert shape(ClusterConfig.model_validate(ml))["size"] == ""
    slurm = ClusterConfig.model_validate({"backend": "slurm", "slurm": {"sku": "Standard_D4s_v5"}})
    with pytest.raises(ValueError, match=r"'Standard_D4s_v5'.*known are .*ND96isr_H100_v5"):
        shape(slurm)


def test_a_job_on_azure_ml_says_what_it_runs_in():
    workspace = {name: value for name, value in WORKSPACE.items() if name != "environment"}
    with pytest.raises(ValueError, match=r"set cluster\.image .*or cluster\.azureml\.environment .*Python 3\.11"):
        ClusterConfig.model_validate({"backend": "azureml", "azureml": workspace})
    assert ClusterConfig.model_validate({"backend": "azureml", "image": "own:1", "azureml": workspace}).image == "own:1"
    with pytest.raises(ValueError, match=r"azureml\.environment"):
        ClusterConfig.model_validate({"backend": "azureml", "azureml": {**workspace, "environment": "own"}})


@pytest.mark.parametrize(
    ("backend", "section", "pool"),
    [("slurm", {"sku": H100, "partition": "gpu"}, "partition"), ("azureml", {"size": H100, **WORKSPACE}, "compute")],
)
def test_jobs_that_read_a_corpus_have_a_pool_of_their_own_and_no_gpus(backend, section, pool):
    given = {"backend": backend, "nodes": 4, "ranks_per_node": 8, "gpus_per_node": 8, backend: section}
    plain = ClusterConfig.model_validate(given).for_data
    assert (plain.nodes, plain.ranks_per_node, plain.threads_per_rank, plain.gpus_per_node) == (1, 1, 8, 0)
    assert getattr(plain.section, pool) == section[pool] and shape(plain)["size"] == H100
    own = ClusterConfig.model_validate({**given, "data": {"pool": "cpu", "threads": 32}}).for_data
    assert getattr(own.section, pool) == "cpu" and own.threads_per_rank == 32
    assert shape(own)["size"] == "", "the size is that of training's machines"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": {"nodes": 2}}, r"local has one machine, data\.nodes is 2: use data\.threads"),
        ({"data": {"pool": "cpu"}}, r"data\.pool is 'cpu', and backend local has no pools: .*slurm or azureml"),
    ],
)
def test_machines_that_cannot_read_a_corpus_together_are_an_error_that_names_the_setting(given, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig.model_validate(given)
