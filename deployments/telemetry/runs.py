"""The run folders of a home, read from outside and only where something was added. Nothing is written here.

What a folder holds is tasks/orchestration/run_log.py. `Tail` reads lines that came since; `Runs` keeps a view of every run,
which alerts and metrics look at. Everything that is read here passes the redaction, so nothing behind it sees a secret.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.redaction import redact_value

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
        for name in _names(self.folder):
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


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
