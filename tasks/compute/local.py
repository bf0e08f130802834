"""The local backend: torchrun on this machine, under a small parent that outlives the orchestrator.

A job of one rank needs no rendezvous and is started directly. See tasks/process.py for the parent.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tasks import process
from tasks.compute.job import Job, JobState, write_folder

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def render(job: Job, folder: Path) -> process.ProcessSpec:
    """What would be started, as a value."""
    ranks = job.nodes * job.ranks_per_node
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", job.program]
    threads = str(job.threads_per_rank)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return process.ProcessSpec(
        argv=[sys.executable, *(torchrun if ranks > 1 else ["-m", job.program])],
        env={"HEADWAY_JOB": str(folder), "OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": loopback, **QUIET},
        secrets=(),
        log="launcher.log",
        restarts=job.restarts,
        progress=job.progress,
        fatal="errors",
        time_limit=job.time_limit,
    )


class LocalBackend:
    """torchrun on this machine."""

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        write_folder(job, folder)
        return process.start(folder, render(job, folder))

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        handle: dict[str, Any] | None = process.read_json(folder / "handle.json")
        return handle

    def state(self, handle: dict[str, Any], folder: Path) -> JobState:
        running = process.alive(handle)
        ended = process.read_json(folder / "exit.json")
        if ended and not running:
            return JobState(state="ended", code=ended["code"], reason=ended["reason"], attempts=ended["attempts"])
        return JobState(state="running" if running else "lost")

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        process.stop(folder)

    def logs(self, folder: Path) -> str:
        """Of the rank that reported first, else the launcher's; a rank that a signal killed reports nothing."""
        reports = sorted((folder / "errors").glob("rank-*.json"), key=lambda path: path.stat().st_mtime)
        failing = [folder / "logs" / f"{report.stem}.log" for report in reports[:1]]
        tails = map(_tail, [*failing, folder / "launcher.log", folder / "logs" / "rank-0.log"])
        return next(filter(None, tails), "")


def _tail(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.is_file() else ""
