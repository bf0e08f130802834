"""/metrics for Prometheus, on loopback, at a port of its own that it keeps: `platform/metrics.json` says where.

Only figures are served: names of flows, models and stages, and numbers. It takes no requests but GET, and no other machine
reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.telemetry.instruments import SECONDS, Instrument, Point
from deployments.telemetry.runs import read_object
from tasks.common import process

LOOPBACK = "127.0.0.1"


class Scrape(Collector):
    """What a scrape finds: the figures of the last look. State: those figures."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def collect(self) -> Iterator[Metric]:
        ordered = sorted(self.points, key=lambda point: point.instrument.name)
        for instrument, same in groupby(ordered, key=lambda point: point.instrument):
            yield _family(instrument, same)


def serve(home: Path, scrape: Scrape) -> str:
    """Serve the figures until the process ends; returns the address. The port of last time is taken again if it is free."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(scrape)
    path = home / "platform" / "metrics.json"
    last = int(read_object(path).get("port") or 0)
    try:
        server, _ = start_http_server(last, LOOPBACK, registry)
    except OSError:
        server, _ = start_http_server(0, LOOPBACK, registry)
    port = server.server_port
    url = f"http://{LOOPBACK}:{port}/metrics"
    process.write_json(path, {"url": url, "port": port})
    return url


def _family(instrument: Instrument, points: Iterable[Point]) -> Metric:
    name, labels = instrument.prometheus, instrument.labels
    if instrument.kind == "histogram":
        histogram = HistogramMetricFamily(name, instrument.help, labels=labels)
        for point in points:
            histogram.add_metric(point.labels, _cumulative(point.buckets), point.value)
        return histogram
    kind = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
    family = kind(name, instrument.help, labels=labels)
    for point in points:
        family.add_metric(point.labels, point.value)
    return family


def _cumulative(buckets: tuple[int, ...]) -> list[tuple[str, float]]:
    """Prometheus counts in each bucket all that is smaller, too."""
    bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
    return [(bound, float(sum(buckets[: i + 1]))) for i, bound in enumerate(bounds)]
