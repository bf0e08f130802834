"""The routes of a server: OpenAI's completions and models, Azure ML's score, probes, figures, and the page to try it.

What stands before them is api_middleware.py; how a request is answered, service.py. No page of
FastAPI's own: they load scripts from elsewhere.

`POST /v1/feedback`: a caller says whether an answer was right; the label is joined to the request by its id, and kept.

`ROOT/MODEL_VERSION/feedback/SERVER-NUMBER.jsonl`, beside the measures of the same model (tasks/jobs/serving/outputs.py), as
bounded as they are. Only who asked may label; of a request that nobody asked, that was asked by somebody else, and that is
forgotten, the answer is the same 404. Who a caller is decides the edge. Accuracy over time: tasks/serving/monitor/anomalies.py.
See docs/watch.md.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from tasks.formats.answers import Label, line
from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.metrics import CONTENT_TYPE
from tasks.jobs.serving.outputs import Outputs, Segments, clean, oldest_first
from tasks.jobs.serving.runtime import Ask, Ending, Piece
from tasks.jobs.serving.service import Said, Service, Told, spent
from tasks.serving.protocol.routes import TRAFFIC, USER, WANTED

MOST_LABEL_SEGMENTS = 10
"""Of an endpoint: 20 MB, about 100,000 labels."""
LOOKS = 8
"""Labels that may wait for a look at the disk; more are answered 429 at once."""
LABELS = {"right": 1.0, "wrong": 0.0}
FOLDER = "feedback"


class FeedbackRequest(BaseModel):
    """Body of POST /v1/feedback: the id of a request, and either a label or a score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")]
    label: Literal["right", "wrong"] | None = None
    score: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    comment: Annotated[str, Field(max_length=2000)] = ""

    @model_validator(mode="after")
    def _one_of_two(self) -> FeedbackRequest:
        if (self.label is None) == (self.score is None):
            raise ValueError("give either label, right or wrong, or score, from 0 to 1")
        return self

    @property
    def right(self) -> float:
        return LABELS[self.label] if self.label is not None else float(self.score or 0.0)


class Feedback:
    """Keeps labels. State: the file that is written to, and how many wait."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self._segments = Segments(outputs.folder / FOLDER, outputs.server, make_room=_make_room)
        self._one = asyncio.Lock()
        self._waiting = 0

    async def take(self, output: FeedbackRequest, caller: str) -> Label:
        """Join a label to its request and write it down. Raises HTTPException: 404 for a request that is not theirs, 429."""
        if self._waiting >= LOOKS:
            raise HTTPException(429, "too many labels wait: try again in a second", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._one:
                return await run_in_threadpool(self._take, output, caller)
        finally:
            self._waiting -= 1

    def _take(self, output: FeedbackRequest, caller: str) -> Label:
        asked = self.outputs.find(output.request_id, caller)
        if asked is None or not 200 <= asked.status < 300:
            raise HTTPException(404, f"no answer to a request {output.request_id!r} of yours is known here")
        settings = self.outputs.settings
        comment = (clean(output.comment, settings) or "") if settings.keep_text else ""
        label = Label(
            time=time.time(),
            id=asked.id,
            asked=asked.time,
            right=output.right,
            model=asked.model,
            rung=asked.rung,
            caller=asked.caller,
            comment=comment,
        )
        try:
            self._segments.write(line(label))
        except OSError as error:
            raise HTTPException(503, "the label could not be kept", {"Retry-After": "10"}) from error
        return label


def router(outputs: Outputs, caller_of: Callable[[Request], str]) -> APIRouter:
    """The route, over what a server keeps of its answers; `caller_of` names who asks: empty where no keys are asked for."""
    routes, feedback = APIRouter(), Feedback(outputs)

    @routes.post("/v1/feedback")
    async def label(body: FeedbackRequest, request: Request) -> dict[str, str | float | bool]:
        kept = await feedback.take(body, caller_of(request))
        return {"request_id": kept.id, "model": kept.model, "right": kept.right, "comment_kept": bool(kept.comment)}

    return routes


def _make_room(folder: Path) -> None:
    """The oldest labels of the endpoint go, whichever model they are of."""
    segments = oldest_first(list(folder.parents[1].glob(f"*/{FOLDER}/*.jsonl")))
    for path in segments[: max(len(segments) + 1 - MOST_LABEL_SEGMENTS, 0)]:
        path.unlink(missing_ok=True)


# The forms of requests and answers: OpenAI's completions, and the one of Azure ML's text generation. Values only.
#
# OpenAI's: https://platform.openai.com/docs/api-reference/completions. What of it a request may hold and the server
# does not do is refused by name, unless it holds the value that changes nothing: clients send those along.


MOST_CHARACTERS = 1_000_000
MOST_PROMPTS = 16
DEFAULT_TOKENS = 64
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""What is not done here, and the values by which nothing is asked for; null is one of them."""
IGNORED = ("user",)
Prompt = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=4)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """How a stream is told."""

    include_usage: bool = False


