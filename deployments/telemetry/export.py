"""One look at everything, again and again: what happened is sent on, what is, is measured. The watch calls `Telemetry.tick`.

Flows and jobs never talk to a backend of telemetry: they write folders, and this reads them. How far every exporter got is in
the ledger, so a killed watch goes on where it was, and a backend that is away gets later what it missed. See docs/monitoring.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deployments.configuration.platform import PlatformConfig, TelemetryConfig
from deployments.telemetry import instruments as of
from deployments.telemetry.instruments import SECONDS, Instrument, Point
from deployments.telemetry.measure import (
    Host,
    added,
    counts,
    of_alerts,
    of_runs,
    of_training,
    read_points,
    totals,
    written,
)
from deployments.telemetry.runs import Jobs, Key, Ledger, Runs, Tail, read_object
from deployments.telemetry.sinks import FileSink, Sink, azure_sink, metrics_data, otlp_sink
from deployments.telemetry.trace_builder import Log, Span, Story
from tasks.common import process
from tasks.common.errors import HeadwayError, Missing
from tasks.security import audit_chain
from tasks.security.audit import Entry
from tasks.storage import open_store
from tasks.storage.history import current
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

ASKED_SECONDS = 60.0
QUALITY_NAMES = 50
"""Of models, and of datasets, that have figures: those whose figures are newest."""
EVALUATED = ("bits_per_byte", "perplexity", "accuracy", "calibration_error", "gain_over_bigram", "documents")
DRIFTED = ("p_value", "token_divergence", "domain_auc", "documents")
FIGURES: tuple[tuple[str, Instrument, tuple[str, ...]], ...] = (
    ("evaluation", of.EVALUATED, EVALUATED),
    ("drift", of.DRIFTED, DRIFTED),
)


class Quality:
    """What the store of a home has, looked at once a minute."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")
        self._points: list[Point] = []
        self._known: dict[tuple[str, str, str], Manifest] = {}

    def look(self, now: float) -> list[Point]:
        """The newest figures; of a store that is away, those of before."""
        if not 0 <= now - self._last < ASKED_SECONDS:
            self._last = now
            with contextlib.suppress(HeadwayError, OSError, ValueError):
                self._points = list(self._read(open_store(self.home)))
        return self._points

    def _read(self, store: Store) -> Iterator[Point]:
        for kind, instrument, metrics in FIGURES:
            newest = sorted(self._newest(store, kind), key=lambda one: one.provenance.created, reverse=True)
            for one in newest[:QUALITY_NAMES]:
                for metric in metrics:
                    if metric in one.provenance.metrics:
                        yield Point(instrument, (one.provenance.name, metric), one.provenance.metrics[metric])

    def _newest(self, store: Store, kind: str) -> Iterator[Manifest]:
        """The current version of each name of a kind."""
        names = {key.split("/")[2] for key in store.list(f"history/{kind}")}
        for name in sorted(names):
            version = current(store, kind, name)
            if version is None:
                continue
            key = (kind, name, version)
            manifest = self._known.get(key) or store.manifest(*key)
            if manifest:
                self._known[key] = manifest
                yield manifest


EVENTS_AT_ONCE = 1000
HISTORY_SECONDS = 86_400.0
"""An exporter to another machine that is switched on late is not told what is older."""
FIRST_WAIT, LONGEST_WAIT = 5.0, 300.0


@dataclass
class Reader:
    """One way through the events of all runs; every exporter has one of its own. Nothing is sent here.

    Its place is in the ledger, and is moved only by `remember`. So what a killed watch read and did not send is read again, and
    an exporter whose backend is away falls behind without holding up the others. State: the runs that it is in the middle of,
    and when to go on.
    """

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
            if run not in self._stories:
                # The story of a run up to its place, told to nobody: what comes next stands on it.
                tail, story = Tail(self.folder / run / "events.jsonl"), Story(run)
                while events := tail.read(until=at):
                    for end, event in events:
                        story.take(end, event)
                tail.offset = at
                self._stories[run] = tail, story
            tail, story = self._stories[run]
            events = tail.read(left)
            for end, event in events:
                taken = story.take(end, event)
                spans += taken.spans
                logs += taken.logs
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
        old = {}
        for run, size in sizes.items():
            try:
                changed = (self.folder / run / "events.jsonl").stat().st_mtime
            except OSError:
                changed = 0.0
            if now - changed > HISTORY_SECONDS:
                old[run] = size
        self.ledger.advance(self.name, {**old, "": 1})


