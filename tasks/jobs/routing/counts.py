"""What the gateway sees of each model: requests, failures, the time a token, and measures of answers. No text is kept.

The judge of a rollout reads it (tasks/serving/protocol/judge.py, by the control port). What a server measures of its own
answers, for the watch, is tasks/jobs/serving/outputs.py.

Figures of an endpoint as a whole: those of all its servers as one text for Prometheus, at `GET /metrics` of the gateway.

Counters and histograms are summed over the servers of a colour, gauges stand for themselves with the label `replica`. What the
gateway itself sees is at its private port (gateway.py); what a server counts, tasks/jobs/serving/metrics.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from math import inf, nextafter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.formats.answers import odd_share
from tasks.jobs.routing.table import Replica, Table
from tasks.jobs.routing.upstream import Answer, Unreachable, fetch
from tasks.jobs.serving.metrics import CONTENT_TYPE

TIMEOUT_SECONDS = 3.0
"""For the figures of one server; those of one that takes longer are its last ones."""
ADDED = ("counter", "histogram", "summary")
UP = "headway_endpoint_replica_answers"


class _Key(NamedTuple):
    """One figure: its name with what the format puts behind it, and its labels."""

    name: str
    labels: tuple[tuple[str, str], ...]


Figures = Mapping[_Key, float]


class Exposition:
    """State: what each server said last, and what those said that are gone, so that no sum ever falls."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._last: dict[Replica, Figures] = {}
        self._gone: dict[_Key, float] = {}
        self._families: dict[str, tuple[str, str]] = {}
        """Kind and description of each family of figures, in the order in which they were met."""
        self._asking = asyncio.Lock()

    async def text(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4; asks each server once, and wakes none that sleeps."""
        async with self._asking:
            existing = [one for group in self._table.groups.values() for one in group.replicas]
            payload = dict(zip(existing, await asyncio.gather(*map(_ask, existing)), strict=True))
            gauges: dict[_Key, float] = {}
            for replica, text in payload.items():
                labels = (("colour", replica.colour), ("replica", replica.server))
                gauges[_Key(UP, labels)] = float(text is not None)
                gauges |= {} if text is None else self._take(replica, text, labels)
            for replica in self._last.keys() - set(existing):
                self._keep(self._last.pop(replica))
            return generate_latest(_registry(self._families, {**gauges, **self._sums()}))

    def _take(self, replica: Replica, text: str, labels: tuple[tuple[str, str], ...]) -> Figures:
        """Note what a server counted, and return its gauges."""
        counted: dict[_Key, float] = {}
        gauges: dict[_Key, float] = {}
        for family in text_string_to_metric_families(text):
            self._families.setdefault(family.name, (family.type, family.documentation))
            added = family.type in ADDED
            for sample in family.samples:
                own = tuple(sorted({**sample.labels, **dict(labels[:1] if added else labels)}.items()))
                (counted if added else gauges)[_Key(sample.name, own)] = sample.value
        before = self._last.get(replica, {})
        if any(counted.get(key, 0.0) < value for key, value in before.items()):  # it was started anew
            self._keep(before)
        self._last[replica] = counted
        return gauges

    def _keep(self, figures: Figures) -> None:
        for key, value in figures.items():
            self._gone[key] = self._gone.get(key, 0.0) + value

    def _sums(self) -> Figures:
        result = dict(self._gone)
        for figures in self._last.values():
            for key, value in figures.items():
                result[key] = result.get(key, 0.0) + value
        return result


def exposed(app: ASGIApp, exposition: Exposition) -> ASGIApp:
    """The application with `GET /metrics` of the endpoint before it."""

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("GET", "/metrics"):
            await app(scope, receive, send)
            return
        body = await exposition.text()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return front


async def _ask(replica: Replica) -> str | None:
    """What a server says; None: nothing, or nothing that can be read."""
    try:
        status, body = await fetch(replica.upstream, b"/metrics", timeout=TIMEOUT_SECONDS)
        text = body.decode()
        list(text_string_to_metric_families(text))
    except (Unreachable, ValueError):
        return None
    return text if status == 200 else None


class _Read(Collector):
    """Families that were put together already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _registry(known: Mapping[str, tuple[str, str]], figures: Figures) -> CollectorRegistry:
    payload = {**known, UP: ("gauge", "Whether a server of this endpoint gave its figures")}
    families = {name: Metric(name, value, kind) for name, (kind, value) in payload.items()}
    names = {f"{name}{end}": name for name in families for end in ("", "_total", "_bucket", "_sum", "_count")}
    for key in sorted(figures, key=_order):
        families[names[key.name]].add_sample(key.name, dict(key.labels), figures[key])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read([family for family in families.values() if family.samples]))
    return registry


def _order(key: _Key) -> tuple[object, ...]:
    """Buckets of one histogram together, in the order of their bounds, and before its count and sum."""
    others = tuple(pair for pair in key.labels if pair[0] != "le")
    bound = dict(key.labels).get("le")
    return (others, bound is None, float(bound) if bound else 0.0, key.name)


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
        if isinstance(output, list):
            # As Azure ML has it: texts by the number of their prompt. The tokens are those of the header, the prompts' among
            # them.
            text = "".join(text for one in output for text in one.values())
            return _measures(text, int(answer.header(b"x-headway-tokens")) or None, None)
        choice = output["choices"][0]
        return _measures(choice["text"], int(output["usage"]["completion_tokens"]), choice.get("finish_reason"))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {}


def ended(began: float, *, failed: bool, mirrored: bool = False, **measured: Any) -> Sight:
    """The sight of a request that began at a time of `time.perf_counter` and ended now."""
    return Sight(time=time.time(), failed=failed, seconds=time.perf_counter() - began, mirrored=mirrored, **measured)


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
