"""`headway retrain --continue-from JOB`: refused with the diff before anything is spent, forced with a reason, audited, told.

What the job does with the checkpoint: tests/integration/tasks/jobs/checkpoint/test_continuing.py.
"""

import hashlib
import json
import shutil
from pathlib import Path

import mlflow
import pytest
from support import publish_tiny
from waiting import limit

from flows.support.agreement import beginnings
from flows.support.continuing import Start, require_possible, start_of
from tasks.artifacts import Tokens
from tasks.common.errors import Refused
from tasks.compute.job import Job
from tasks.config.continue_from import ContinueFrom, Origin
from tasks.config.flows import RetrainConfig
from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.choice import identity
from tasks.jobs.checkpoint.files import Manifest, commit, digest, place_of
from tasks.lineage import spool
from tasks.orchestration.run import lifecycle
from tasks.registry.approvals import asked_about
from tasks.registry.versions import publish
from tasks.security.audit import acting
from tasks.security.policy import add_person
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

TRAINING = ("--set", "training.steps=4000", "--to", "train")


def test_who_agreed_to_a_training_agreed_to_what_it_begins_with():
    """The plan does not hold it: from another run's weights, or with other tokens beside its own, it is another training."""
    origin = Origin(job="train-1", step=5, sha256="a" * 64)
    others = (Tokens(name="other", version="b" * 64, uri=""),)
    later = origin.model_copy(update={"step": 6})
    asked = [beginnings(*beside) for beside in (((), None), ((), origin), ((), later), (others, None))]
    assert len({asked_about("train", f"plan/tiny@{'c' * 64}", terms) for terms in asked}) == 4


def test_a_job_that_there_is_not(fresh):
    publish_tiny(fresh)
    ran = fresh.retrain("--continue-from", "train-abcdef123456")
    assert ran.code == 2 and "no job 'train-abcdef123456'" in ran.stderr and "headway jobs" in ran.stderr
    ran = fresh.retrain("--continue-from", "./nowhere", "--dry-run")
    assert ran.code == 2 and "is no job's folder" in ran.stderr


@pytest.mark.parametrize(
    "words, said",
    [
        (("--force",), "are for --continue-from JOB"),
        (("--force", "--reason", "because"), "are for --continue-from JOB"),
        (("--continue-from", "train-abcdef123456", "--force"), "say why: --reason TEXT"),
    ],
)
def test_a_force_needs_a_job_and_a_reason(fresh, words, said):
    ran = fresh.retrain("--dry-run", "--dataset", "tiny", *words)
    assert ran.code == 2 and said in ran.stderr


def test_the_help_says_that_another_reason_chooses_anew():
    from typer.main import get_command

    from deployments.cli.main import app

    said = {option.name: option.help for option in get_command(app).commands["retrain"].params}
    assert "Another reason chooses a checkpoint again" in said["reason"]


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """Those of a home of their own, which commands and jobs of this test go on in."""
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(spool, "start_publisher", lambda folder: None)  # nobody looks into MLflow
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "tokens.json").write_text("{}")
    made = publish(open_store(tmp_path / "home"), folder, kind="tokens", inputs=(), provenance=Provenance(name="t"))
    return Tokens(name="t", version=made.version, uri="")


@pytest.fixture
def other(tmp_path, tokens):
    """The folder of a job with a checkpoint of step 4."""
    job = Job(
        name="train",
        token="a" * 64,
        program="tasks.jobs.train",
        settings={},
        inputs={},
        artifacts={"tokens": tokens.ref},
    )
    folder = tmp_path / "elsewhere" / job.id
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(job.model_dump_json())
    save(folder, 4, tokens)
    return folder


