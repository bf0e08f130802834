"""The routes of a server: OpenAI's completions and models, Azure ML's score, probes, figures, and the page to try it.

What stands before them is api_middleware.py; the forms of requests and answers, forms.py; how a request is answered, service.py.
No page of FastAPI's own: they load scripts from elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.feedback import router
from tasks.jobs.serving.forms import (
    KINDS,
    ChatChoice,
    ChatRequest,
    Choice,
    CompletionRequest,
    ScoreRequest,
    completion,
    score,
    usage,
)
from tasks.jobs.serving.metrics import CONTENT_TYPE
from tasks.jobs.serving.runtime import Ending, Piece
from tasks.jobs.serving.service import Said, Service, Told, spent
from tasks.serving.protocol.routes import TRAFFIC, USER, WANTED

# An answer as server-sent events, as OpenAI streams one:
# https://html.spec.whatwg.org/multipage/server-sent-events.html.
#
# Every piece is an event; `[DONE]` ends them. What goes wrong once the answer has begun is an event with an `error`,
# and no `[DONE]`: a client can tell a cut answer from a whole one. A comment, which clients skip, tells the edge how
# many tokens there were.


class EventStream(StreamingResponse):
    """Closes what it streams when the client goes away: the model stops, and its place is free."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        payload = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, headers=payload, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


Part = tuple[int, Piece | Ending]
"""The number of an answer, and what comes of it."""


async def events(
    first: Part, rest: AsyncGenerator[Part, None], payload: Told, body: CompletionRequest | ChatRequest
) -> AsyncGenerator[bytes, None]:
    """The events of all answers. `first` was waited for already, so that what cannot be answered gets a status of its own."""
    assert payload.taken is not None
    model_ref = payload.taken.model_ref
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    choices = body.choices()
    kind = choices[0].PART
    endings: dict[int, Ending] = {}
    try:
        async for index, part in _all(first, rest):
            if isinstance(part, Ending):
                endings[index] = part
                choice = choices[index].part("", (), part.finish_reason)
            else:
                choice = choices[index].part(part.text, part.logprobs, None)
            yield _event({**completion(payload.request_id, model_ref, kind, [choice]), **extra})
        if include_usage:
            counted = usage([endings[one.index] for one in choices], n=body.n)
            yield _event({**completion(payload.request_id, model_ref, kind, []), "usage": counted})
        yield b": tokens %d\n\ndata: [DONE]\n\n" % (spent(payload.ending) if payload.ending else 0)
    except HTTPException as error:
        yield _event(error_body(error.status_code, str(error.detail)))
    finally:
        await rest.aclose()


async def _all(first: Part, rest: AsyncIterator[Part]) -> AsyncIterator[Part]:
    yield first
    async for part in rest:
        yield part


