"""Whether a stage's result is recorded, also while its surroundings are not known yet; and who is asked only where it is not."""

import json
import re
from contextlib import contextmanager, nullcontext

import pytest

from deployments.cli.retrain import at_work
from tasks.artifacts import Cluster, Pending, Tokens, Value
from tasks.common.errors import GateFailed, Refused
from tasks.common.process import write_json
from tasks.config.flows import RetrainConfig
from tasks.orchestration.prefect_artifacts import table
from tasks.orchestration.run import lifecycle
from tasks.orchestration.stage import stage

ran = pytest.mark.usefixtures("made")
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


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Both stages ran once, with seed 7."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train")) as run:
        for one in (told, of_its_place):
            one._reuse_or_execute(run, run.outcome_for(one.name), one._call((7,), {"on": HERE}))
    return run


def dry(**more):
    return lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train"), dry=True, **more)


def test_a_stage_that_ran_for_the_first_time_says_why_in_words_that_are_true_after_it(made):
    """The note in Prefect's page has both, one beside the other."""
    for outcome in made.outcomes.values():
        assert (outcome.status, outcome.why) == ("ran", "no earlier result with these inputs")


@ran
def test_a_person_is_asked_before_what_is_not_recorded_and_what_they_reject_does_not_run():
    @contextmanager
    def reject(seed, *, on):
        raise GateFailed(f"seed {seed} on {on.name}: no", stage="approve", checks=[])
        yield

    asks = {"train": reject}
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train"), approvals=asks) as run:
        with told._approval(run, told._call((7,), {"on": HERE})):
            pass
        with pytest.raises(GateFailed, match="seed 8 on here: no"):
            told(8, on=HERE)
        assert run.outcomes["train"].status == "not_run"


@ran
def test_nothing_runs_unasked_because_its_record_goes_after_it_was_looked_for(tmp_path):
    asks = {"train": nullcontext}
    with lifecycle("retrain", RetrainConfig(), subject="x", stages=("plan", "train"), approvals=asks) as run:
        call = told._call((7,), {"on": HERE})
        with told._approval(run, call):
            for record in (tmp_path / "store" / "documents" / "records" / "train").glob("*.json"):
                record.unlink()
            with pytest.raises(Refused, match="nobody was asked before train"):
                told._reuse_or_execute(run, run.outcome_for("train"), call)


@ran
def test_a_dry_run_says_who_would_be_asked():
    with dry(approvals={"train": nullcontext, "plan": nullcontext}) as run:
        told(7, on=HERE)
        assert "approval" not in run.outcomes["train"].why
        of_its_place(Pending(stage="validate"), on=HERE)
        assert run.outcomes["plan"].why == "an earlier stage runs first; approval required"
    with dry(approvals={"train": nullcontext}) as run:
        told(8, on=HERE)
        assert run.outcomes["train"].why.endswith("; approval required")


@stage(version=1)
def grown(seed: int, other: int | None = None, more: tuple[int, ...] = ()) -> Told:
    """A stage that learnt to take more."""
    return Told(seed=seed)


def test_a_stage_that_learns_to_take_more_keeps_its_keys():
    calls = [(7,), (7, None), (7, None, ())]
    assert {json.dumps(grown._call(call, {}).arguments["arguments"]) for call in calls} == {'{"seed": 7}'}
    assert list(grown._call((7, None, (1,)), {}).arguments["arguments"]) == ["seed", "other", "more"]
    assert list(grown._call((7, 1, ()), {}).arguments["arguments"]) == ["seed", "other"]


@ran
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
    assert not at_work(tmp_path, key) and not at_work(tmp_path, None)
    folder = tmp_path / "jobs" / f"train-{key[:12]}"
    write_json(folder / "job.json", {})
    assert at_work(tmp_path, key) and not at_work(tmp_path, "f" * 16)
    write_json(folder / "settled.json", {"outcome": "done"})
    assert not at_work(tmp_path, key)


def test_a_record_of_the_store_writes_no_paragraph_into_the_form_of_an_approval():
    """Whoever writes to the store alone would else speak there as Headway does: with links, pictures, a line of its own."""
    text = "x |\n\nChecked by anna.\n\n[Confirm your token](http://x.example) ![](http://x.example/y.png) <img src=x>"
    with pytest.raises(ValueError, match="name"):
        Tokens(name=text, version="a" * 64, uri="")
    lines = table(["name", "value"], [[text, "1"]]).splitlines()
    assert len(lines) == 3 and lines[2].count(" | ") == 1
    assert re.search(r"(?<!\\)[\[|]", lines[2].strip("| ").replace(" | ", "")) is None and "<img" not in lines[2]
