"""A training job that is killed at random moments gives the numbers of an unbroken one: `make soak N=100 SEED=1`.

Each round kills one rank, both ranks, the process that writes checkpoints, torchrun, the machine's agent or the small parent with
SIGKILL, at a random step, one to three times.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from waiting import limit

from tasks.common import process
from tasks.compute.job import Job
from tasks.compute.local import LocalBackend
from tasks.compute.logs import tail_of_failure
from tasks.config.cluster import ClusterConfig

ROUNDS, SEED = int(os.environ.get("N", "2")), int(os.environ.get("SEED", "1"))
STEPS = 120
VICTIMS = ("rank", "ranks", "writer", "launcher", "agent", "parent")


@pytest.fixture(scope="module")
def job(home, done):
    """The tiny training job, as the stage rendered it, with checkpoints every ten steps."""
    spec = json.loads(next(home.path.glob("jobs/train-*/config.json")).read_text())
    settings = {**spec["settings"], "checkpoint_every_steps": 10}
    settings["training"] = {**settings["training"], "steps": STEPS}
    return Job(
        name="train",
        token="0" * 32,
        program="tasks.jobs.train",
        settings=settings,
        inputs=spec["inputs"],
        ranks_per_node=2,
        restarts=3,
        progress="checkpoints/LATEST",
    )


@pytest.fixture(scope="module")
def unbroken(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    LocalBackend(ClusterConfig()).submit(job, folder)
    finish(job, folder)
    return numbers(folder), outputs(folder)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(ROUNDS))
def test_random_kills_change_no_number(job, unbroken, tmp_path, number):
    dice = random.Random(f"{SEED}-{number}")
    LocalBackend(ClusterConfig()).submit(job, tmp_path)
    killed = [
        kill(tmp_path, dice.choice(VICTIMS), dice.randrange(1, STEPS - 5), job) for _ in range(dice.randrange(1, 4))
    ]
    finish(job, tmp_path)
    print(f"\nround {number}: killed {', '.join(killed)}", file=sys.stderr)
    assert (numbers(tmp_path), outputs(tmp_path)) == unbroken
    assert not process.alive(process.read_json(tmp_path / "handle.json"))


def kill(folder: Path, what: str, step: int, job: Job) -> str:
    """Wait until a step, then kill; a run that is over by then is left alone."""
    while newest(folder) < step and process.alive(process.read_json(folder / "handle.json")):
        time.sleep(0.02)
    handle = process.read_json(folder / "handle.json")
    if not process.alive(handle):
        return "nothing"
    ranks = [rank["pid"] for rank in handle["ranks"]]
    parent = int(handle["pid"])
    below = process.descendants(parent)
    victims = {
        "rank": ranks[:1],
        "ranks": ranks,
        "writer": [pid for pid in below if runs(pid, "tasks.jobs.checkpoint.writer")][:1],
        "launcher": [pid for pid in below if runs(pid, "torch.distributed.run")],
        "agent": [pid for pid in below if runs(pid, "tasks.jobs.node")],
        "parent": [parent],
    }
    for pid in victims[what]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if what == "parent":
        time.sleep(0.5)
        assert not any(process.process_started(pid) for pid in ranks), "ranks outlive their parent"
        LocalBackend(ClusterConfig()).submit(job, folder)
    return f"{what} at step {newest(folder)}"


def runs(pid: int, module: str) -> bool:
    """Whether a process runs a module; one that is gone runs none."""
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def finish(job: Job, folder: Path) -> None:
    deadline = time.monotonic() + limit(240)
    while not (folder / "result.json").exists() or process.alive(process.read_json(folder / "handle.json")):
        assert time.monotonic() < deadline, tail_of_failure(folder)
        if not process.alive(process.read_json(folder / "handle.json")) and not (folder / "result.json").exists():
            LocalBackend(ClusterConfig()).submit(job, folder)
        time.sleep(0.1)


def newest(folder: Path) -> int:
    return max(numbers(folder), default=0)


def numbers(folder: Path) -> dict[int, list[float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {r["step"]: [r["loss"], r["learning_rate"], r["grad_norm"]] for r in records}


def outputs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
