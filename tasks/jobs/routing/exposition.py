"""Figures of an endpoint as a whole: those of all its servers as one text for Prometheus, at `GET /metrics` of the gateway.

Counters and histograms are summed over the servers of a colour, gauges stand for themselves with the label `replica`. What the
gateway itself sees is at its private port (gateway.py); what a server counts, tasks/jobs/serving/metrics.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.jobs.routing.table import Replica, Table
from tasks.jobs.routing.upstream import Unreachable, fetch
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
