"""The process that holds the store where the machines of an elastic job meet, and what it says of the submission's end.

The program is tasks/jobs/node/rendezvous.py. It runs on the machine that jobs are submitted from, outlives the orchestrator, and
its `rendezvous/exit.json` is how the submission ended. Which backends take elastic jobs: tasks/config/backends. See
docs/elastic.md.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

from tasks.common import process
from tasks.common.errors import Missing
from tasks.compute.job import Job, JobState
from tasks.compute.nodes import node_environment, python

RESTARTS = 5
STEADY_SECONDS = 60.0
FIND_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def spec(job: Job, folder: Path) -> process.ProcessSpec:
    """What the parent of the store's holder is told; `folder` is the job's as that machine sees it."""
    return process.ProcessSpec(
        argv=[python(job), "-m", "tasks.jobs.node.rendezvous", str(folder)],
        env=node_environment(job),
        secrets=(),
        log="rendezvous.log",
        restarts=RESTARTS,
        steady=STEADY_SECONDS,
        owner=job.submission_id,
    )


def open_rendezvous(job: Job, folder: Path) -> None:
    """Start the store's holder on this machine; what an earlier submission left of one is gone. It runs on when it runs.

    Raises Missing when Python here has no torch.
    """
    place = folder / "rendezvous"
    if (process.read_json(place / "process.json") or {}).get("owner") != job.submission_id:
        process.stop(place)
        shutil.rmtree(place, ignore_errors=True)
    require_torch(python(job))
    process.start(place, spec(job, folder))


def write_rendezvous(job: Job, folder: Path, *, seen: Path) -> None:
    """Write what `python -m tasks.common.process SEEN/rendezvous` needs on another machine, where the folder is `seen`."""
    process.write_json(folder / "rendezvous" / "process.json", asdict(spec(job, seen)))


def require_torch(interpreter: str) -> None:
    """Raises Missing when a Python has no torch."""
    try:
        exists = subprocess.run([interpreter, "-c", FIND_TORCH], capture_output=True, check=False).returncode == 0
    except OSError:
        exists = False
    if not exists:
        raise Missing(
            f"an elastic job's machines meet at a store of torch on this machine, and {interpreter} has no torch",
            remedy="Set cluster.python to a Python that has torch, here and on the nodes: pip install -e '.[cluster]'.",
        )


def ended_state(folder: Path) -> JobState | None:
    """How an elastic submission ended; None while it lives."""
    if noted := process.read_json(folder / "rendezvous" / "over.json"):
        return JobState.model_validate(noted)
    ended = process.read_json(folder / "rendezvous" / "exit.json")
    if not ended:
        return None
    return JobState(state="ended", code=ended["code"], reason=ended["reason"], attempts=attempts(folder))


def note_end(folder: Path, state: JobState) -> None:
    """Write down that a submission ended because no machine was left, which the holder of the store cannot know."""
    process.write_json(folder / "rendezvous" / "over.json", state.model_dump(mode="json"))


def attempts(folder: Path) -> int:
    """The most starts that one machine made."""
    counts = [(process.read_json(path) or {}).get("attempts", 1) for path in (folder / "nodes").glob("*/attempts.json")]
    return max(counts, default=1)
