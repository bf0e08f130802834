"""OpenTelemetry traces of requests: one span each, a child of the caller's where it sent a `traceparent`. Never a text in one.

Only where an exporter is configured, by OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT. Names of attributes are those
of https://opentelemetry.io/docs/specs/semconv/gen-ai/ where it has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.jobs.serving.service import Told

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

QUIET = ("/livez", "/readyz", "/metrics")
TIMEOUT_SECONDS = 3.0


def provider(endpoint: str, *, server: str) -> TracerProvider | None:
    """What sends spans to an OTLP collector in the background; None without an address."""
    if not endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    made = TracerProvider(resource=Resource.create({"service.name": "headway.endpoint", "service.instance.id": server}))
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_SECONDS)
    made.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return made


class Traced:
    """Middleware: a span around every request but those of probes."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._tracer = app, provider.get_tracer("headway")
        self._context = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind

        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        parent = self._context.extract(
            {name: carried[name] for name in ("traceparent", "tracestate") if name in carried}
        )
        status = 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        span = self._tracer.start_span(f"{scope['method']} request", context=parent, kind=SpanKind.SERVER)
        try:
            await self._app(scope, receive, noting)
        finally:
            _tell(span, scope, status)
            span.end()


def _tell(span: Span, scope: Scope, status: int) -> None:
    """Numbers and names of a request that is answered."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("http.request.method", scope["method"])
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
    payload = scope.get("state", {}).get("told")
    if not isinstance(payload, Told):
        return
    span.update_name(f"{scope['method']} {scope['path']}")  # a route that we know: its number is bounded
    span.set_attribute("headway.request_id", payload.request_id)
    if payload.taken:
        span.set_attribute("gen_ai.response.model", payload.taken.model_ref)
        span.set_attribute("headway.rung", payload.taken.rung)
    if payload.ending:
        span.set_attribute("gen_ai.usage.input_tokens", payload.ending.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", payload.ending.completion_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", (payload.ending.finish_reason,))
    if payload.first_seconds is not None:
        span.set_attribute("headway.first_token_seconds", payload.first_seconds)
