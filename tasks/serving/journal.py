"""The journal of an endpoint: a line before each effect, so that a deployer that died is finished or reverted by one rule.

The rule: a change with the line `commit` is finished, any other is reverted. Lines are on the disk before their effect begins.
What finishing and reverting do is rollout.py; what the audit log and the run say of a deploy does not live here.

Beside it lies `refused.json`: what a person rolled back here is deployed here again only when a person promotes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.common.process import append, read_json, write_json, write_text
from tasks.common.seal import opened_lines, sealed

Event = Literal["begin", "step", "commit", "done", "revert", "reverted"]
ENDS = ("done", "reverted")
KEPT_LINES = 1000
"""Of changes that are over; older ones go when the next change begins."""


@dataclass(frozen=True)
class Change:
    """The lines of one change, the first one is `begin`."""

    lines: tuple[Mapping[str, Any], ...]

    @property
    def committed(self) -> bool:
        return any(line["event"] == "commit" for line in self.lines)

    @property
    def over(self) -> bool:
        return self.lines[-1]["event"] in ENDS

    @property
    def begun(self) -> Mapping[str, Any]:
        """The first line: what the change is about."""
        return self.lines[0]

    def last(self, event: Event) -> Mapping[str, Any]:
        """The last line of an event; empty when there is none."""
        return next((line for line in reversed(self.lines) if line["event"] == event), {})


class Journal:
    """One endpoint's file of lines. One writer at a time: whoever holds the endpoint's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, **details: Any) -> None:
        """Open a change. A bug of ours when one is open: it must be settled first."""
        assert self.open_change() is None, f"{self.path} has an open change"
        lines = self.lines()
        if len(lines) > KEPT_LINES:
            kept = [sealed(json.dumps(line).encode()).decode() + "\n" for line in lines[-KEPT_LINES // 2 :]]
            write_text(self.path, "".join(kept))
        self.write("begin", **details)

    def write(self, event: Event, **details: Any) -> None:
        """Add a line, and return when it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = sealed(json.dumps({"event": event, "time": time.time(), **details}).encode()) + b"\n"
        cut = self.path.exists() and not (self.path.read_bytes() or b"\n").endswith(b"\n")
        append(self.path, b"\n" + line if cut else line, durable=True)

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines, oldest first; a line that a kill cut is none: its effect never began. Raises IntegrityError."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        results = []
        for line in opened_lines(text, where=str(self.path)):
            try:
                results.append(json.loads(line))
            except ValueError:
                continue
        return results

    def open_change(self) -> Change | None:
        """The change that nobody ended; None when all are over."""
        change = self.last_change()
        return change if change and not change.over else None

    def last_change(self) -> Change | None:
        """The newest change; None before the first."""
        lines = self.lines()
        starts = [place for place, line in enumerate(lines) if line["event"] == "begin"]
        return Change(tuple(lines[starts[-1] :])) if starts else None


def refused_models(endpoint: Path) -> dict[str, dict[str, Any]]:
    """What a person rolled back here, by reference: `reason`, `time`."""
    result: dict[str, dict[str, Any]] = read_json(endpoint / "refused.json") or {}
    return result


def remember_refused(endpoint: Path, model_ref: str, reason: str) -> None:
    """A person rolled a model back."""
    output = {**refused_models(endpoint), model_ref: {"reason": reason, "time": time.time()}}
    write_json(endpoint / "refused.json", output, seal=True)


def accept(endpoint: Path, model_ref: str) -> None:
    """A person promoted a model: it may be deployed here again."""
    left = {ref: value for ref, value in refused_models(endpoint).items() if ref != model_ref}
    write_json(endpoint / "refused.json", left, seal=True)
