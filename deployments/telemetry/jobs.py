"""The job folders of a home, read from outside: how training goes, how often a job was started, how one failed.

The contract of the folder is docs/compute.md, "The job folder", and the same on every backend. A folder says nothing of the run
that it belongs to; the run that is at work on the same stage is taken for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.telemetry.runs import RunView, read_object
from deployments.telemetry.trace_builder import Log
from tasks.common import process
from tasks.common.redaction import redact
from tasks.compute.logs import tail_of_failure
from tasks.config.cluster import on_this_machine

RECENT_SECONDS = 600.0
"""A job that ended is shown for so long."""
LAST_BYTES = 16_384


@dataclass
class JobView:
    """A job as its folder tells it now."""

    identity: str
    subject: str = ""
    """Of the run that it belongs to: a model. Empty while no run is known for it."""
    folder: Path = Path()
    stage: str = ""
    prepared: float = 0.0
    """When its configuration was written, seconds since the epoch."""
    attempt: int = 0
    alive: bool = False
    code: int | None = None
    reason: str = ""
    ended: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)
    """The newest record of its metrics."""

    @property
    def failed(self) -> bool:
        return bool(self.ended and self.code != 0 and self.reason != "cancelled")

    def told(self) -> Log:
        """The end of the log of a job that failed."""
        output = redact(tail_of_failure(self.folder))
        return Log(
            name="headway.job.failed",
            time=self.ended,
            severity="ERROR",
            body=f"job {self.identity} failed ({self.reason}, exit code {self.code}) after {self.attempt} attempt(s)\n{output}",
            attributes={
                "headway.stage": self.stage,
                "headway.job.id": self.identity,
                "headway.job.attempts": self.attempt,
                "log.record.uid": f"{self.identity}:{int(self.ended * 1000)}",
            },
        )


class Jobs:
    """All jobs of a home. State: the view of each, and when its folder was last changed."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "jobs"
        self._views: dict[str, JobView] = {}
        self._changed: dict[str, int] = {}

    def refresh(self, runs: Iterable[RunView]) -> None:
        """Look again at the folders where something was renamed or written anew, and at the jobs that run."""
        alive = [run for run in runs if run.stage and run.status == "running"]
        result = _changes(self.folder)
        for gone in self._views.keys() - result.keys():
            del self._views[gone], self._changed[gone]
        for name, changed in result.items():
            view = self._views.get(name)
            if view is None or view.alive or changed != self._changed[name]:
                fresh = _look(name, self.folder / name)
                run = _run_of(fresh, alive)
                fresh.subject = run.subject if run else view.subject if view else ""
                self._views[name], self._changed[name] = fresh, changed

    def views(self) -> list[JobView]:
        return list(self._views.values())

    def training(self, now: float) -> list[JobView]:
        """Jobs that train, or did a moment ago."""
        recent = (v for v in self.views() if v.alive or (v.subject and now - v.ended < RECENT_SECONDS))
        return [view for view in recent if "loss" in view.last]


def _run_of(job: JobView, runs: Iterable[RunView]) -> RunView | None:
    """The run that a job most likely belongs to: at work on its stage, and nearest to the job's start."""
    fitting = [run for run in runs if run.stage == job.stage]
    return min(fitting, key=lambda run: abs(run.began - job.prepared), default=None)


def _changes(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_dir()}
    except OSError:
        return {}


def _look(name: str, folder: Path) -> JobView:
    end, attempt = _end(folder), read_object(folder / "attempt.json")
    attempts = end.get("attempts") or attempt.get("attempt") or read_object(folder / "attempts.json").get("attempts")
    return JobView(
        identity=name,
        folder=folder,
        stage=str(read_object(folder / "config.json").get("name", "")),
        prepared=_time(folder / "config.json"),
        attempt=int(attempts or 0),
        alive=_runs(folder, attempt, end),
        code=end.get("code"),
        reason=str(end.get("reason", "")),
        ended=float(end.get("ended") or 0.0),
        last=_last_record(folder / "metrics.jsonl"),
    )


def _end(folder: Path) -> dict[str, Any]:
    """How the newest submission ended: as its parent says, or its leader's; else as it was settled. Empty while it did not."""
    marked = read_object(folder / "exit.json") or read_object(folder / "nodes" / "0" / "exit.json")
    settled = read_object(folder / "settled.json")
    if marked or not settled:
        return marked
    outcome = str(settled.get("outcome"))
    code = 0 if outcome == "done" else None
    return {"code": code, "reason": settled.get("failure") or outcome, "ended": _time(folder / "settled.json")}


def _runs(folder: Path, attempt: dict[str, Any], end: dict[str, Any]) -> bool:
    """Whether the job is at work. A pid says that only of this machine's jobs; of others the marks in the folder do."""
    if on_this_machine(read_object(folder / "cluster.json").get("backend") or "local"):
        return process.alive(read_object(folder / "handle.json"))
    return bool(attempt) and not end


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _last_record(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines; its beginning is not read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            return record
    return {}