def save(job, step, tokens, attempt=1):
    shard = place_of(job / "checkpoints", step, attempt) / "shard-0.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"weights")
    entry = {"path": shard.name, "size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    wanted = identity(TrainingConfig(steps=100), {"tokens": tokens.version})
    commit(job / "checkpoints", Manifest(step, attempt, 8 * step, wanted, digest(wanted), [entry]))


def begun(job, tokens, *, dry=False, steps=100, **asked):
    """What training would begin with, as one start of the flow finds it out."""
    config, ask = RetrainConfig(training=TrainingConfig(steps=steps)), ContinueFrom(job=str(job), **asked)
    with lifecycle("retrain", config, subject="m", stages=("train",), dry=dry) as run:
        require_possible(run.home, run.store, ask, config)
        origin, taking = start_of(ask, config, tokens=tokens, base=None, mixed=())
        return Start(origin=origin, taking=taking)


def marks(job):
    return [Path(path).relative_to(job / "checkpoints").parts[0] for path in job.glob("checkpoints/*/*/kept-for-*")]


def test_the_same_command_begins_with_the_same_checkpoint(other, tokens):
    assert begun(other, tokens, dry=True).origin.step == 4 and not marks(other), "a dry run chooses nothing"
    first = begun(other, tokens)
    assert first.origin.step == 4 and marks(other) == ["step-00000004"]
    save(other, 8, tokens)
    assert begun(other, tokens) == first == begun(other, tokens, dry=True)
    anew = begun(other, tokens, reason="its newest")
    assert anew.origin.step == 8 and anew.taking.kept_for == first.taking.kept_for
    shutil.rmtree(other / "checkpoints")
    assert begun(other, tokens) == first, "train is recorded by then, or its job says what is gone"
    with pytest.raises(ValueError, match="has no checkpoints left"):
        begun(other, tokens, reason="once more")


def test_what_is_refused_keeps_and_chooses_nothing_and_is_refused_again_after_a_force(other, tokens):
    newer = tokens.model_copy(update={"version": "f" * 64})
    with pytest.raises(ValueError, match="is not in this store"):
        begun(other, newer)
    with pytest.raises(ValueError, match="training.steps is 100 in the checkpoint, 200 now"):
        begun(other, tokens, steps=200)
    assert not marks(other) and not open_store(other.parents[1] / "home").list("origins")
    assert begun(other, tokens, steps=200, force=True, reason="longer").origin.step == 4
    with pytest.raises(ValueError, match="--force --reason"):
        begun(other, tokens, steps=200)


def test_where_a_policy_holds_weights_from_elsewhere_take_the_right_to_publish(other, tokens, tmp_path):
    """What training makes is signed, whatever it began with; a job of the home is one that ran there."""
    home = tmp_path / "home"
    add_person(home, "anna", ())  # the first one gets every right
    add_person(home, "ben", ("run",))
    with acting("ben"), pytest.raises(Refused, match="ben may not publish"):
        begun(other, tokens)
    inside = shutil.copytree(other, home / "jobs" / other.name)
    (home / "jobs" / "led-out").symlink_to(other)
    with acting("ben"), pytest.raises(Refused, match="ben may not publish"):
        begun(home / "jobs" / "led-out", tokens)
    (tmp_path / "way").symlink_to(inside)
    with acting("ben"):
        start = begun(tmp_path / "way", tokens)
    assert start.origin.step == 4 and start.taking.folder == str(inside.resolve() / "checkpoints"), "not by the link"


def test_where_a_policy_holds_a_choice_that_lies_in_the_store_alone_chooses_nothing(other, tokens, tmp_path):
    home, store = tmp_path / "home", open_store(tmp_path / "home")
    inside = shutil.copytree(other, home / "jobs" / other.name)
    first = begun(inside, tokens)
    [key] = store.list("origins")
    forged = first.model_copy(update={"taking": first.taking.model_copy(update={"folder": "/elsewhere"})})
    document = store.read(key)
    assert store.replace(key, forged.model_dump_json().encode(), etag=document.etag)
    add_person(home, "anna", ())
    with acting("anna"):
        assert begun(inside, tokens) == first
    shutil.rmtree(home / "origins")
    with acting("anna"):
        assert begun(inside, tokens, dry=True).taking.folder == first.taking.folder, "it is looked at anew"


@pytest.mark.long
def test_a_stopped_run_is_gone_on_from_on_purpose(fresh):
    publish_tiny(fresh)
    command = fresh.start("retrain", "-c", "tiny", *TRAINING, "--json")
    manifest = fresh.wait_for("jobs/train-*/checkpoints/step-*/attempt-1/manifest.json", timeout=240)
    job = manifest.parents[3].name
    fresh.ok("job", "cancel", job)
    command.communicate(timeout=limit(120))
    last = max(int(path.name.removeprefix("step-")) for path in manifest.parents[2].glob("step-*"))
    steps = last + 60
    slower = ("--set", "training.learning_rate=0.001", "--set", f"training.steps={steps}", "--to", "train")

    refused = fresh.retrain(*slower, "--continue-from", job)
    assert refused.code == 2, refused.stderr
    assert "training.learning_rate is 0.004 in the checkpoint, 0.001 now" in refused.stderr
    assert (
        f"training.steps is 4000 in the checkpoint, {steps} now" in refused.stderr
        and "--force --reason" in refused.stderr
    )
    assert len(list(fresh.path.glob("jobs/train-*"))) == 1, "nothing was spent"

    never = fresh.retrain(
        "--set",
        "training.network.layers=3",
        "--set",
        "training.steps=9000",
        "--continue-from",
        job,
        "--force",
        "--reason",
        "try",
    )
    assert never.code == 2 and "not even with --force: another network: training.network.layers" in never.stderr

    forced = (*slower, "--continue-from", job, "--force", "--reason", "the loss was rough")
    ran = fresh.retrain(*forced)
    assert ran.code == 0, ran.stderr
    train = ran.stage("train")
    step = train["job"]["resumed_from_step"]
    assert step and f"continues from step {step} of {job}" in ran.stderr
    entry = next(e for e in fresh.ok("audit-log").said["entries"] if e["action"] == "continue from another run")
    assert entry["reason"] == "the loss was rough" and f"step {step} of {job}" in entry["what"]
    assert json.loads(entry["before"])["training.learning_rate"] == 0.004
    assert json.loads(entry["after"])["training.learning_rate"] == 0.001
    told = json.loads((fresh.folder_of(train["outputs"][0]) / "files/training.json").read_text())
    assert told["continued_from"]["job"] == job and told["continued_from"]["step"] == step
    assert told["continued_from"]["sha256"] in entry["what"]

    mlflow.set_tracking_uri(f"sqlite:///{fresh.path}/mlflow/mlflow.db")
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    params = next(run.data.params for run in runs if run.data.tags.get("headway.key") == train["key"])
    assert (params["origin.job"], params["origin.step"]) == (job, str(step))
    assert params["origin.sha256"] == told["continued_from"]["sha256"]

    assert fresh.retrain(*forced).statuses()["train"] == "reused"
    anew = fresh.run("retrain", "-c", "tiny", *slower, "--dry-run")
    assert next(stage for stage in anew.said["stages"] if stage["name"] == "train")["status"] == "pending"
