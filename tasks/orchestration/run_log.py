"""What a flow run does, as a folder: `runs/ID/handle.json` says which process it is, `events.jsonl` what happened, in order.

The folder outlives the process. So whoever looks from outside (the platform's watch, its alerts, `headway status`, telemetry)
can tell a run that works from one that is dead, without asking Prefect or MLflow. ID is Prefect's of the flow run; a retry of
the same flow run goes on in the same folder. While it waits for a person without a process, `question.json` is what it asks
(flows/support/approval.py). Events: `opened`, `started`, `progress`, `job`, `ended`, `waiting`, `closed`; and
`stopped`, which `headway down` writes before it stops the process. An empty file `closed` says that the log ended: of ten
thousand runs those without it are read to see which one is at work.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.redaction import redact, redact_value
from tasks.orchestration.observers import Outcome, Unobserved
from tasks.security.audit import actor

PROGRESS_EVERY_SECONDS = 1.0
START = '{"event": '
HANDLE, EVENTS, QUESTION, CLOSED = "handle.json", "events.jsonl", "question.json", "closed"


class RunLog(Unobserved):
    """An observer that writes down. State: the open file, and when progress was last written."""

    def __init__(self, home: Path, run: str) -> None:
        self.folder = home / "runs" / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self._events = open(self.folder / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._last = 0.0

    def opened(self, run: Any) -> None:
        me = os.getpid()
        handle = {"pid": me, "started": process.process_started(me), "boot_id": process.boot_id()}
        who = {"host": socket.gethostname(), "flow": run.flow, "subject": run.subject, "flow_run": run.flow_run}
        who["actor"] = actor().model_dump()
        if Path(sys.argv[0]).name == "headway":
            who["command"] = redact(shlex.join(["headway", *sys.argv[1:]]))
        (self.folder / CLOSED).unlink(missing_ok=True)
        process.write_json(self.folder / "handle.json", {**handle, **who})
        self.write("opened", flow=run.flow, subject=run.subject, flow_run=run.flow_run, config=run.config_digest)

    def started(self, stage: str, estimate: float | None) -> None:
        self._last = 0.0
        self.write("started", stage=stage, estimate=estimate)

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        if time.monotonic() - self._last >= PROGRESS_EVERY_SECONDS:
            self._last = time.monotonic()
            self.write("progress", stage=stage, done=done, total=total, text=text, seconds_left=seconds_left)

    def happened(self, stage: str, kind: str, text: str) -> None:
        self.write("job", stage=stage, kind=kind, text=text)

    def waiting(self, reason: str, question: str, since: float, exercises: str, key: str) -> None:
        self.write("waiting", **{"for": reason}, question=question, since=since, exercises=exercises, key=key)

    def ended(self, outcome: Outcome) -> None:
        self.write("ended", outcome=outcome.plain())

    def closed(self, run: Any) -> None:
        error = run.error
        failure = (
            None if error is None else {"type": type(error).__name__, "message": str(error), "stage": run.stopped_at}
        )
        payload = {"dataset": run.result.dataset, "report": run.result.report}
        self.write("closed", status=run.status, seconds=run.seconds, error=failure, **payload)
        self._events.close()
        (self.folder / CLOSED).touch()

    def write(self, event: str, **values: Any) -> None:
        """Append one event; the time is seconds since the epoch."""
        self._events.write(json.dumps({"event": event, "time": time.time(), **redact_value(values)}) + "\n")


@dataclass(frozen=True)
class LoggedRun:
    """A run's folder as it lies there now."""

    folder: Path
    handle: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def identity(self) -> str:
        return self.folder.name

    @property
    def alive(self) -> bool:
        """Whether its process runs, on this host."""
        return process.alive(self.handle)

    @property
    def here(self) -> bool:
        """Whether it ran on this host: of another host's processes nothing can be said."""
        return bool(self.handle.get("host") == socket.gethostname())

    @property
    def status(self) -> str:
        """running, or how it ended: completed, gate_closed, cancelled, failed; `waiting` when it ended to go on once a person has
        answered; `died` when it left no word; `stopped` when `headway down` was why."""
        last = self.last("opened", "closed")
        if (last is None or last["event"] == "opened") and self.alive:
            return "running"
        ended = str(last["status"]) if last and last["event"] == "closed" else "died"
        return "stopped" if self.stopped and ended in ("cancelled", "died") else ended

    @property
    def stopped(self) -> bool:
        """Whether `headway down` stopped this attempt, or is about to."""
        last = self.last("opened", "stopped")
        return last is not None and last["event"] == "stopped"

    @property
    def waits(self) -> dict[str, Any] | None:
        """The event that tells what it waits for a person for, with a process or without; None when it does not wait."""
        event = self.last("waiting")
        standing = event is not None and self.events[-1] is event and (self.alive or not self.here)
        return event if standing or self.status == "waiting" else None

    @property
    def question(self) -> str:
        """What `headway approve` calls the question that it waits with; one of another release has no key of its own."""
        key = (self.waits or {}).get("key", "")
        return f"{self.identity[:8]}.{key}" if key else self.identity[:8]

    def last(self, *kinds: str) -> dict[str, Any] | None:
        """The newest event of these kinds."""
        return next((event for event in reversed(self.events) if event["event"] in kinds), None)


