"""Whether the process that works on a flow run is alive, judged from this host. Nothing is changed here.

Prefect stores a bare process number and no host (infrastructure_pid). So three things are put together: `handle.json` of the
run's folder (process, start time, boot, host), which is sure; the worker's name on the flow run, which holds the host
(deployments/services/worker.py); and the environment of the process with Prefect's number, which names the flow run.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect.client.schemas.objects import FlowRun

from deployments.services.flow_runs import at
from tasks.common import process
from tasks.orchestration.run_log import LoggedRun, read_run

WORKER = "headway-"
"""Our workers are called so, and the host's name follows."""


@dataclass(frozen=True)
class Sighting:
    """What is seen of a flow run's process."""

    verdict: Literal["alive", "gone", "unclear", "elsewhere"]
    """unclear: none was found, but one may be about to start. elsewhere: another host's, or nobody can tell whose."""
    words: str = ""
    log: LoggedRun | None = None
    """What this very attempt wrote down; None when it did not come so far."""


def look(home: Path, run: FlowRun, began: Callable[[], float]) -> Sighting:
    """Look for the process of a flow run. `began` tells when its newest attempt was taken up; it is asked only when needed.

    A handle that is older than that belongs to an earlier attempt of the same flow run, and says nothing about this one.
    """
    here = socket.gethostname()
    log = read_run(home / "runs" / str(run.id))
    logged_here = log.handle.get("host") == here
    host = worker_host(run) or log.handle.get("host")
    if host not in (None, here):
        return Sighting("elsewhere", f"it ran on {host}")
    if logged_here and process.alive(log.handle):
        return Sighting("alive")
    opened = log.last("opened")
    if logged_here and opened and opened["time"] >= began():
        return Sighting("gone", f"its process {log.handle['pid']} on {here} is gone{_last_sign(log)}", log)
    if run.infrastructure_pid and _works_on(run.infrastructure_pid, run):
        return Sighting("alive")
    if host is None and not (run.state and run.state.is_pending()):
        return Sighting("elsewhere", "nobody knows where it ran")
    if run.infrastructure_pid:
        return Sighting("unclear", f"its process {run.infrastructure_pid} on {here} is gone")
    return Sighting("unclear", "the worker died before it started a process")


def worker_host(run: FlowRun) -> str | None:
    """The host of the worker that took the flow run up; None when none of ours did."""
    name = str((run.labels or {}).get("prefect.worker.name", ""))
    return name.removeprefix(WORKER) if name.startswith(WORKER) else None


def _works_on(pid: str, run: FlowRun) -> bool:
    """Whether the process works on this flow run; process numbers are reused, so its environment is asked where it can be."""
    if not pid.isdecimal() or process.process_started(int(pid)) is None:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not Path("/proc/self/environ").exists()
    return f"PREFECT__FLOW_RUN_ID={run.id}".encode() in environment.split(b"\0")


def _last_sign(log: LoggedRun) -> str:
    """Where it was, and when it last said something."""
    started, ended = log.last("started"), log.last("ended")
    stage = started["stage"] if started and (not ended or ended["time"] < started["time"]) else ""
    return f" (last sign of life {at(log.events[-1]['time'])}{', in ' + stage if stage else ''})"
