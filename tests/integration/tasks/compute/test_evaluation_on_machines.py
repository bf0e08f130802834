"""A model that is measured on several machines: on a real Slurm, a real Ray and real sshd, with one machine lost.

The job is the stage's own. What it makes must be what one process makes, byte for byte.
"""

import pytest
from evaluation_material import everything, measure, write_material
from lost_machines import STANDS, losing_a_machine
from waiting import limit

from tasks.config.cluster import ClusterConfig


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material") / "inputs", documents=2000)


@pytest.fixture(scope="module")
def config(material):
    return everything(material, lm_eval={}, probe_samples=160)


@pytest.fixture(scope="module")
def alone(material, config, tmp_path_factory):
    """What one process of this machine makes."""
    cluster = ClusterConfig.model_validate({"ranks_per_node": 1})
    return measure(config, cluster, material, tmp_path_factory.mktemp("alone") / "job")[1]


@pytest.fixture(scope="module", params=list(STANDS))
def machines(request, tmp_path_factory):
    """A cluster's settings, what takes its second machine away, and what brings it back."""
    with STANDS[request.param](tmp_path_factory) as (section, take_away, again):
        config = ClusterConfig.model_validate(
            {
                "backend": request.param,
                "ranks_per_node": 1,
                "evaluation": {"nodes": 2},
                "retry": {"back_off_seconds": 0.5},
                "watch": {"hang_seconds": 120.0, "silent_node_seconds": limit(6.0)},
                **section,
            }
        )
        yield config, take_away, again


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_two_machines_measure_what_one_measures(machines, material, config, alone, tmp_path):
    result, made = measure(config, machines[0], material, tmp_path / "job")
    assert result.submissions == 1
    assert len(list((tmp_path / "job").glob("nodes/*/node.json"))) == 2, "two machines had a part in it"
    assert made == alone


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_machine_that_is_lost_costs_its_batches_only(machines, material, config, alone, tmp_path):
    cluster, take_away, again = machines
    folder = tmp_path / "job"
    try:
        with losing_a_machine(folder, "parts/*.npz", take_away) as (kept, measured_again):
            result, made = measure(config, cluster, material, folder)
    finally:
        again()
    assert result.submissions >= 2 and kept, "the machine was lost while it worked"
    assert not measured_again
    assert made == alone
