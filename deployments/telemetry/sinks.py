"""Where telemetry goes: a file, an OTLP collector, Azure Monitor; and what is told there, as OpenTelemetry's own values.

A sink sends and says whether it worked; what it was sent for is remembered by its caller (export.py), which tries again later.
The vendors' exporters do the talking. Their own telemetry is switched off, and none of them may hold the watch up for long.
Spans, records and figures are made directly and not through a tracer or a meter: what happened, happened in other processes and
at other times, and its ids and totals must be the same however often it is told. What Prometheus scrapes is export.py.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Protocol, cast

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from deployments.telemetry.instruments import SECONDS, Point
from deployments.telemetry.runs import Ledger
from deployments.telemetry.trace_builder import Log, Span

NUMBERS = {
    "DEBUG": SeverityNumber.DEBUG,
    "INFO": SeverityNumber.INFO,
    "WARN": SeverityNumber.WARN,
    "ERROR": SeverityNumber.ERROR,
}


@cache
def resource() -> Resource:
    """Who tells: this service on this host."""
    return Resource(
        {
            "service.name": "headway",
            "service.version": version("headway"),
            "service.instance.id": socket.gethostname(),
            "host.name": socket.gethostname(),
            "host.arch": platform.machine(),
            "os.type": platform.system().lower(),
        }
    )


@cache
def scope() -> InstrumentationScope:
    return InstrumentationScope("headway", version("headway"))


def readable_span(span: Span) -> ReadableSpan:
    """A flow run's span is of kind CONSUMER, work that was asked for elsewhere; Azure Monitor shows it as a request."""
    status = Status(StatusCode.OK) if span.ok else Status(StatusCode.ERROR, span.message or span.status)
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace, span.identity),
        parent=_context(span.trace, span.parent) if span.parent is not None else None,
        resource=resource(),
        attributes=dict(span.attributes),
        kind=SpanKind.CONSUMER if span.kind == "run" else SpanKind.INTERNAL,
        status=status,
        start_time=_nanoseconds(span.start),
        end_time=_nanoseconds(span.end),
        instrumentation_scope=scope(),
    )


def readable_log(log: Log) -> ReadableLogRecord:
    record = LogRecord(
        timestamp=_nanoseconds(log.time),
        observed_timestamp=_nanoseconds(log.time),
        context=set_span_in_context(NonRecordingSpan(_context(log.trace, log.span))),
        severity_text=log.severity,
        severity_number=NUMBERS[log.severity],
        body=log.body,
        attributes=dict(log.attributes),
        event_name=log.name,
    )
    return ReadableLogRecord(record, resource(), scope())


def metrics_data(points: Iterable[Point], *, since: float, now: float, delta: bool) -> MetricsData:
    """Figures of one moment. Totals count from `since`; with `delta`, that is the moment of the last export."""
    span = (_nanoseconds(since), _nanoseconds(now))
    temporality = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    # Smallest and largest are not kept: both are optional in the protocol, though not in the SDK's annotations.
    unknown = cast(float, None)
    metrics = []
    ordered = sorted(points, key=lambda point: point.instrument.name)
    for instrument, same in groupby(ordered, key=lambda point: point.instrument):
        data: Gauge | Sum | Histogram
        if instrument.kind == "histogram":
            buckets = [
                HistogramDataPoint(p.attributes, *span, sum(p.buckets), p.value, p.buckets, SECONDS, unknown, unknown)
                for p in same
            ]
            data = Histogram(buckets, temporality)
        else:
            numbers = [NumberDataPoint(point.attributes, *span, point.value) for point in same]
            data = Gauge(numbers) if instrument.kind == "gauge" else Sum(numbers, temporality, is_monotonic=True)
        metrics.append(Metric(instrument.name, instrument.help, instrument.unit, data))
    return MetricsData([ResourceMetrics(resource(), [ScopeMetrics(scope(), metrics, "")], "")])


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(time: float) -> int:
    return int(time * 1e9)


TIMEOUT_SECONDS = 3.0
FILE_BYTES = 20_000_000
RETRY_SECONDS = 5
AZURE_QUIET = (
    "APPLICATIONINSIGHTS_STATSBEAT_DISABLED_ALL",
    "APPLICATIONINSIGHTS_SDKSTATS_DISABLED",
    "APPLICATIONINSIGHTS_CONTROLPLANE_DISABLED",
    "APPLICATIONINSIGHTS_OPENTELEMETRY_RESOURCE_METRIC_DISABLED",
)


class Sink(Protocol):
    """Something that takes telemetry."""

    name: str
    delta: bool
    """Whether it wants what was added since the last export, and not the whole total."""
    history: bool
    """Whether it wants what happened long before it was switched on."""
    keeps: bool
    """Whether it keeps what did not arrive, and sends it later by itself."""

    def send(self, spans: Sequence[Span], logs: Sequence[Log]) -> bool:
        """Hand on; whether it arrived."""
        ...

    def measure(self, data: MetricsData) -> bool: ...

    def marks(self) -> dict[str, int]:
        """What is to be remembered together with what was sent."""
        ...


