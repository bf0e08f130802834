"""Which backends take elastic jobs is a table; the configuration, the documentation and the backends agree with it."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tasks.config.cluster import BACKENDS, ClusterConfig, elasticity_table
from tasks.config.flows import RetrainConfig

AZUREML = {
    "subscription_id": "s",
    "resource_group": "g",
    "workspace": "w",
    "compute": "c",
    "environment": "azureml:own:1",
}
NEEDED = {"ssh": {"ssh": {"hosts": ["a", "b"]}}, "azureml": {"azureml": AZUREML}}
RANGE = {"min_nodes": 1, "max_nodes": 3}


def cluster(backend, **more):
    return {"backend": backend, "ranks_per_node": 1, "elastic": RANGE, **NEEDED.get(backend, {}), **more}


def test_the_page_prints_a_row_a_backend():
    page = (Path(__file__).parents[4] / "docs" / "elastic.md").read_text()
    assert elasticity_table() in page


@pytest.mark.parametrize("backend", [name for name, one in BACKENDS.items() if one.elasticity.refused])
def test_a_backend_that_refuses_says_why_while_the_configuration_is_read(backend):
    with pytest.raises(ValidationError) as said:
        ClusterConfig.model_validate(cluster(backend))
    assert BACKENDS[backend].elasticity.how in str(said.value) and "use backend ssh or slurm" in str(said.value)


@pytest.mark.parametrize("backend", [name for name, one in BACKENDS.items() if not one.elasticity.refused])
def test_the_others_take_one(backend):
    assert ClusterConfig.model_validate(cluster(backend)).world_sizes == (1, 2, 3)
    assert BACKENDS[backend].elasticity.survives_first


def test_open_mpi_is_refused():
    with pytest.raises(ValidationError, match="mpirun ends all ranks when one is lost"):
        ClusterConfig.model_validate(cluster("slurm", launcher="mpi"))


def test_the_global_batch_divides_for_every_number_of_machines():
    training = {"global_batch_size": 8, "micro_batch_size": 2}
    with pytest.raises(ValidationError, match="micro_batch_size x ranks = 2 x 3 = 6"):
        RetrainConfig.model_validate({"cluster": cluster("slurm"), "training": training})
    RetrainConfig.model_validate({"cluster": cluster("slurm"), "training": {**training, "global_batch_size": 12}})
