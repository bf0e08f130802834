"""What the gateway sees of each model: requests, failures, the time a token, and measures of answers. No text is kept.

The judge of a rollout reads it (tasks/serving/protocol/judge.py, by the control port). What a server measures of its own
answers, for the watch, is tasks/jobs/serving/outputs.py.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf, nextafter
from typing import Any

from tasks.formats.answers import odd_share
from tasks.jobs.routing.upstream import Answer

KEPT = 10_000
"""Last requests of a colour."""
SHOWN = 500
"""Values of a measure that the judge is given at once."""
LOOKED_AT = 256 * 1024
"""Bytes of an answer that are looked at."""


@dataclass(frozen=True)
class Sight:
    """One request as the gateway saw it end."""

    time: float
    """Seconds since the epoch."""
    failed: bool
    seconds: float
    mirrored: bool = False
    first: float | None = None
    """Seconds until an answer began; None: none began."""
    streamed: bool = False
    tokens: int | None = None
    odd: float | None = None
    stopped: float | None = None
    """1 for an answer that ended by itself, 0 for one that was cut by its length."""

    @property
    def seconds_per_token(self) -> float | None:
        """After the first token where it was streamed, of the whole answer otherwise; None where tokens are not known."""
        if self.streamed and self.first is not None:
            return (self.seconds - self.first) / (self.tokens - 1) if self.tokens and self.tokens > 1 else None
        return self.seconds / self.tokens if self.tokens else None


@dataclass(frozen=True, eq=False)
class Waiting:
    """A request whose answer has not begun."""

    began: float
    """By time.perf_counter."""
    ends: Callable[[Waiting], None]
    """Called with itself when the answer begins; more than once is as good as once."""


@dataclass
class Totals:
    """Since the gateway started."""

    requests: int = 0
    failures: int = 0
    mirrored: int = 0
    replayed: int = 0


class Counts:
    """State: the last requests by the server they were deployed with, those whose answer has not begun, and totals by colour."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[Sight]] = {}
        self._waiting: dict[str, set[Waiting]] = {}
        self.totals: dict[str, Totals] = {}

    def add(self, model: str, colour: str, sight: Sight) -> None:
        """Note a request that ended. `model` is the id of the colour's first server: another model in the colour starts anew."""
        seen = self._seen.setdefault(model, deque(maxlen=KEPT))
        if seen and sight.time <= seen[-1].time:  # each has a time of its own: who reads goes on after the last one
            sight = replace(sight, time=nextafter(seen[-1].time, inf))
        seen.append(sight)
        totals = self.totals.setdefault(colour, Totals())
        totals.mirrored += sight.mirrored
        totals.requests += not sight.mirrored
        totals.failures += sight.failed

    @contextmanager
    def waiting_for(self, model: str) -> Iterator[Waiting]:
        """A request that a model has, from now on until its answer begins (`Waiting.ends`) or there is none."""
        under_way = self._waiting.setdefault(model, set())
        waiting = Waiting(time.perf_counter(), under_way.discard)
        under_way.add(waiting)
        try:
            yield waiting
        finally:
            waiting.ends(waiting)

    def waits(self, model: str) -> list[float]:
        """Seconds that requests under way have waited for their answers to begin."""
        now = time.perf_counter()
        return [now - waiting.began for waiting in self._waiting.get(model, ())]

    def longest_wait(self, model: str) -> tuple[float, int]:
        """Seconds until the slowest of the last answers began, and how many there are of them."""
        waits = [sight.first for sight in self._seen.get(model, ()) if sight.first is not None]
        return max(waits, default=0.0), len(waits)

    def since(self, model: str, when: float) -> list[Sight]:
        """The requests that ended from a time on, oldest first."""
        return list(takewhile(lambda sight: sight.time >= when, reversed(self._seen.get(model, deque()))))[::-1]

    def seen(self, model: str, when: float) -> dict[str, Any]:
        """As `Seen` of tasks/serving/protocol/judge.py wants it, and `latest`, the time of the last request."""
        result = self.since(model, when)
        good = [sight for sight in result if not sight.failed]
        shown = good[-SHOWN:]
        waits = [round(sight.first, 7) for sight in good if sight.first is not None]
        return {
            "requests": len(result),
            "failures": sum(sight.failed for sight in result),
            "first_token": [round(s.first, 7) for s in good if s.streamed and s.first is not None],
            "seconds_per_token": [round(s.seconds_per_token, 7) for s in good if s.seconds_per_token is not None],
            "waiting": self.waits(model),
            "longest_wait": max(waits, default=0.0),
            "measures": {
                "length": _known(sight.tokens for sight in shown),
                "odd": _known(sight.odd for sight in shown),
                "stopped": _known(sight.stopped for sight in shown),
            },
            "latest": result[-1].time if result else None,
        }

    def keep_only(self, models: Iterable[str]) -> None:
        """Forget models that are routed no more."""
        kept = set(models)
        self._seen = {model: seen for model, seen in self._seen.items() if model in kept}
        self._waiting = {model: under_way for model, under_way in self._waiting.items() if model in kept}


def look(answer: Answer, body: bytes) -> dict[str, Any]:
    """What can be measured of a whole answer: of a completion, of a stream of events, or of the texts of /score."""
    if answer.header(b"content-type").startswith(b"text/event-stream"):
        return {**_of_events(body), "streamed": True}
    try:
        output = json.loads(body)
        return _of_texts(output, answer.header(b"x-headway-tokens")) if isinstance(output, list) else _of_object(output)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def ended(began: float, *, failed: bool, mirrored: bool = False, **measured: Any) -> Sight:
    """The sight of a request that began at a time of `time.perf_counter` and ended now."""
    return Sight(time=time.time(), failed=failed, seconds=time.perf_counter() - began, mirrored=mirrored, **measured)


def _of_object(output: Any) -> dict[str, Any]:
    choice = output["choices"][0]
    return _measures(choice["text"], int(output["usage"]["completion_tokens"]), choice.get("finish_reason"))


def _of_texts(messages: list[dict[str, str]], tokens: bytes) -> dict[str, Any]:
    """As Azure ML has it: texts by the number of their prompt. The tokens are those of the header, the prompts' among them."""
    return _measures("".join(text for one in messages for text in one.values()), int(tokens) or None, None)


def _of_events(body: bytes) -> dict[str, Any]:
    """The pieces' texts joined. Without `usage`, which few ask for, each piece counts as one token."""
    text, pieces, tokens, finish = "", 0, None, None
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            output = json.loads(line[6:])
        except ValueError:
            continue
        if usage := output.get("usage"):
            tokens = usage.get("completion_tokens")
        for choice in output.get("choices") or ():
            text += choice.get("text") or ""
            pieces += bool(choice.get("text"))
            finish = choice.get("finish_reason") or finish
    return _measures(text, tokens or pieces, finish)


def _measures(text: str, tokens: int | None, finish: str | None) -> dict[str, Any]:
    stopped = None if finish is None else float(finish == "stop")
    return {"tokens": tokens, "odd": odd_share(text), "stopped": stopped}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
