"""The shipped training program on a real Slurm of three nodes: a node is killed in the middle, the job goes on without it."""

import json
import threading
import time

import pytest
from elastic_material import write_tokens
from slurm_jobs import reachable
from slurm_stand import slurm
from waiting import limit

from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig
from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

STEPS, EVERY = 400, 20
TRAINING = TrainingConfig(
    network=NetworkConfig(layers=2, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64),
    sequence_length=64,
    global_batch_size=8,
    micro_batch_size=2,
    steps=STEPS,
    warmup_steps=4,
    learning_rate=1e-2,
)


@pytest.fixture(scope="module")
def stand():
    with slurm(3) as stand, reachable(stand):
        yield stand


@pytest.fixture
def tokens(tmp_path):
    return write_tokens(tmp_path / "tokens")


def records(folder):
    log = folder / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.long
def test_killed_node_is_named_left_out_and_training_goes_on_from_its_checkpoint(tmp_path, stand, tokens):
    settings = {"training": TRAINING.model_dump(mode="json"), "checkpoint_every_steps": EVERY, "keep_checkpoints": 2}
    config = ClusterConfig.model_validate(
        {
            "backend": "slurm",
            "nodes": 2,
            "slurm": {"requeue": False},
            "retry": {"back_off_seconds": 0.5},
            "watch": {"hang_seconds": 120.0},
        }
    )
    job = Job(
        name="train",
        token="7" * 64,
        program="tasks.jobs.train",
        settings=settings,
        inputs={"tokens": str(tokens)},
        nodes=2,
        retry=config.retry,
        watch=config.watch,
        progress="checkpoints/LATEST",
    )
    folder, journal = tmp_path / "job", StoreJournal(open_store(tmp_path))
    killed = threading.Thread(target=_kill, args=(stand, folder), daemon=True)
    killed.start()
    result = run(job, backend=open_backend(config), folder=folder, journal=journal, watch=Watch())
    killed.join()
    assert result.submissions == 2
    assert result.excluded_nodes == ("n2",)
    assert result.resumed_from_step and result.resumed_from_step % EVERY == 0
    ends = [journal.get(key) for key in journal.list(f"jobs/{job.token}/") if key.endswith("/end")]
    assert "node" in json.dumps(ends)
    said = records(folder)
    assert said[-1]["step"] == STEPS - 1 or said[-1]["step"] == STEPS
    names = {json.loads(path.read_text())["name"] for path in folder.glob("nodes/*/node.json")}
    assert names == {"n1", "n3"}


def _kill(stand, folder):
    """Kill the second machine once there is a checkpoint."""
    deadline = time.monotonic() + limit(120)
    while not list(folder.glob("checkpoints/*/manifest.json")) and len(records(folder)) < 3 * EVERY:
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
    stand.kill_node("n2")
