"""What the gateway sees of each model: requests, failures, the time a token, and measures of answers. No text is kept.

The judge of a rollout reads it (tasks/endpoints/judge.py, by the control port). What a server measures of its own answers, for
the watch, is tasks/jobs/outputs.py.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tasks.formats.answers import odd_share
from tasks.jobs.routing.upstream import Answer

KEPT = 2000
"""Last requests of a colour."""
SHOWN = 500
"""Values of a measure that the judge is given."""
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
    tokens: int | None = None
    odd: float | None = None
    stopped: float | None = None
    """1 for an answer that ended by itself, 0 for one that was cut by its length."""


@dataclass
class Totals:
    """Since the gateway started."""

    requests: int = 0
    failures: int = 0
    mirrored: int = 0
    replayed: int = 0


class Counts:
    """State: the last requests by the server they were deployed with, and totals by colour."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[Sight]] = {}
        self.totals: dict[str, Totals] = {}

    def add(self, model: str, colour: str, sight: Sight) -> None:
        """Note a request that ended. `model` is the id of the colour's first server: another model in the colour starts anew."""
        self._seen.setdefault(model, deque(maxlen=KEPT)).append(sight)
        totals = self.totals.setdefault(colour, Totals())
        totals.mirrored += sight.mirrored
        totals.requests += not sight.mirrored
        totals.failures += sight.failed

    def since(self, model: str, when: float) -> Iterator[Sight]:
        """The requests that ended from a time on."""
        return (sight for sight in self._seen.get(model, ()) if sight.time >= when)

    def seen(self, model: str, when: float) -> dict[str, Any]:
        """As `Seen` of tasks/endpoints/judge.py wants it."""
        found = list(self.since(model, when))
        good = [sight for sight in found if not sight.failed][-SHOWN:]
        return {
            "requests": len(found),
            "failures": sum(sight.failed for sight in found),
            "seconds_per_token": [round(s.seconds / s.tokens, 7) for s in good if s.tokens],
            "measures": {
                "length": _known(sight.tokens for sight in good),
                "odd": _known(sight.odd for sight in good),
                "stopped": _known(sight.stopped for sight in good),
            },
        }

    def keep_only(self, models: Iterable[str]) -> None:
        """Forget models that are routed no more."""
        kept = set(models)
        self._seen = {model: seen for model, seen in self._seen.items() if model in kept}


def look(answer: Answer, body: bytes) -> dict[str, Any]:
    """What can be measured of a whole answer: of a completion, of a stream of events, or of the texts of /score."""
    if answer.header(b"content-type").startswith(b"text/event-stream"):
        return _of_events(body)
    try:
        said = json.loads(body)
        return _of_texts(said, answer.header(b"x-headway-tokens")) if isinstance(said, list) else _of_object(said)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def ended(began: float, *, failed: bool, mirrored: bool = False, **measured: Any) -> Sight:
    """The sight of a request that began at a time of `time.perf_counter` and ended now."""
    return Sight(time=time.time(), failed=failed, seconds=time.perf_counter() - began, mirrored=mirrored, **measured)


def _of_object(said: Any) -> dict[str, Any]:
    choice = said["choices"][0]
    return _measures(choice["text"], int(said["usage"]["completion_tokens"]), choice.get("finish_reason"))


def _of_texts(said: list[dict[str, str]], tokens: bytes) -> dict[str, Any]:
    """As Azure ML has it: texts by the number of their prompt. The tokens are those of the header, the prompts' among them."""
    return _measures("".join(text for one in said for text in one.values()), int(tokens) or None, None)


def _of_events(body: bytes) -> dict[str, Any]:
    """The pieces' texts joined. Without `usage`, which few ask for, each piece counts as one token."""
    text, pieces, tokens, finish = "", 0, None, None
    for line in body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            said = json.loads(line[6:])
        except ValueError:
            continue
        if usage := said.get("usage"):
            tokens = usage.get("completion_tokens")
        for choice in said.get("choices") or ():
            text += choice.get("text") or ""
            pieces += bool(choice.get("text"))
            finish = choice.get("finish_reason") or finish
    return _measures(text, tokens or pieces, finish)


def _measures(text: str, tokens: int | None, finish: str | None) -> dict[str, Any]:
    stopped = None if finish is None else float(finish == "stop")
    return {"tokens": tokens, "odd": odd_share(text), "stopped": stopped}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