def suspended(home: Path) -> list[Path]:
    """Folders of the runs of a home that wait for a person without a process, or are about to, or have just gone on."""
    return [home / "runs" / name for name in _with(home, QUESTION)]


def read_question(folder: Path) -> dict[str, Any] | None:
    """What a run waits for without a process; None when it does not."""
    question: dict[str, Any] | None = process.read_json(folder / QUESTION)
    return question


def write_question(folder: Path, question: dict[str, Any]) -> None:
    """Keep what a run asks that is about to wait without a process."""
    process.write_json(folder / QUESTION, question)


def drop_question(folder: Path) -> None:
    """The run does not wait any more."""
    (folder / QUESTION).unlink(missing_ok=True)


def note_cancelled(folder: Path, why: str) -> None:
    """Write into the log of a run that waits for a person, without a process, that it was ended: nobody else can."""
    output = {"type": "Cancelled", "message": why, "stage": ""}
    closed = {"event": "closed", "time": time.time(), "status": "cancelled", "seconds": 0.0, "error": output}
    with open(folder / "events.jsonl", "a", encoding="utf-8") as events:
        events.write(json.dumps(closed) + "\n")


def note_stopped(folder: Path) -> None:
    """Write into a run's log that `headway down` stops it, so that nobody takes that for a crash."""
    with open(folder / "events.jsonl", "a", encoding="utf-8") as events:
        events.write(json.dumps({"event": "stopped", "time": time.time()}) + "\n")


def logged_runs(home: Path, *, since: float = 0.0) -> Iterator[LoggedRun]:
    """All runs of a home, newest first by when they were last opened; with `since`, those in whose log something was written
    after it, in seconds since the epoch. A folder is read when its turn comes."""
    opened = _with(home, HANDLE)
    changed = _with(home, EVENTS) if since else {}
    for name in sorted(opened, key=lambda name: opened[name], reverse=True):
        if changed.get(name, 0.0) >= since:
            yield read_run(home / "runs" / name)


def runs_at_work(home: Path, *, closed: bool = False) -> Iterator[LoggedRun]:
    """Runs whose process lives, and those of other hosts, of which nobody can tell.

    `closed` wants those too whose log has ended, and whose process has not. In a home of an earlier version, which has no file
    that tells them, they are always among them.
    """
    hostname = socket.gethostname()
    over = {} if closed else _with(home, CLOSED)
    for name in _with(home, HANDLE):
        if name in over:
            continue
        handle = process.read_json(home / "runs" / name / HANDLE) or {}
        if handle.get("host") != hostname or process.alive(handle):
            yield read_run(home / "runs" / name)


def _with(home: Path, file: str) -> dict[str, float]:
    """The runs of a home that have a file, each with when it was written last. Paths would take three times as long."""
    folder, result = f"{home}/runs", {}
    with suppress(FileNotFoundError):
        for name in os.listdir(folder):
            with suppress(OSError):
                result[name] = os.stat(f"{folder}/{name}/{file}").st_mtime  # noqa: PTH116
    return result


def read_run(folder: Path) -> LoggedRun:
    """One run's folder. What a dying process left half written, alone or before a retry's first event, is left out."""
    path = folder / EVENTS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    whole = [line[line.rfind(START) :] for line in lines if line.endswith("\n") and START in line]
    return LoggedRun(folder, process.read_json(folder / HANDLE) or {}, [json.loads(line) for line in whole])
