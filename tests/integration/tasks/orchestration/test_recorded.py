"""Before anybody is asked: whether a stage's result is recorded, also while its surroundings are not known yet."""

import pytest

from deployments.cli.retrain import _at_work
from tasks.artifacts import Cluster, Pending, Value
from tasks.common.process import write_json
from tasks.config.flows import RetrainConfig
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage import recorded, stage

HERE = Cluster(name="here", backend="local", nodes=1, ranks_per_node=1, threads_per_rank=1)


class Told(Value):
    seed: int


@stage(version=1, name="train")
def told(seed: int, *, on: Cluster) -> Told:
    """A stage that publishes nothing."""
    return Told(seed=seed)


@stage(version=1, name="plan", same_context=True)
def of_its_place(seed: int, *, on: Cluster) -> Told:
    """A stage whose record holds only where it was made."""
    return Told(seed=seed)


@pytest.fixture(autouse=True)
def made(tmp_path, monkeypatch):
    """Both stages ran once, with seed 7."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train")) as run:
        for one in (told, of_its_place):
            one._reuse_or_execute(run, run.outcome_for(one.name), one._call((7,), {"on": HERE}))
    return run


def dry():
    return lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train"), dry=True)


def test_a_stage_that_ran_for_the_first_time_says_why_in_words_that_are_true_after_it(made):
    """The note in Prefect's page has both, one beside the other."""
    for outcome in made.outcomes.values():
        assert (outcome.status, outcome.why) == ("ran", "nothing like it is recorded")


def test_what_is_recorded_is_known_before_it_runs():
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train")):
        assert recorded(told, 7, on=HERE) and not recorded(told, 8, on=HERE)
        assert not recorded(told, Pending(stage="plan"), on=HERE)


def test_a_new_qualification_trains_nothing_again_but_plans_again():
    later = Pending(stage="benchmark")
    with dry() as run:
        assert told(7, on=later) == Told(seed=7) and run.outcomes["train"].status == "reused"
        assert isinstance(of_its_place(7, on=later), Pending)
    with dry() as run:
        assert isinstance(told(8, on=later), Pending)
        assert run.outcomes["train"].status == "pending" and run.outcomes["train"].key


def test_a_job_is_at_work_until_its_end_is_noted(tmp_path):
    key = "0123456789abcdef"
    assert not _at_work(tmp_path, key) and not _at_work(tmp_path, None)
    folder = tmp_path / "jobs" / f"train-{key[:12]}"
    write_json(folder / "job.json", {})
    assert _at_work(tmp_path, key) and not _at_work(tmp_path, "f" * 16)
    write_json(folder / "settled.json", {"outcome": "done"})
    assert not _at_work(tmp_path, key)
