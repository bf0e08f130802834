"""A corpus that is profiled and tokenized on several machines: on a real Slurm, a real Ray and real sshd, with one machine lost.

The jobs are the stages' own. What they make must be what one process makes, bit for bit.
"""

import pytest
from data_material import PARTS, STAGES, run_stage, write_corpus, write_short_documents
from lost_machines import STANDS, losing_a_machine
from waiting import limit

from tasks.config.cluster import ClusterConfig


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "dataset")


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """What one process of this machine makes."""
    base = tmp_path_factory.mktemp("alone")
    return {stage: run_stage(stage, ClusterConfig(), corpus, base / stage / "job")[1] for stage in STAGES}


@pytest.fixture(scope="module", params=list(STANDS))
def machines(request, tmp_path_factory):
    """A cluster's settings, what takes its second machine away, and what brings it back."""
    with STANDS[request.param](tmp_path_factory) as (section, take_away, again):
        config = ClusterConfig.model_validate(
            {
                "backend": request.param,
                "data": {"nodes": 2, "threads": 1},
                "retry": {"back_off_seconds": 0.5},
                "watch": {"hang_seconds": 120.0, "silent_node_seconds": limit(6.0)},
                **section,
            }
        )
        yield config, take_away, again


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
def test_two_machines_make_what_one_makes(machines, corpus, alone, tmp_path, stage):
    result, made = run_stage(stage, machines[0], corpus, tmp_path / "job")
    assert result.submissions == 1
    assert len(list((tmp_path / "job").glob("nodes/*/node.json"))) == 2, "two machines had a part in it"
    assert made == alone[stage]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", PARTS)
def test_a_machine_that_is_lost_costs_its_units_only(machines, corpus, alone, tmp_path, stage):
    config, take_away, again = machines
    folder = tmp_path / "job"
    try:
        with losing_a_machine(folder, PARTS[stage], take_away) as (kept, measured_again):
            result, made = run_stage(stage, config, corpus, folder)
    finally:
        again()
    assert result.submissions >= 2 and kept, "the machine was lost while it worked"
    assert not measured_again
    assert made == alone[stage]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_machine_that_is_lost_among_duplicates_costs_its_ranges_only(machines, tmp_path):
    """Two machines share the ranges of hashes; the second is lost after some of them."""
    config, take_away, again = machines
    corpus, folder = write_short_documents(tmp_path / "corpus"), tmp_path / "job"
    try:
        with losing_a_machine(folder, "parts/links-*/*.npz", take_away, after=1) as (kept, done_again):
            result, made = run_stage("validate", config, corpus, folder)
    finally:
        again()
    assert result.submissions >= 2 and kept, "the machine was lost while it looked for duplicates"
    assert not done_again
    _, alone = run_stage("validate", ClusterConfig(), corpus, tmp_path / "alone")
    assert alone[0]["near"] > 30_000 and made == alone
