"""One request for a completion, from the rung that answers it to what is measured and counted of it. HTTP's forms are api.py.

An answer comes in pieces, also where the client wants it whole: so a client that goes away is noticed, and its place is free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.config.serving import LimitsConfig
from tasks.jobs.serving.fallback_models import Ladder, Taken
from tasks.jobs.serving.metrics import Metrics
from tasks.jobs.serving.outputs import Outputs, measured
from tasks.jobs.serving.runtime import Ask, Ending, Gone, Logprob, Piece, Unfit
from tasks.serving.protocol.routes import GONE, LOADING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

# OpenTelemetry traces of requests: one span each, a child of the caller's where it sent a `traceparent`. Never a text
# in one.
#
# Only where an exporter is configured, by OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT. Names of attributes
# are those of https://opentelemetry.io/docs/specs/semconv/gen-ai/ where it has one.


DIGITS = 8
"""Of a version that a request names, at least: as everywhere on the command line."""
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


@dataclass
class Told:
    """What is known of a request besides its texts. Filled while it is answered; read by traces and headers."""

    request_id: str
    caller: str = ""
    kept: bool = True
    """Whether what is measured of it is kept: only of users' requests, not of golden prompts and copies."""
    taken: Taken | None = None
    ending: Ending | None = None
    first_seconds: float | None = None

    def headers(self) -> dict[str, str]:
        """Every answer says what answered."""
        rung = self.taken.rung if self.taken else "full"
        degraded = {} if rung == "full" else {"X-Headway-Degraded": rung}
        named = {"X-Headway-Model": self.taken.model_ref} if self.taken else {}
        return {"X-Request-Id": self.request_id, **named, **degraded}


@dataclass(frozen=True)
class Said:
    """A whole answer."""

    text: str
    ending: Ending
    logprobs: tuple[Logprob, ...] = ()


