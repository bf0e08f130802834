"""The shipped training on two nodes of Azure ML that share no folder: taken away once, submitted again, and finished."""

import json
import threading
import time
from functools import partial
from pathlib import Path

import elastic_material
import pytest
import yaml
from azureml_service import cluster
from azureml_stand import standing

import deployments
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.submission import HOME_DIGITS, home_of
from tasks.compute.supervisor import run
from tasks.config.training import TrainingConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

STEPS, EVERY = 400, 40
TINY = Path(deployments.__file__).with_name("configs") / "tiny.yaml"


@pytest.fixture
def stand(tmp_path):
    with standing(tmp_path) as stand:
        stand.service.clusters = {"cpu": cluster(vmPriority="LowPriority")}
        yield stand


def training_job(stand, tokens):
    """What tiny.yaml trains, for more steps: long enough for two seconds between two looks at a folder to be short."""
    said = yaml.safe_load(TINY.read_text())["training"]
    config = TrainingConfig.model_validate({**said, "steps": STEPS})
    made = open_store(stand.home).publish(tokens, kind="tokens", inputs=(), provenance=Provenance(name="tiny"))
    settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": EVERY, "keep_checkpoints": 2}
    fields = {"token": "a2" * 16, "program": "tasks.jobs.train", "progress": "checkpoints/LATEST"}
    inputs = {"inputs": {"tokens": str(tokens)}, "artifacts": {"tokens": made.ref}}
    job = Job(name="train", settings=settings, nodes=2, preemptible=True, **fields, **inputs)
    return job.model_copy(update={"home": home_of(stand.home / "jobs" / job.id)[:HOME_DIGITS]})


def take_away(stand, job, said, *, once_there):
    """Preempt the first submission as soon as a checkpoint lies in the store."""
    name = job.submission_id
    while not any(path.endswith(once_there) for path in stand.lying(job)):
        time.sleep(0.1)
    said["metrics before"] = list(said["metrics"])
    said["status before"] = stand.service.record(name).status
    stand.service.preempt(name)


@pytest.mark.long
def test_training_goes_on_after_its_nodes_were_taken_away(stand, tmp_path):
    (tmp_path / "tokens").mkdir()
    tokens = elastic_material.write_tokens(tmp_path / "tokens")
    job = training_job(stand, tokens)
    backend, folder = stand.backend(nodes=2, preemptible=True), stand.home / "jobs" / job.id
    backend.poll_seconds = 0.5
    said = {"metrics": [], "events": []}
    watch = Watch(metrics=said["metrics"].extend, event=said["events"].append)
    taking = threading.Thread(target=partial(take_away, stand, job, said, once_there="manifest.json"), daemon=True)
    taking.start()
    done = run(job, backend=backend, folder=folder, journal=StoreJournal(open_store(stand.home)), watch=watch)
    taking.join()
    assert said["status before"] == "Running" and said["metrics before"], "metrics came while it ran"
    assert stand.service.submitted == [job.submission_id, job.submission_id[:-1] + "2"], said["events"]
    assert "taken away" in str(next(event for event in said["events"] if event.kind == "retrying").text), said["events"]
    assert done.submissions == 2 and done.resumed_from_step >= EVERY and done.resumed_from_step % EVERY == 0
    steps = {int(record["step"]) for record in said["metrics"]}
    assert steps == set(range(1, STEPS + 1)), "no metric of any step was lost"
    assert (done.output / "training.json").exists()
    log = [json.loads(line)["step"] for line in (done.output / "training_log.jsonl").read_text().splitlines()]
    assert log == list(range(1, STEPS + 1)), "the second set of nodes had the first one's records"
    assert not [path for path in stand.lying(job) if "shard" in path], "nobody needs the checkpoints of a finished job"
