"""The state of a job on Ray: of what the cluster says of it, and of what its driver wrote into the job folder.

Who asks the cluster is backend.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.process import read_json
from tasks.compute.job import JobState
from tasks.compute.nodes import ended_state

REPORT = "headway-report "
"""As in tasks/jobs/ray/driver.py, which nobody may import."""
LOST = "the Ray cluster at {} does not have the job any more: it was started anew or stopped, and jobs end with their cluster"


@dataclass(frozen=True)
class Told:
    """What a cluster said of all its jobs."""

    jobs: dict[str, Any] | None = None
    """By submission id; None when it gave no answer."""
    gone: bool = False
    """The cluster itself is known to have ended."""
    why: str = ""
    """There was no answer because of this."""


def state_of(handle: dict[str, Any], folder: Path, told: Told) -> JobState:
    """One job's state."""
    mark = _mark(handle, folder)
    job = (told.jobs or {}).get(handle["submission_id"])
    if job is None:
        if mark.get("state") == "ended":
            return _by_mark(mark, folder)
        if told.jobs is None and not told.gone:
            return JobState(state="unknown", reason=told.why)
        return ended_state(folder) or JobState(state="lost", reason=LOST.format(handle["address"]))
    status = str(job.status.value)
    if status == "PENDING":
        return JobState(state="queued", reason=job.message or "")
    if status == "RUNNING":
        waits = mark.get("state") in ("queued", "starting")
        return JobState(state=mark["state"], reason=mark["reason"]) if waits else _running(mark)
    if status == "STOPPED":
        return JobState(state="ended", code=1, reason="cancelled", attempts=_attempts(folder))
    if mark.get("state") == "ended":
        return _by_mark(mark, folder)
    return _without_a_mark(job)


def _mark(handle: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the driver of this very submission said."""
    said = read_json(folder / "ray-state.json") or {}
    mine = handle["submission_id"].endswith(f"-{said.get('submission')}")
    return said if mine else {}


def _running(mark: dict[str, Any]) -> JobState:
    return JobState(state="running") if mark else JobState(state="starting", reason="Ray starts the job's driver")


def _by_mark(mark: dict[str, Any], folder: Path) -> JobState:
    return JobState(
        state="ended",
        code=mark["code"],
        reason=mark["reason"],
        attempts=_attempts(folder),
        failure=mark["failure"],
        failed_nodes=tuple(mark["failed_nodes"]),
    )


def _attempts(folder: Path) -> int:
    said = read_json(folder / "nodes" / "0" / "exit.json") or read_json(folder / "nodes" / "0" / "attempts.json")
    return int((said or {"attempts": 1})["attempts"])


def _without_a_mark(job: Any) -> JobState:
    """A job that ended before its driver saw the folder, or whose driver was killed: what Ray says."""
    said = job.message or ""
    line = next((line for line in said.splitlines() if line.startswith(REPORT)), None)
    if line:
        report = json.loads(line.removeprefix(REPORT))
        reason = " ".join(filter(None, (report["message"], report["remedy"])))
        return JobState(state="ended", code=1, reason=reason, failure=report["class"])
    failure = "missing" if "No module named" in said else "infrastructure"
    return JobState(state="ended", code=job.driver_exit_code or 1, reason=_short(said), failure=failure)


def _short(said: str) -> str:
    """The first and the last lines of what Ray says; it adds up to 20,000 letters of the driver's log."""
    lines = [line for line in said.splitlines() if line.strip()]
    return " ".join(lines if len(lines) <= 4 else [lines[0], "...", *lines[-3:]])
