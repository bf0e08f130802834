"""Headway's spans, records and figures as OpenTelemetry's own values, which every exporter takes. Pure, but for the resource.

They are made directly and not through a tracer or a meter: what happened, happened in other processes and at other times, and
its ids and totals must be the same however often it is told.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import cast

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
from opentelemetry.trace.status import Status, StatusCode

from deployments.telemetry.instruments import SECONDS, Instrument, Point
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
    ordered = sorted(points, key=lambda point: point.instrument.name)
    groups = [(first, list(same)) for first, same in groupby(ordered, key=lambda point: point.instrument)]
    metrics = [
        Metric(instrument.name, instrument.help, instrument.unit, _data(instrument, same, span, delta=delta))
        for instrument, same in groups
    ]
    return MetricsData([ResourceMetrics(resource(), [ScopeMetrics(scope(), metrics, "")], "")])


def _data(
    instrument: Instrument, points: Sequence[Point], span: tuple[int, int], *, delta: bool
) -> Gauge | Sum | Histogram:
    temporality = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    if instrument.kind == "histogram":
        return Histogram([_histogram(point, span) for point in points], temporality)
    numbers = [NumberDataPoint(point.attributes, *span, point.value) for point in points]
    return Gauge(numbers) if instrument.kind == "gauge" else Sum(numbers, temporality, is_monotonic=True)


def _histogram(point: Point, span: tuple[int, int]) -> HistogramDataPoint:
    """Smallest and largest are not kept: both are optional in the protocol, though not in the SDK's annotations."""
    unknown = cast(float, None)
    count = sum(point.buckets)
    return HistogramDataPoint(point.attributes, *span, count, point.value, point.buckets, SECONDS, unknown, unknown)


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(time: float) -> int:
    return int(time * 1e9)
