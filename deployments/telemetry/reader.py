"""A way through the events of all runs that knows its place: every exporter has one of its own. Nothing is sent here.

The place is in the ledger, and is moved only by `remember`. So what a killed watch read and did not send is read again, and an
exporter whose backend is away falls behind without holding up the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deployments.telemetry.ledger import Key, Ledger
from deployments.telemetry.runs import Tail
from deployments.telemetry.trace_builder import Log, Span, Story

EVENTS_AT_ONCE = 1000
HISTORY_SECONDS = 86_400.0
"""An exporter to another machine that is switched on late is not told what is older."""
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0


@dataclass
class Reader:
    """One way through all events: its place is in the ledger. State: the runs that it is in the middle of, and when to go on."""

    name: str
    ledger: Ledger
    folder: Path
    _stories: dict[str, tuple[Tail, Story]] = field(default_factory=dict)
    _failures: int = 0
    _again: float = 0.0

    def ready(self, now: float) -> bool:
        """Whether its rest is over; a clock that was set back does not prolong it."""
        return not 0 < self._again - now <= LONGEST_WAIT

    def read(self, sizes: Mapping[str, int]) -> tuple[list[Span], list[Log], dict[str, int]]:
        """What came since the place in the ledger, and the place after it. Never more than some events at once."""
        spans: list[Span] = []
        logs: list[Log] = []
        to: dict[str, int] = {}
        left, known = EVENTS_AT_ONCE, self.ledger.positions(self.name)
        for run, size in sizes.items():
            at = known.get(run, 0)
            if size <= at or left <= 0:
                continue
            tail, story = self._stories.get(run) or self._begin(run, at)
            self._stories[run] = tail, story
            events = tail.read(left)
            for end, event in events:
                payload = story.take(end, event)
                spans += payload.spans
                logs += payload.logs
            left -= len(events)
            to[run] = tail.offset
        return spans, logs, to

    def remember(self, to: Mapping[str, int], sizes: Mapping[str, int], add: Mapping[Key, float] | None = None) -> None:
        """All that was read is where it should be."""
        self.ledger.advance(self.name, to, add)
        for run, at in to.items():
            if at >= sizes.get(run, 0) and run in self._stories and not self._stories[run][1].began:
                del self._stories[run]

    def rest(self, now: float, *, well: bool) -> None:
        """Go on at once or, after a failure, after a while that grows; what did not arrive is read again."""
        if well:
            self._failures = 0
            return
        self._stories.clear()
        self._again = now + min(FIRST_WAIT * 2**self._failures, LONGEST_WAIT)
        self._failures = min(self._failures + 1, 10)

    def behind(self, sizes: Mapping[str, int]) -> int:
        """Bytes of events that were not sent yet."""
        known = self.ledger.positions(self.name)
        return sum(max(size - known.get(run, 0), 0) for run, size in sizes.items())

    def skip_history(self, sizes: Mapping[str, int], now: float) -> None:
        """At the very first start: pass over the runs that have been over for long."""
        if self.ledger.positions(self.name):
            return
        old = {run: size for run, size in sizes.items() if now - _changed(self.folder / run) > HISTORY_SECONDS}
        self.ledger.advance(self.name, {**old, "": 1})

    def _begin(self, run: str, at: int) -> tuple[Tail, Story]:
        """The story of a run up to a place, told to nobody: what comes next stands on it."""
        tail, story = Tail(self.folder / run / "events.jsonl"), Story(run)
        while events := tail.read(until=at):
            for end, event in events:
                story.take(end, event)
        tail.offset = at
        return tail, story


def _changed(folder: Path) -> float:
    try:
        return (folder / "events.jsonl").stat().st_mtime
    except OSError:
        return 0.0
