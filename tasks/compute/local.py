"""The local backend: this machine, under a small parent that outlives the orchestrator.

What runs under the parent is tasks/jobs/node/__main__.py, as on every backend. See tasks/common/process.py for the parent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.compute.job import Job, JobState, Rendered, write_folder
from tasks.compute.nodes import AGENT_SECONDS, Finding, Machines, clean_up, execute_on_this_machine
from tasks.config.cluster import ClusterConfig


def spec(job: Job, folder: Path) -> process.ProcessSpec:
    """What the parent is told."""
    return process.ProcessSpec(
        argv=[job.python or sys.executable, "-m", "tasks.jobs.node", str(folder)],
        env={"HEADWAY_NODE_RANK": "0", "HEADWAY_SUBMISSION": str(job.submission), "HEADWAY_LIMITS": "1"},
        secrets=(),
        log="launcher.log",
        restarts=job.restarts,
        progress=job.progress,
        fatal="errors",
        time_limit=job.time_limit,
        grace=job.watch.grace_seconds + AGENT_SECONDS,
        afterwards=clean_up(job, folder, 0),
    )


class LocalMachines(Machines):
    """This machine, which is there."""

    def findings(self) -> Iterator[Finding]:
        yield "backend local", True, f"this machine, {self.config.ranks_per_node} rank(s)", ""

    def execute(self, node: str, script: str, *, handle: Mapping[str, Any]) -> None:
        execute_on_this_machine(node, script)


class LocalBackend:
    """This machine."""

    poll_seconds = 0.1

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config

    def render(self, job: Job, folder: Path) -> Rendered:
        process = spec(job, folder)
        return Rendered(backend="local", command=tuple(process.argv), environment=process.env)

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        write_folder(job, folder)
        return process.start(folder, spec(job, folder))

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        handle: dict[str, Any] | None = process.read_json(folder / "handle.json")
        return handle

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        states = []
        for handle, folder in jobs:
            running, ended = process.alive(handle), process.read_json(folder / "exit.json")
            if ended and not running:
                fields = {"code": ended["code"], "reason": ended["reason"], "attempts": ended["attempts"]}
                states.append(JobState(state="ended", **fields))
            else:
                states.append(JobState(state="running" if running else "lost"))
        return states

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        process.stop(folder)