class CompletionRequest(_Body):
    """Body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed | None = None
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """Null is the same as nothing; one text stands for a list of it, and a list of one prompt for the prompt."""
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise ValueError(f"`{name}` is not supported here: leave it out")
        kept = {name: value for name, value in body.items() if value is not None and name not in (*NEUTRAL, *IGNORED)}
        if isinstance(kept.get("stop"), str):
            kept["stop"] = [kept["stop"]]
        if isinstance(kept.get("prompt"), list):
            if len(kept["prompt"]) != 1:
                raise ValueError("`prompt` holds several prompts, or none: send one text a request")
            kept["prompt"] = kept["prompt"][0]
        return kept

    def ask(self) -> Ask:
        return Ask(
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop),
        )


class ScoreParameters(_Body):
    """As Azure ML's models for text generation name them."""

    max_new_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    do_sample: bool = True
    """False: greedy, whatever the temperature."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seed: Seed | None = None
    stop: Stops = []
    return_full_text: bool = False
    """Whether the prompt stands before each answer."""


class ScoreInput(_Body):
    """Prompts that are answered together."""

    input_string: Annotated[list[Prompt], Field(min_length=1, max_length=MOST_PROMPTS)]
    parameters: ScoreParameters = ScoreParameters()


class ScoreRequest(_Body):
    """Body of POST /score."""

    input_data: ScoreInput

    def asks(self) -> list[Ask]:
        how = self.input_data.parameters
        heat = how.temperature if how.do_sample else 0.0
        stop = tuple(how.stop)
        return [
            Ask(prompt, how.max_new_tokens, temperature=heat, top_p=how.top_p, seed=how.seed, stop=stop)
            for prompt in self.input_data.input_string
        ]


def completion(
    request_id: str, model_ref: str, text: str, ending: Ending | None, *, kind: Literal["whole", "piece"]
) -> dict[str, Any]:
    """OpenAI's text_completion object, or a piece of one; `completion_tokens` counts the end-of-text token when there is one."""
    reason = ending.finish_reason if ending else None
    output = {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_ref,
        "choices": [{"index": 0, "text": text, "finish_reason": reason, "logprobs": None}],
    }
    return {**output, "usage": usage(ending)} if kind == "whole" and ending else output


def usage(ending: Ending) -> dict[str, int]:
    """What an answer is counted as."""
    read, written = ending.prompt_tokens, ending.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def score(asks: list[Ask], texts: list[str], *, full: bool) -> list[dict[str, str]]:
    """Azure ML's answer: one object, an answer by the number of its prompt."""
    pairs = enumerate(zip(asks, texts, strict=True))
    return [{str(number): (ask.prompt if full else "") + text for number, (ask, text) in pairs}]


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


async def events(
    first: Piece | Ending, rest: AsyncGenerator[Piece | Ending, None], payload: Told, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of one answer. `first` was waited for already, so that what cannot be answered gets a status of its own."""
    assert payload.taken is not None
    model_ref = payload.taken.model_ref
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        async for part in _all(first, rest):
            text, ending = (part.text, None) if isinstance(part, Piece) else ("", part)
            yield _event({**completion(payload.request_id, model_ref, text, ending, kind="piece"), **extra})
            if ending is not None:
                if include_usage:
                    empty = completion(payload.request_id, model_ref, "", None, kind="piece")
                    yield _event({**empty, "choices": [], "usage": usage(ending)})
                yield b": tokens %d\n\ndata: [DONE]\n\n" % spent(ending)
    except HTTPException as error:
        yield _event(error_body(error.status_code, str(error.detail)))
    finally:
        await rest.aclose()


async def _all(first: Piece | Ending, rest: AsyncIterator[Piece | Ending]) -> AsyncIterator[Piece | Ending]:
    yield first
    async for part in rest:
        yield part


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
    "there are POST /v1/completions, GET /v1/models, POST /score, POST /v1/feedback, GET /readyz, GET /livez, GET /metrics "
    "and GET / (docs/endpoint.md)"
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

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        one = {"id": service.model_ref, "object": "model", "created": service.since, "owned_by": "headway"}
        # As vLLM names it.
        return {"object": "list", "data": [{**one, "max_model_len": service.ladder.context_length}]}

    @api.get("/metrics")
    async def metrics() -> Response:
        more = await service.ladder.figures()
        return Response(service.metrics.text() + more.encode(), headers={"Content-Type": CONTENT_TYPE})

    @api.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)


def _add_completions(api: FastAPI, service: Service) -> None:
    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        payload = told_of(request)
        _require_tokens(service, body.max_tokens)
        taken = service.take(body.model, payload)
        if body.stream:
            assert payload.taken is not None
            rest = service.pieces(body.ask(), payload.taken, payload)
            try:
                first = await anext(rest)  # what cannot be answered has a status of its own
            except BaseException:
                await rest.aclose()
                raise
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(events(first, rest, payload, include_usage=usage), payload.headers())
        given = await unless_gone(request, service.answer(body.ask(), taken, payload))
        answer = completion(payload.request_id, taken.model_ref, given.text, given.ending, kind="whole")
        return JSONResponse(answer, headers=told_headers(payload))

    @api.post("/score")
    async def scored(body: ScoreRequest, request: Request) -> Response:
        payload, asks = told_of(request), body.asks()
        _require_tokens(service, asks[0].max_tokens)
        output = await unless_gone(request, _together(service, asks, payload))
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


async def _together(service: Service, asks: list[Ask], payload: Told) -> list[Said]:
    """Answers to several prompts at once; the first that fails ends the others."""
    work = [asyncio.create_task(service.answer(ask, service.take(None, payload), payload)) for ask in asks]
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
    return ".".join(str(part) for part in loc[1:]) or "body"