async def side_by_side(parts: Sequence[AsyncGenerator[Piece | Ending, None]]) -> AsyncGenerator[Part, None]:
    """Several answers as they come. The first that fails ends all; so does whoever closes this."""
    came: asyncio.Queue[Part | BaseException | None] = asyncio.Queue()

    async def pump(index: int, one: AsyncGenerator[Piece | Ending, None]) -> None:
        try:
            async with aclosing(one):
                async for part in one:
                    came.put_nowait((index, part))
            came.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - whoever reads the queue raises it
            came.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, one)) for index, one in enumerate(parts)]
    try:
        left = len(pumps)
        while left:
            part = await came.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                left -= 1
            else:
                yield part
    finally:
        for one in pumps:
            one.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _event(output: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(output, separators=(",", ":"), ensure_ascii=False).encode()


# The page of an endpoint on which a person tries the model. It loads nothing from elsewhere.


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>headway endpoint</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">
<style>body{font:16px system-ui,sans-serif;max-width:44rem;margin:2rem auto;padding:0 1rem}
textarea,pre{width:100%;box-sizing:border-box;font:14px ui-monospace,monospace}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid #999;padding:.6rem;min-height:4rem}
label{margin-right:1rem;white-space:nowrap}input[type=number]{width:5rem}#told{color:#777;font-size:14px}</style>
<h1>Try the model</h1><p id="model"></p>
<form id="form"><textarea id="prompt" rows="5" aria-label="prompt">def </textarea>
<p><label>tokens <input id="tokens" type="number" min="1" value="64"></label>
<label>temperature <input id="temperature" type="number" min="0" max="2" step="0.1" value="0"></label>
<label>API key <input id="key" type="password" autocomplete="off" placeholder="where one is asked for"></label></p>
<p><button id="complete">Complete</button> <button id="stop" type="button" disabled>Stop</button></p></form>
<pre id="said" aria-live="polite"></pre><p id="told"></p>
<script>
const by = id => document.getElementById(id);
let asking = null;
fetch("readyz").then(r => r.json()).then(s => by("model").textContent = s.ready ? s.model
  : (s.model || "") + " (not ready" + (s.reason ? ": " + s.reason : "") + ")");
by("stop").onclick = () => asking && asking.abort();
by("form").onsubmit = async event => {
  event.preventDefault();
  if (asking) asking.abort();
  const mine = asking = new AbortController(), prompt = by("prompt").value, began = performance.now();
  by("said").textContent = "…"; by("told").textContent = ""; by("stop").disabled = false;
  try { await ask(prompt, mine.signal, began); }
  catch (error) { if (error.name !== "AbortError") by("told").textContent = "The server does not answer: " + error.message; }
  if (asking === mine) { asking = null; by("stop").disabled = true; }
};
async function ask(prompt, signal, began) {
  const headers = {"Content-Type": "application/json"}, key = by("key").value.trim();
  if (key) headers["Authorization"] = "Bearer " + key;
  const body = JSON.stringify({prompt, max_tokens: +by("tokens").value, temperature: +by("temperature").value,
    stream: true, stream_options: {include_usage: true}});
  const reply = await fetch("v1/completions", {method: "POST", headers, body, signal});
  if (!reply.ok) { by("said").textContent = (await reply.json()).error.message; return; }
  const rung = reply.headers.get("X-Headway-Degraded"), reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", usage = null, failed = null; by("said").textContent = prompt;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\\n\\n"); rest = lines.pop();
    for (const line of lines.filter(one => one.startsWith("data: {"))) {
      const said = JSON.parse(line.slice(6));
      failed = said.error || failed; usage = said.usage || usage;
      if (said.choices && said.choices.length) by("said").append(said.choices[0].text);
    }
  }
  const seconds = ((performance.now() - began) / 1000).toFixed(2), told = [];
  if (failed) told.push(failed.message);
  if (usage) told.push(usage.completion_tokens + " tokens in " + seconds + " s");
  if (rung) told.push("answered by the " + rung + " model: the full one is away");
  by("told").textContent = told.join(" · ");
}
</script></html>
"""


REQUEST_ID = re.compile(r"cmpl-[0-9a-f]{32}")
GONE = 499
"""Status of an answer that nobody waits for any more; no client sees it."""
ROUTES = (
    "there are POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /v1/models/NAME, POST /score, "
    "POST /v1/feedback, GET /readyz, GET /livez, GET /metrics and GET / (docs/api.md)"
)
T = TypeVar("T")


def make_api(service: Service) -> FastAPI:
    """The routes over one service."""
    api = FastAPI(title="headway endpoint", docs_url=None, redoc_url=None, openapi_url=None)
    _add_probes(api, service)
    _add_completions(api, service)
    _add_errors(api, service)
    api.include_router(router(service.outputs, _caller))
    return api


def _add_probes(api: FastAPI, service: Service) -> None:
    @api.get("/livez")
    async def livez() -> dict[str, bool]:
        return {"alive": True}

    @api.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        ladder = service.ladder
        if request.headers.get(TRAFFIC) == WANTED:
            ladder.take()
        state = {"ready": ladder.ready, "model": service.model_ref, "server": service.server, "reason": ladder.reason}
        state |= {"answers": ladder.answers, "loading": ladder.loading and not ladder.answers}
        return JSONResponse(state, 200 if ladder.ready else 503)

    def served() -> dict[str, Any]:
        one = {"id": service.model_ref, "object": "model", "created": service.since, "owned_by": "headway"}
        return {**one, "max_model_len": service.ladder.context_length}  # as vLLM names it

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served()]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_named(name)
        return served()

    @api.get("/metrics")
    async def metrics() -> Response:
        more = await service.ladder.figures()
        return Response(service.metrics.text() + more.encode(), headers={"Content-Type": CONTENT_TYPE})

    @api.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)


def _add_completions(api: FastAPI, service: Service) -> None:
    async def answered(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        payload, asks = told_of(request), body.asks()
        choices: Sequence[Choice | ChatChoice] = body.choices()
        _require_tokens(service, body.max_tokens)
        taken = service.take(body.model, payload)
        if body.stream:
            rest = side_by_side([service.pieces(ask, taken, payload) for ask in asks])
            try:
                first = await anext(rest)  # what cannot be answered has a status of its own
            except BaseException:
                await rest.aclose()
                raise
            return EventStream(events(first, rest, payload, body), payload.headers())
        given = await unless_gone(request, _together([service.answer(ask, taken, payload) for ask in asks]))
        whole = [choice.whole(one) for choice, one in zip(choices, given, strict=True)]
        answer = completion(payload.request_id, taken.model_ref, choices[0].KIND, whole)
        counted = usage([one.ending for one in given], n=body.n)
        return JSONResponse({**answer, "usage": counted}, headers=told_headers(payload))

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answered(body, request)

    @api.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await answered(body, request)

    @api.post("/score")
    async def scored(body: ScoreRequest, request: Request) -> Response:
        payload, asks = told_of(request), body.asks()
        _require_tokens(service, asks[0].max_tokens)
        answers = [service.answer(ask, service.take(None, payload), payload) for ask in asks]
        output = await unless_gone(request, _together(answers))
        texts = [one.text for one in output]
        full = body.input_data.parameters.return_full_text
        return JSONResponse(score(asks, texts, full=full), headers=told_headers(payload))


def _add_errors(api: FastAPI, service: Service) -> None:
    def error(request: Request, status: int, message: str, headers: dict[str, str]) -> JSONResponse:
        payload = {"X-Headway-Model": service.model_ref, **told_of(request).headers()}
        return JSONResponse(error_body(status, message), status, {**payload, **headers})

    @api.exception_handler(StarletteHTTPException)
    async def refused(request: Request, raised: StarletteHTTPException) -> JSONResponse:
        message = str(raised.detail)
        if message in ("Not Found", "Method Not Allowed"):  # Starlette's own words for a path that nothing answers
            message = f"{request.method} {request.url.path} is nothing here: {ROUTES}"
        return error(request, raised.status_code, message, dict(raised.headers or {}))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, raised: RequestValidationError) -> JSONResponse:
        mistakes = (f"{_place(one['loc'])}: {one['msg'].removeprefix('Value error, ')}" for one in raised.errors()[:5])
        return error(request, 400, "; ".join(mistakes), {})

    @api.exception_handler(Exception)
    async def broken(request: Request, raised: Exception) -> JSONResponse:
        return error(request, 500, "the server has a fault; its log says more", {})


async def _together(answers: Sequence[Coroutine[Any, Any, Said]]) -> list[Said]:
    """Several answers at once; the first that fails ends the others."""
    work = [asyncio.create_task(one) for one in answers]
    try:
        return await asyncio.gather(*work)
    finally:
        for one in work:
            one.cancel()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of the work; it is given up when the client goes away. Raises HTTPException (499) then."""
    working, going = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(GONE, "the client went away")
        return working.result()
    finally:
        working.cancel()
        going.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def told_of(request: Request) -> Told:
    """What is known of a request; the first who asks begins it."""
    payload = getattr(request.state, "told", None)
    if payload is None:
        given = request.headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"cmpl-{uuid.uuid4().hex}"
        kept = request.headers.get(TRAFFIC) == USER
        payload = request.state.told = Told(request_id, caller=_caller(request), kept=kept)
    return payload


def _caller(request: Request) -> str:
    """Who asks, as the edge found out; behind it nobody else can say so."""
    return request.headers.get("x-headway-caller", "")


def told_headers(payload: Told) -> dict[str, str]:
    return {**payload.headers(), "X-Headway-Tokens": str(spent(payload.ending) if payload.ending else 0)}


def _require_tokens(service: Service, wanted: int) -> None:
    most = service.limits.max_tokens
    if wanted > most:
        raise HTTPException(400, f"max_tokens: {wanted} is more than the {most} that one request may ask for")


def _place(loc: tuple[Any, ...]) -> str:
    """Where in a body something is wrong."""
    return ".".join(str(part) for part in loc[1:] if part not in KINDS) or "body"
