"""`headway retrain --continue-from JOB`: refused with the diff before anything is spent, forced with a reason, audited, told.

What the job does with the checkpoint: tests/tasks/jobs/test_continuing.py.
"""

import json

import mlflow
import pytest
from support import publish_tiny

TRAINING = ("--set", "training.steps=4000", "--to", "train")


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


@pytest.mark.long
def test_a_stopped_run_is_gone_on_from_on_purpose(fresh):
    publish_tiny(fresh)
    command = fresh.start("retrain", "-c", "tiny", *TRAINING, "--json")
    manifest = fresh.wait_for("jobs/train-*/checkpoints/step-*/attempt-1/manifest.json", timeout=240)
    job = manifest.parents[3].name
    fresh.ok("job", "cancel", job)
    command.communicate(timeout=120)
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
    assert never.code == 2 and "also not with --force: another network: training.network.layers" in never.stderr

    forced = (*slower, "--continue-from", job, "--force", "--reason", "the loss was rough")
    ran = fresh.retrain(*forced)
    assert ran.code == 0, ran.stderr
    train = ran.stage("train")
    step = train["job"]["resumed_from_step"]
    assert step and f"goes on from step {step} of {job}" in ran.stderr
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
