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