class FileSink:
    """OTLP JSON, a line an export, in telemetry/{traces,logs,metrics}.jsonl: the format of the collector's file receiver.

    How long each file is belongs to the ledger. What stands behind that was written by a process that died before it could
    remember it, and is cut off: it comes again. A file that is full is kept as NAME.1.
    """

    name, delta, history, keeps = "file", False, True, False

    def __init__(self, folder: Path, ledger: Ledger, *, limit: int = FILE_BYTES) -> None:
        self.folder, self._ledger, self._limit = folder, ledger, limit
        self._marks: dict[str, int] = {}

    def send(self, spans: Sequence[Span], logs: Sequence[Log]) -> bool:
        from opentelemetry.exporter.otlp.json.file import FileSpanExporter
        from opentelemetry.exporter.otlp.json.file._log_exporter import FileLogExporter

        def told(path: Path) -> bool:
            return FileSpanExporter(path).export([readable_span(span) for span in spans]) is SpanExportResult.SUCCESS

        def logged(path: Path) -> bool:
            done = FileLogExporter(path).export([readable_log(log) for log in logs])
            return done is LogRecordExportResult.SUCCESS

        self._marks = {}
        return (not spans or self._append("traces", told)) and (not logs or self._append("logs", logged))

    def measure(self, data: MetricsData) -> bool:
        from opentelemetry.exporter.otlp.json.file import FileMetricExporter

        self._marks = {}
        done = self._append("metrics", lambda path: FileMetricExporter(path).export(data) is MetricExportResult.SUCCESS)
        self._ledger.advance(self.name, self._marks)
        return done

    def marks(self) -> dict[str, int]:
        """How long the files are with what was sent last."""
        return self._marks

    def _append(self, name: str, write: Callable[[Path], bool]) -> bool:
        path, key = self.folder / f"{name}.jsonl", f"file:{name}"
        known = self._ledger.positions(self.name).get(key, 0)
        size = path.stat().st_size if path.exists() else 0
        if size > known:
            os.truncate(path, known)
        elif size > self._limit:
            os.replace(path, f"{path}.1")
            self._ledger.advance(self.name, {key: 0})
        done = write(path)
        if done:
            self._marks[key] = path.stat().st_size
        return done


class ExporterSink:
    """Three exporters of one vendor as a sink."""

    history = False

    def __init__(
        self,
        name: str,
        spans: SpanExporter,
        logs: LogRecordExporter,
        metrics: MetricExporter,
        *,
        keeps: bool,
        delta: bool,
    ) -> None:
        self.name, self.keeps, self.delta = name, keeps, delta
        self._spans, self._logs, self._metrics = spans, logs, metrics

    def send(self, spans: Sequence[Span], logs: Sequence[Log]) -> bool:
        payload, logged = [readable_span(span) for span in spans], [readable_log(log) for log in logs]
        arrived = not payload or self._spans.export(payload) is SpanExportResult.SUCCESS
        if not arrived and not self.keeps:
            return False
        return (not logged or self._logs.export(logged) is LogRecordExportResult.SUCCESS) and arrived

    def measure(self, data: MetricsData) -> bool:
        return self._metrics.export(data) is MetricExportResult.SUCCESS

    def marks(self) -> dict[str, int]:
        return {}


def otlp_sink(endpoint: str) -> Sink:
    """An OTLP/HTTP collector: protobuf, compressed. Its headers may come from OTEL_EXPORTER_OTLP_HEADERS, as everywhere."""
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    base, gzip = endpoint.rstrip("/"), Compression.Gzip
    return ExporterSink(
        "otlp",
        OTLPSpanExporter(f"{base}/v1/traces", timeout=TIMEOUT_SECONDS, compression=gzip),
        OTLPLogExporter(f"{base}/v1/logs", timeout=TIMEOUT_SECONDS, compression=gzip),
        OTLPMetricExporter(f"{base}/v1/metrics", timeout=TIMEOUT_SECONDS, compression=gzip),
        keeps=False,
        delta=False,
    )


def azure_sink(connection_string: str, folder: Path) -> Sink:
    """Application Insights. What it cannot deliver its exporter keeps in a folder, for two days, and sends later itself.

    So it is never handed the same twice: the service would show it twice.
    """
    os.environ.update(dict.fromkeys(AZURE_QUIET, "true"))
    from azure.monitor.opentelemetry.exporter import (
        AzureMonitorLogExporter,
        AzureMonitorMetricExporter,
        AzureMonitorTraceExporter,
    )

    def settings(signal: str) -> dict[str, object]:
        return {
            "connection_string": connection_string,
            "storage_directory": str(folder / signal),
            "storage_min_retry_interval": RETRY_SECONDS,
            "timeout": TIMEOUT_SECONDS,
            "read_timeout": TIMEOUT_SECONDS,
            "retry_total": 0,
        }

    return ExporterSink(
        "azure",
        AzureMonitorTraceExporter(**settings("traces")),
        AzureMonitorLogExporter(**settings("logs")),
        AzureMonitorMetricExporter(**settings("metrics")),
        keeps=True,
        delta=True,
    )
