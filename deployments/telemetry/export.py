"""One look at everything, again and again: what happened is sent on, what is, is measured. The watch calls `Telemetry.tick`.

Flows and jobs never talk to a backend of telemetry: they write folders, and this reads them. How far every exporter got is in
the ledger, so a killed watch goes on where it was, and a backend that is away gets later what it missed. See docs/monitoring.md.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from deployments.configuration.platform import PlatformConfig, TelemetryConfig
from deployments.telemetry import instruments as of
from deployments.telemetry.audited import ITEM, Audited
from deployments.telemetry.host import Host
from deployments.telemetry.instruments import Point
from deployments.telemetry.jobs import Jobs
from deployments.telemetry.ledger import Ledger
from deployments.telemetry.measure import added, counts, of_alerts, of_runs, of_training, read_points, totals, written
from deployments.telemetry.otel import metrics_data
from deployments.telemetry.prometheus import Scrape, serve
from deployments.telemetry.reader import HISTORY_SECONDS, Reader
from deployments.telemetry.runs import Runs
from deployments.telemetry.sinks import FileSink, Sink, azure_sink, otlp_sink
from deployments.telemetry.trace_builder import Log
from tasks.common.errors import Missing

COUNTER = "counter"
"""The reader that adds up the totals."""


class Telemetry:
    """Everything that is told of one home. State on disk is the ledger; the rest is made anew at every start."""

    def __init__(self, home: Path, config: PlatformConfig) -> None:
        self.home, self._config = home, config.telemetry
        self.folder = home / "telemetry"
        self._ledger = Ledger(self.folder / "ledger.db")
        self._runs, self._jobs, self._host, self._audited = Runs(home), Jobs(home), Host(home), Audited(home)
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
                item = f"job:{job.identity}"
                before = known.get(item, 0)
                if job.attempt and job.attempt != before:
                    to[item] = job.attempt
                    key = (of.RESTARTS.name, (job.stage,), "")
                    more = job.attempt - before if 0 < before < job.attempt else job.attempt - 1
                    add |= {key: add.get(key, 0.0) + more} if more else {}
            self._counter.remember(to, sizes, add)
            for sink, reader in self._sinks:
                self._export(sink, reader, sizes, now)
            points = self._points(sizes, now)
            self._scrape.points = points
            self._measure(points, now)
        except (OSError, sqlite3.OperationalError) as error:
            logging.warning("telemetry: %s; the next look tries again", error)
        self._took = time.perf_counter() - began

    def _reader(self, name: str) -> Reader:
        return Reader(name, self._ledger, self._runs.folder)

    def _export(self, sink: Sink, reader: Reader, sizes: dict[str, int], now: float) -> None:
        """Send what a sink does not have yet, and remember it only when it arrived."""
        if not reader.ready(now):
            return
        if not sink.history:
            reader.skip_history(sizes, now)
        spans, logs, to = reader.read(sizes)
        failed, ends = self._failed_jobs(sink, now)
        entries, payload = self._audited.read(self._ledger.positions(sink.name).get(ITEM, 0), now)
        if not to and not ends and not payload:
            return
        new = [entry for entry in entries if sink.history or now - entry.time < HISTORY_SECONDS]
        arrived = sink.send(spans, [*logs, *failed, *new])
        if arrived or sink.keeps:
            reader.remember({**to, **ends, **payload, **sink.marks()}, sizes)
        reader.rest(now, well=arrived)

    def _failed_jobs(self, sink: Sink, now: float) -> tuple[list[Log], dict[str, int]]:
        """The logs of failed jobs that a sink does not have yet, and the items to remember for them."""
        logs: list[Log] = []
        ends: dict[str, int] = {}
        for job in (view for view in self._jobs.views() if view.failed):
            item, at = f"job:{job.identity}", int(job.ended * 1000)
            if self._ledger.positions(sink.name).get(item, 0) < at:
                ends[item] = at
                logs += [job.told()] if sink.history or now - job.ended < HISTORY_SECONDS else []
        return logs, ends

    def _points(self, sizes: dict[str, int], now: float) -> list[Point]:
        return [
            *totals(self._ledger.totals),
            *of_runs(self._runs.views()),
            *of_training(self._jobs.training(now)),
            *of_alerts(self.home),
            *self._host.look(),
            Point(of.TICK, (), self._took),
            Point(of.TIME, (), now),
            *(Point(of.BEHIND, (sink.name,), float(reader.behind(sizes))) for sink, reader in self._sinks),
        ]

    def _measure(self, points: list[Point], now: float) -> None:
        """Send all figures, now and then."""
        if 0 <= now - self._measured < self._config.metrics_seconds:
            return
        self._measured = now
        for sink, reader in self._sinks:
            if reader.ready(now):
                reader.rest(now, well=self._send_figures(sink, points, now))

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
            logging.error("telemetry: %s. Install it: pip install -c constraints.txt -e '.[monitor]'", error)