class Service:
    """What answers. State: the models, what is kept of answers, and the figures."""

    def __init__(
        self,
        ladder: Ladder,
        *,
        model_ref: str,
        endpoint: str = "",
        server: str,
        outputs: Outputs,
        metrics: Metrics,
        limits: LimitsConfig,
    ) -> None:
        self.ladder, self.model_ref, self.endpoint, self.server = ladder, model_ref, endpoint, server
        self.since = int(time.time())
        self.outputs, self.metrics, self.limits = outputs, metrics, limits
        metrics.watch("model_up", "Whether the full model is up and proven", lambda: float(ladder.ready))
        metrics.watch(
            "rungs_up", "Models that would answer now, the full one among them", lambda: float(sum(ladder.up.values()))
        )
        metrics.watch("waiting", "Requests that have got no text yet", lambda: float(ladder.waiting))

    def take(self, model: str | None, payload: Told) -> Taken:
        """The best model that is up. Raises HTTPException: 404 for another model than is served, 503 when there is none."""
        if model is not None:
            self.require_named(model)
        taken = self.ladder.take()
        if taken is None:
            text = f"the model is not ready: {self.ladder.reason or 'it is being loaded'}"
            raise self.away(text)
        payload.taken = taken
        if taken.rung != "full":
            self.metrics.degraded.labels(taken.rung).inc()
        return taken

    def require_named(self, model: str) -> None:
        """Raise HTTPException (404) for the name of another model than is served."""
        if not self._answers_to(model):
            name = self.model_ref.partition("@")[0].rpartition("/")[2]
            raise HTTPException(
                404,
                f"the model {model!r} is not served here: this is {self.model_ref}. Name it {name!r}, or leave `model` out",
            )

    def _answers_to(self, model: str) -> bool:
        """Whether `model` of a request names what is served.

        That is `tiny` or `model/tiny`, each also with `@` and eight or more digits of the version, and the endpoint's name,
        with or without `endpoint/`.
        """
        named, _, digits = model.partition("@")
        ref, _, version = self.model_ref.partition("@")
        if "@" in model:
            return named in (ref, ref.rpartition("/")[2]) and len(digits) >= DIGITS and version.startswith(digits)
        return model in (
            ref,
            ref.rpartition("/")[2],
            *((self.endpoint, f"endpoint/{self.endpoint}") if self.endpoint else ()),
        )

    async def answer(self, ask: Ask, taken: Taken, payload: Told) -> Said:
        """A whole answer. Raises HTTPException as `pieces` does."""
        texts: list[str] = []
        likely: list[Logprob] = []
        async with aclosing(self.pieces(ask, taken, payload)) as parts:
            async for part in parts:
                if isinstance(part, Ending):
                    return Said("".join(texts), part, tuple(likely))
                texts.append(part.text)
                likely += part.logprobs
        raise AssertionError("a runtime ended without an ending")

    async def pieces(self, ask: Ask, taken: Taken, payload: Told) -> AsyncGenerator[Piece | Ending, None]:
        """An answer as it comes. Raises HTTPException: 400 for what cannot be completed, 503 when the model goes, 504."""
        asked, deadline = time.perf_counter(), asyncio.get_running_loop().time() + self.limits.request_seconds
        with self.outputs.measuring(ask.max_tokens) if payload.kept else nullcontext(dict[str, Any]()) as result:
            rung = "" if taken.rung == "full" else taken.rung
            result |= {
                "id": payload.request_id,
                "model": taken.model_ref,
                "rung": rung,
                "caller": payload.caller,
                "prompt": ask.prompt or ask.messages,
            }
            texts: list[str] = []
            async with aclosing(taken.runtime.complete(ask)) as parts:
                while True:
                    part = await self._next(parts, deadline)
                    payload.first_seconds = payload.first_seconds or time.perf_counter() - asked
                    if isinstance(part, Ending):
                        break
                    if not part.of_prompt:
                        texts.append(part.text)
                    yield part
            text = "".join(texts)
            result |= {"first_seconds": round(payload.first_seconds, 6), "text": text, **measured(part, text)}
        self.count(part, payload)
        yield part

    async def _next(self, parts: AsyncIterator[Piece | Ending], deadline: float) -> Piece | Ending:
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(parts)
        except Unfit as error:
            raise HTTPException(400, str(error)) from error
        except Gone as error:
            raise self.gone(error) from error
        except TimeoutError as error:
            text = f"the answer was not ready within {self.limits.request_seconds:g} s: ask for fewer tokens"
            raise HTTPException(504, text) from error

    def gone(self, error: Gone) -> HTTPException:
        """How a request is answered whose model went away."""
        marked = {GONE: "1"} if error.taken else self._loading()
        return self._away(f"the model went away while it answered: {error}", marked)

    def away(self, text: str) -> HTTPException:
        """How a request is answered that no model had."""
        return self._away(text, self._loading())

    def _loading(self) -> dict[str, str]:
        """How a 503 is marked whose request no model had."""
        return {LOADING: "1"} if self.ladder.loading or self.ladder.answers else {}

    def _away(self, text: str, marked: Mapping[str, str]) -> HTTPException:
        return HTTPException(503, text, {"Retry-After": str(self.ladder.retry_seconds), **marked})

    def count(self, ending: Ending, payload: Told) -> None:
        """Note what an answer read and wrote."""
        before = payload.ending
        payload.ending = ending
        if before is not None:  # of several answers to one request, the tokens of all
            prompt, completion = before.prompt_tokens, before.completion_tokens
            payload.ending = replace(
                ending,
                prompt_tokens=prompt + ending.prompt_tokens,
                completion_tokens=completion + ending.completion_tokens,
            )
        self.metrics.tokens.labels("prompt").inc(ending.prompt_tokens)
        self.metrics.tokens.labels("completion").inc(ending.completion_tokens)
        if payload.first_seconds is not None:
            self.metrics.first.observe(payload.first_seconds)


def spent(ending: Ending) -> int:
    """Tokens that an answer is charged with."""
    return ending.prompt_tokens + ending.completion_tokens
