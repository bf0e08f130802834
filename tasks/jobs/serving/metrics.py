"""Figures of one server for Prometheus, in its text format; and the middleware that counts every request that reaches the API.

What is refused before that is counted by the edge. No label holds a text, a caller or a request id: their number is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/feedback",
    "/score",
    "/livez",
    "/readyz",
    "/metrics",
    "/",
)


class Metrics:
    """All figures of one server."""

    def __init__(self) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = self._counter("requests", "Requests that reached the API", "route", "status")
        self.refused = self._counter("refused", "Requests that the edge answered itself", "why", "status")
        self.tokens = self._counter("tokens", "Tokens that were read and written", "kind")
        self.degraded = self._counter("degraded", "Answers of a lower rung than the full model", "rung")
        self.seconds = self._histogram("request_seconds", "Time of a request until its answer's end")
        self.first = self._histogram("first_token_seconds", "Time of a completion until its first text")

    def watch(self, name: str, text: str, figure: Callable[[], float]) -> None:
        """A gauge whose figure is asked for when somebody reads it."""
        Gauge(f"headway_endpoint_{name}", text, registry=self._registry).set_function(figure)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headway_endpoint_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"headway_endpoint_{name}", text, buckets=SECONDS, registry=self._registry)


class Counted:
    """Middleware: every request by route and status, completions by their time."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 499

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        route = scope["path"] if scope["path"] in ROUTES else "other"
        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            if route in ("/v1/completions", "/v1/chat/completions", "/score"):
                self._metrics.seconds.observe(time.perf_counter() - began)