EVERY_SECONDS = 15.0
AT_ONCE = 500
ITEM = "audit"
"""Its name in the ledger."""


class Audited:
    """The audit log (tasks/security/audit.py) as log records, for those who watch over many machines in one place.

    A record that is told is no proof; the chain is. State: the newest entry that is known, and when it was asked for.
    """

    def __init__(self, home: Path) -> None:
        self.home, self._newest, self._asked = home, 0, float("-inf")

    def read(self, after: int, now: float) -> tuple[list[Log], dict[str, int]]:
        """Entries behind a number, some at once, and the number after them; none while the store is away."""
        try:
            if not 0 <= now - self._asked < EVERY_SECONDS:
                self._newest, self._asked = audit_chain.newest(open_store(self.home)).number, now
            to = min(self._newest, after + AT_ONCE)
            if to <= after:
                return [], {}
            results = list(audit_chain.between(open_store(self.home), after, to))
        except (HeadwayError, OSError, ValueError) as error:
            logging.info("telemetry: the audit log is not known now: %s", error)
            return [], {}
        return [log for link, data in results if (log := _log(link.number, link.hash, data))], {ITEM: to}


def _log(number: int, hash_: str, data: bytes) -> Log | None:
    """None for an entry that cannot be read: `headway audit-log --verify` names it."""
    try:
        entry = Entry.model_validate({**json.loads(data), "number": number})
    except (ValueError, TypeError):
        return None
    output = entry.model_dump(exclude_none=True, exclude={"time"})
    return Log(
        name="headway.audit",
        time=entry.time,
        severity="INFO" if entry.outcome == "done" else "WARN",
        body=f"{entry.who}: {entry.action} {entry.what} ({entry.outcome})",
        attributes={
            "log.record.uid": f"audit:{number}",
            "headway.audit.hash": hash_,
            **{f"headway.audit.{name}": value for name, value in output.items() if value != ""},
        },
    )


LOOPBACK = "127.0.0.1"


