"""The run folders and the job folders of a home, read from outside and only where something was added. Nothing is written.

What a run's folder holds is tasks/orchestration/run_log.py: `Tail` reads lines that came since, `Runs` keeps a view of every
run, which alerts and metrics look at. What a job's folder holds is docs/compute.md, "The job folder", and the same on every
backend: how training goes, how often a job was started, how one failed. It says nothing of the run that it belongs to; the run
that is at work on the same stage is taken for it. Events pass the redaction, so nothing behind sees a secret.

What telemetry must not forget: how far each exporter got, and the totals that only grow. One SQLite file in telemetry/.

A total and the position up to which events were counted move in one transaction, so a kill at any moment counts nothing twice.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.telemetry.trace_builder import Log
from tasks.common import process
from tasks.common.redaction import redact, redact_value
from tasks.compute.logs import tail_of_failure
from tasks.config.cluster import on_this_machine

SCHEMA = """
create table if not exists position (reader text, item text, at integer, primary key (reader, item)) without rowid;
create table if not exists total (metric text, labels text, part text, value real, primary key (metric, labels, part))
    without rowid;
create table if not exists note (name text primary key, value text) without rowid;
"""
Key = tuple[str, tuple[str, ...], str]
"""Name of the metric, its labels' values, and the part: empty for a counter; of a histogram `sum` and the buckets' numbers."""


class Ledger:
    """State: the open database, and all of it in memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or the disk is full: it is not damaged
                raise
            # Everything is read again then, and sent again under the same ids.
            logging.warning("%s is damaged (%s) and was put aside as %s.damaged", path, error, path.name)
            path.replace(path.with_name(f"{path.name}.damaged"))
            self._database = _connect(path)
        self._positions: dict[str, dict[str, int]] = {}
        for reader, item, at in self._database.execute("select reader, item, at from position"):
            self._positions.setdefault(reader, {})[item] = at
        rows = self._database.execute("select metric, labels, part, value from total")
        self.totals: dict[Key, float] = {(m, tuple(json.loads(ls)), p): v for m, ls, p, v in rows}

    def positions(self, reader: str) -> Mapping[str, int]:
        """How far a reader got, by item. A reader that never read has none."""
        return self._positions.get(reader, {})

    def advance(self, reader: str, to: Mapping[str, int], add: Mapping[Key, float] | None = None) -> None:
        """Move a reader on, and add to totals, both or neither."""
        sums = {key: self.totals.get(key, 0.0) + value for key, value in (add or {}).items()}
        if not to and not sums:
            return
        with self._database as database:
            rows = [(reader, item, at) for item, at in to.items()]
            database.executemany("insert or replace into position values (?, ?, ?)", rows)
            kept = [(metric, json.dumps(labels), part, value) for (metric, labels, part), value in sums.items()]
            database.executemany("insert or replace into total values (?, ?, ?, ?)", kept)
        self._positions.setdefault(reader, {}).update(to)
        self.totals.update(sums)

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        with self._database as database:
            database.execute("insert or replace into note values (?, ?)", (name, json.dumps(value)))

    def noted(self, name: str) -> Any:
        """The value that was kept under a name; None when there is none."""
        row = self._database.execute("select value from note where name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=10)
    try:
        database.executescript(SCHEMA)
        output = database.execute("pragma quick_check").fetchone()[0]
        if output != "ok":
            raise sqlite3.DatabaseError(output)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database


LINES_AT_ONCE = 1000


@dataclass
class Tail:
    """Reads the whole lines that were appended to a file of JSON lines. State: the offset of the next one, in bytes."""

    path: Path
    offset: int = 0

    def read(self, limit: int = LINES_AT_ONCE, *, until: float = math.inf) -> list[tuple[int, dict[str, Any]]]:
        """What came since, each event with the offset of its end. Half a line is left for later, an odd one is left out."""
        results: list[tuple[int, dict[str, Any]]] = []
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                while len(results) < limit and self.offset < until and (line := file.readline()).endswith(b"\n"):
                    self.offset += len(line)
                    results += [(self.offset, event) for event in _event(line)]
        except OSError:
            pass
        return [(end, event) for (end, _), event in zip(results, redact_value([e for _, e in results]), strict=True)]


def _event(line: bytes) -> Iterator[dict[str, Any]]:
    """The event of a line. A process that died may have left half an event before it: that half is dropped."""
    text = line.decode("utf-8", errors="replace")
    try:
        value = json.loads(text[max(text.rfind('{"event"'), 0) :])
    except ValueError:
        return
    if isinstance(value, dict) and isinstance(value.get("event"), str) and isinstance(value.get("time"), int | float):
        yield value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that others write; empty when it is missing or odd."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def firing(home: Path) -> list[dict[str, Any]]:
    """The alerts that fire: alert, instance, severity, summary, details, remedy, labels, url, since."""
    return read_alerts(home / "platform" / "alerts.json")["firing"]


def read_alerts(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What the watch kept of alerts; of an odd file nothing, so that whatever fires is told again rather than never."""
    result = read_object(path)
    lists = {name: value if isinstance(value := result.get(name), list) else [] for name in ("firing", "outbox")}
    return {name: [one for one in value if isinstance(one, dict)] for name, value in lists.items()}


@dataclass
class RunView:
    """A run as its folder tells it now. Times are seconds since the epoch."""

    identity: str
    flow: str = ""
    subject: str = ""
    url: str = ""
    closed: str = ""
    """How it ended: completed, gate_closed, cancelled, failed; empty while it did not."""
    ended: float = 0.0
    stage: str = ""
    """The stage that is at work."""
    began: float = 0.0
    """Since when that stage is at work."""
    moved: float = 0.0
    """When it last did something new."""
    share: float | None = None
    """How much of the stage is done, 0 to 1; None where it does not say."""
    waiting: bool = False
    """Whether it waits for a person or another run: that is no standstill."""
    stopped: bool = False
    """Whether `headway down` stopped it."""
    error: dict[str, Any] = field(default_factory=dict)
    handle: dict[str, Any] = field(default_factory=dict)
    _seen: tuple[Any, ...] = ()

    @property
    def status(self) -> str:
        """`running`, `died` when its process is gone without a word, `stopped` by `headway down`, or how it ended.

        Of a process on another host nothing can be said: it counts as running.
        """
        is_local = self.handle.get("host") == socket.gethostname()
        if not self.closed and not (is_local and not process.alive(self.handle)):
            return "running"
        ended = self.closed or "died"
        return "stopped" if self.stopped and ended in ("cancelled", "died") else ended

    @property
    def last_sign(self) -> float:
        """When it ended or, for one that died, when it last wrote something."""
        return self.ended or self.moved

    def take(self, event: dict[str, Any]) -> None:
        """Move on by one event."""
        kind, time = event["event"], float(event["time"])
        if kind == "progress":
            # A total of 0 is a run that waits for another one. The same again is no progress.
            done, total = event.get("done") or 0, event.get("total") or 0
            self.waiting = total == 0
            self.share = min(done / total, 1.0) if total else None
            seen = (done, event.get("text"))
            if self.waiting or seen != self._seen:
                self.moved, self._seen = time, seen
            return
        self.moved, self.waiting = time, kind == "waiting"
        if kind == "opened":
            self.flow, self.subject = str(event.get("flow")), str(event.get("subject"))
            self.url = str((event.get("flow_run") or {}).get("url", ""))
            self.closed, self.ended, self.stage, self.error, self.stopped = "", 0.0, "", {}, False
        elif kind == "started":
            self.stage, self.began, self.share, self._seen = str(event.get("stage")), time, None, ()
        elif kind == "ended":
            self.stage, self.share = "", None
        elif kind == "closed":
            self.closed, self.ended, self.stage = str(event.get("status")), time, ""
            self.error = event.get("error") or {}
        elif kind == "stopped":
            self.stopped = True


class Runs:
    """All runs of a home. State: the view of each, and how far its events were read."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "runs"
        self._tails: dict[str, Tail] = {}
        self._views: dict[str, RunView] = {}

    def sizes(self) -> dict[str, int]:
        """How long each run's log is, in bytes: what was read up to there needs no second look. Paths would double the time."""
        result = {}
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self.folder)
        for name in names:
            try:
                result[name] = os.stat(f"{self.folder}/{name}/events.jsonl").st_size  # noqa: PTH116
            except OSError:
                continue
        return result

    def refresh(self) -> dict[str, int]:
        """Read what came since; returns the sizes."""
        sizes = self.sizes()
        for gone in self._views.keys() - sizes.keys():
            del self._views[gone], self._tails[gone]
        for name, size in sizes.items():
            tail = self._tails.get(name) or Tail(self.folder / name / "events.jsonl")
            if size != tail.offset:
                view = self._views.setdefault(name, RunView(name))
                self._tails[name] = tail
                while events := tail.read():
                    for _, event in events:
                        view.take(event)
                        if event["event"] == "opened":
                            view.handle = read_object(tail.path.parent / "handle.json")
        return sizes

    def views(self) -> list[RunView]:
        """Every run that was opened."""
        return [view for view in self._views.values() if view.flow]


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
        result: dict[str, int] = {}
        with suppress(OSError), os.scandir(self.folder) as entries:
            result = {entry.name: entry.stat().st_mtime_ns for entry in entries if entry.is_dir()}
        for gone in self._views.keys() - result.keys():
            del self._views[gone], self._changed[gone]
        for name, changed in result.items():
            view = self._views.get(name)
            if view is None or view.alive or changed != self._changed[name]:
                fresh = _look(name, self.folder / name)
                # The run that it most likely belongs to: at work on its stage, and nearest to its start.
                fitting = [run for run in alive if run.stage == fresh.stage]
                run = min(fitting, key=lambda run: abs(run.began - fresh.prepared), default=None)
                fresh.subject = run.subject if run else view.subject if view else ""
                self._views[name], self._changed[name] = fresh, changed

    def views(self) -> list[JobView]:
        return list(self._views.values())

    def training(self, now: float) -> list[JobView]:
        """Jobs that train, or did a moment ago."""
        recent = (v for v in self.views() if v.alive or (v.subject and now - v.ended < RECENT_SECONDS))
        return [view for view in recent if "loss" in view.last]


def _look(name: str, folder: Path) -> JobView:
    end, attempt = _end(folder), read_object(folder / "attempt.json")
    # A pid says whether a job is at work only of this machine's jobs; of others the marks in the folder do.
    if on_this_machine(read_object(folder / "cluster.json").get("backend") or "local"):
        alive = process.alive(read_object(folder / "handle.json"))
    else:
        alive = bool(attempt) and not end
    attempts = end.get("attempts") or attempt.get("attempt") or read_object(folder / "attempts.json").get("attempts")
    return JobView(
        identity=name,
        folder=folder,
        stage=str(read_object(folder / "config.json").get("name", "")),
        prepared=_time(folder / "config.json"),
        attempt=int(attempts or 0),
        alive=alive,
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
