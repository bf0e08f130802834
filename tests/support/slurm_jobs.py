"""Small jobs for tests on the stand of slurm_stand.py: a program without torch, its job, and waiting for a state."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_stand import SlurmStand
from waiting import limit

from tasks.compute.job import Job, JobState
from tasks.compute.nodes import ended_state
from tasks.compute.slurm.backend import SlurmBackend
from tasks.config.cluster import ClusterConfig

PROGRAM = """
import os, signal, sys, time
from tasks.jobs.node.runtime import main

asked = []

def run(rank):
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    for step in range(rank.settings["steps"]):
        rank.metrics(step=step, node=os.environ["HEADWAY_NODE_NAME"], restart=os.environ.get("SLURM_RESTART_COUNT", "0"))
        time.sleep(0.1)
        if asked:
            (rank.folder / "saved").write_text(str(step))
            raise SystemExit(75)
    return {"node": os.environ["HEADWAY_NODE_NAME"], "index": os.environ.get("HEADWAY_ARRAY_INDEX"), "attempt": rank.attempt}

if __name__ == "__main__":
    sys.exit(main(run))
"""


@contextmanager
def reachable(stand: SlurmStand) -> Iterator[SlurmStand]:
    """Let commands that this process starts find the stand."""
    before = {name: os.environ.get(name) for name in stand.environment}
    os.environ.update(stand.environment)
    try:
        yield stand
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def small(folder: Path, steps: int = 5, **changes: Any) -> Job:
    """A job of one rank; its folder is to be `folder / "job"`."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    token = f"{abs(hash(str(folder))):064x}"[-64:]
    facts = {"name": "small", "token": token[::-1], "settings": {"steps": steps}, "inputs": {}}
    return Job(program=str(program), module=False, **{**facts, **changes})


def slurm_backend(**section: Any) -> SlurmBackend:
    return SlurmBackend(ClusterConfig.model_validate({"backend": "slurm", "slurm": section}))


def until(
    backend: SlurmBackend,
    handle: dict[str, Any],
    folder: Path,
    wanted: Callable[[JobState], bool],
    seconds: float = 60.0,
) -> list[JobState]:
    """Look until a state is wanted; every state that was seen, without repetitions."""
    seen: list[JobState] = []
    deadline = time.monotonic() + limit(seconds)
    while not (seen and wanted(seen[-1])):
        state = backend.states([(handle, folder)])[0]
        if not seen or state != seen[-1]:
            seen.append(state)
        log = folder / "launcher.log"
        said = log.read_text()[-2000:] if log.exists() else ""
        assert time.monotonic() < deadline, f"{seen}\nmark: {ended_state(folder)}\n{said}"
        time.sleep(0.25)
    return seen


def over(state: JobState) -> bool:
    return state.over


def running(state: JobState) -> bool:
    return state.state == "running"