class Scrape(Collector):
    """What a scrape finds: the figures of the last look. State: those figures."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def collect(self) -> Iterator[Metric]:
        ordered = sorted(self.points, key=lambda point: point.instrument.name)
        for instrument, same in groupby(ordered, key=lambda point: point.instrument):
            name, labels = instrument.prometheus, instrument.labels
            if instrument.kind == "histogram":
                bounds = [*(str(float(bound)) for bound in SECONDS), "+Inf"]
                histogram = HistogramMetricFamily(name, instrument.help, labels=labels)
                for point in same:
                    # Prometheus counts in each bucket all that is smaller, too.
                    counted = [(bound, float(sum(point.buckets[: i + 1]))) for i, bound in enumerate(bounds)]
                    histogram.add_metric(point.labels, counted, point.value)
                yield histogram
                continue
            kind = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
            family = kind(name, instrument.help, labels=labels)
            for point in same:
                family.add_metric(point.labels, point.value)
            yield family


def serve(home: Path, scrape: Scrape) -> str:
    """Serve /metrics for Prometheus until the process ends; returns the address, which `platform/metrics.json` holds too.

    On loopback, at the port of last time if that is free. Only figures are served: names of flows, models and stages, and
    numbers.
    """
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


COUNTER = "counter"
"""The reader that adds up the totals."""


class Telemetry:
    """Everything that is told of one home. State on disk is the ledger; the rest is made anew at every start."""

    def __init__(self, home: Path, config: PlatformConfig) -> None:
        self.home, self._config = home, config.telemetry
        self.folder = home / "telemetry"
        self._ledger = Ledger(self.folder / "ledger.db")
        self._runs, self._jobs, self._host, self._audited = Runs(home), Jobs(home), Host(home), Audited(home)
        self._quality = Quality(home)
        self._counter = self._reader(COUNTER)
        self._sinks = [(sink, self._reader(sink.name)) for sink in sinks(self._config, self.folder, self._ledger)]
        self._scrape = Scrape()
        self.url = serve(home, self._scrape) if self._config.prometheus else ""
        self._last, self._measured, self._took = 0.0, 0.0, 0.0
        self._since = float(self._ledger.noted("since") or time.time())
        self._ledger.note("since", self._since)

    def tick(self, now: float) -> None:
        """Look at everything, when it is time to or the clock was set back. What is missing or odd is no error."""
        if 0 <= now - self._last < self._config.interval_seconds:
            return
        self._last = now
        began = time.perf_counter()
        sizes = self._runs.refresh()
        self._jobs.refresh(self._runs.views())
        try:
            # Add to the totals what came since.
            spans, _, to = self._counter.read(sizes)
            add = counts(spans)
            known = self._ledger.positions(COUNTER)
            for job in self._jobs.views():
                place = f"job:{job.identity}"
                before = known.get(place, 0)
                if job.attempt and job.attempt != before:
                    to[place] = job.attempt
                    key = (of.RESTARTS.name, (job.stage,), "")
                    more = job.attempt - before if 0 < before < job.attempt else job.attempt - 1
                    add |= {key: add.get(key, 0.0) + more} if more else {}
            self._counter.remember(to, sizes, add)
            for sink, reader in self._sinks:
                if reader.ready(now):
                    self._send_events(sink, reader, sizes, now)
            points = [
                *totals(self._ledger.totals),
                *of_runs(self._runs.views()),
                *of_training(self._jobs.training(now)),
                *of_alerts(self.home),
                *self._quality.look(now),
                *self._host.look(),
                Point(of.TICK, (), self._took),
                Point(of.TIME, (), now),
                *(Point(of.BEHIND, (sink.name,), float(reader.behind(sizes))) for sink, reader in self._sinks),
            ]
            self._scrape.points = points
            if not 0 <= now - self._measured < self._config.metrics_seconds:
                self._measured = now
                for sink, reader in self._sinks:
                    if reader.ready(now):
                        reader.rest(now, well=self._send_figures(sink, points, now))
        except (OSError, sqlite3.OperationalError) as error:
            logging.warning("telemetry: %s; the next look tries again", error)
        self._took = time.perf_counter() - began

    def _reader(self, name: str) -> Reader:
        return Reader(name, self._ledger, self._runs.folder)

    def _send_events(self, sink: Sink, reader: Reader, sizes: dict[str, int], now: float) -> None:
        """Send what a sink does not have yet, and remember it only when it arrived."""
        if not sink.history:
            reader.skip_history(sizes, now)
        spans, logs, to = reader.read(sizes)
        known = self._ledger.positions(sink.name)
        ends: dict[str, int] = {}
        for job in (view for view in self._jobs.views() if view.failed):
            item, at = f"job:{job.identity}", int(job.ended * 1000)
            if known.get(item, 0) < at:
                ends[item] = at
                logs += [job.told()] if sink.history or now - job.ended < HISTORY_SECONDS else []
        entries, payload = self._audited.read(known.get(ITEM, 0), now)
        if not to and not ends and not payload:
            return
        new = [entry for entry in entries if sink.history or now - entry.time < HISTORY_SECONDS]
        arrived = sink.send(spans, [*logs, *new])
        if arrived or sink.keeps:
            reader.remember({**to, **ends, **payload, **sink.marks()}, sizes)
        reader.rest(now, well=arrived)

    def _send_figures(self, sink: Sink, points: list[Point], now: float) -> bool:
        if not sink.delta:
            return sink.measure(metrics_data(points, since=self._since, now=now, delta=False))
        noted = self._ledger.noted(f"sent to {sink.name}") or {"time": now, "totals": []}
        data = metrics_data(added(points, read_points(noted["totals"])), since=noted["time"], now=now, delta=True)
        arrived = sink.measure(data)
        if arrived or sink.keeps:
            self._ledger.note(f"sent to {sink.name}", {"time": now, "totals": written(points)})
        return arrived


def sinks(config: TelemetryConfig, folder: Path, ledger: Ledger) -> Iterator[Sink]:
    """Every sink that the settings name. One that cannot be made is logged: the watch has more to do than to export."""
    wanted: list[tuple[object, Callable[[], Sink]]] = [
        (config.file, lambda: FileSink(folder, ledger)),
        (config.otlp_endpoint, lambda: otlp_sink(config.otlp_endpoint)),
        (config.azure_connection_string, lambda: azure_sink(config.azure_secret(), folder / "azure")),
    ]
    for setting, make in wanted:
        try:
            if setting:
                yield make()
        except (Missing, ValueError) as error:
            logging.error("telemetry: %s", error)
        except ImportError as error:
            logging.error("telemetry: %s. Install it: pip install -c constraints.txt -e '.[orchestrator,azure]'", error)
