"""The routes of a server: OpenAI's completions and models, Azure ML's score, probes, figures, and the page to try it.

What stands before them is api_middleware.py; how a request is answered, service.py. No page of
FastAPI's own: they load scripts from elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.feedback import router
from tasks.jobs.serving.metrics import CONTENT_TYPE
from tasks.jobs.serving.runtime import Ask, Ending, Logprob, Piece
from tasks.jobs.serving.service import Said, Service, Told, spent
from tasks.serving.protocol.routes import TRAFFIC, USER, WANTED

# The forms of requests and answers: OpenAI's completions, and the one of Azure ML's text generation. Values only.
#
# OpenAI's: https://platform.openai.com/docs/api-reference/completions. What of it a request may hold and the server
# does not do is refused by name, unless it holds the value that changes nothing: clients send those along.


MOST_CHARACTERS = 1_000_000
MOST_PROMPTS = 16
MOST_ANSWERS = 64
"""To one request: its prompts times `n`."""
MOST_LOGPROBS = 20
"""As many as vLLM gives without being told otherwise."""
DEFAULT_TOKENS = 64
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
"""What is not done here, and the values by which nothing is asked for; null is one of them."""
IGNORED = ("user",)
Prompt = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
Token = Annotated[int, Field(ge=0)]
Texts = Annotated[list[Prompt], Field(max_length=MOST_PROMPTS)]
Tokens = Annotated[
    list[Annotated[list[Token], Field(min_length=1, max_length=MOST_CHARACTERS)]], Field(max_length=MOST_PROMPTS)
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=4)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]


def _kind_of_prompt(prompts: Any) -> str:
    return "tokens" if isinstance(prompts, list) and prompts and isinstance(prompts[0], list) else "texts"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """How a stream is told."""

    include_usage: bool = False


class CompletionRequest(_Body):
    """Body of POST /v1/completions."""

    prompt: Annotated[Annotated[Texts, Tag("texts")] | Annotated[Tokens, Tag("tokens")], Discriminator(_kind_of_prompt)]
    """In a request also a text, or the tokens of one prompt."""
    max_tokens: Annotated[int, Field(ge=0)] = DEFAULT_TOKENS
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    logit_bias: Annotated[dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias], Field(max_length=1024)] = {}
    seed: Seed | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] = []
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        """Null is the same as nothing, and one text, or one prompt, stands for a list of it."""
        if not isinstance(body, dict):
            return body
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise ValueError(f"`{name}` is not supported here: leave it out")
        kept = {name: value for name, value in body.items() if value is not None and name not in (*NEUTRAL, *IGNORED)}
        if isinstance(kept.get("stop"), str):
            kept["stop"] = [kept["stop"]]
        prompt = kept.get("prompt")
        if prompt == []:
            raise ValueError("`prompt` is empty: send a text, or a list of up to 16")
        if isinstance(prompt, str) or (isinstance(prompt, list) and isinstance(prompt[0], int)):
            kept["prompt"] = [prompt]
        return kept

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if not self.max_tokens and not self.echo:
            raise ValueError("`max_tokens` is 0: ask for a token, or for the prompt by `echo`")
        if (answers := len(self.prompt) * self.n) > MOST_ANSWERS:
            raise ValueError(
                f"{len(self.prompt)} prompts with `n` {self.n} are {answers} answers: ask for up to {MOST_ANSWERS}"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"`min_tokens` {self.min_tokens} must not be above `max_tokens` {self.max_tokens}")
        return self

    def asks(self) -> list[Ask]:
        """An answer each, in the order of their choices: the `n` of a prompt draw with seeds that follow each other."""
        return [
            Ask(
                prompt=prompt if isinstance(prompt, str) else "",
                tokens=() if isinstance(prompt, str) else tuple(prompt),
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=max(self.top_k, 0),
                min_p=self.min_p,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
                seed=None if self.seed is None else self.seed + number,
                stop=tuple(self.stop),
                stop_tokens=tuple(self.stop_token_ids),
                min_tokens=self.min_tokens,
                ignore_end=self.ignore_eos,
                logprobs=self.logprobs,
                echo=self.echo,
            )
            for prompt in self.prompt
            for number in range(self.n)
        ]


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


class Choice:
    """One of a request's answers, as it is told. State: the characters of it that were told, by which tokens have places."""

    def __init__(self, index: int, *, wants_logprobs: bool) -> None:
        self.index, self._wants_logprobs = index, wants_logprobs
        self._told = 0

    def part(self, text: str, logprobs: Sequence[Logprob], finish_reason: str | None) -> dict[str, Any]:
        """OpenAI's choice, or a piece of one; places are counted from the beginning of the answer, prompt included."""
        output = {"index": self.index, "text": text, "finish_reason": finish_reason}
        if not self._wants_logprobs:
            return {**output, "logprobs": None}
        places = []
        for each in logprobs:
            places.append(self._told)
            self._told += len(each.text)
        return {
            **output,
            "logprobs": {
                "tokens": [each.text for each in logprobs],
                "token_logprobs": [each.value for each in logprobs],
                "top_logprobs": [None if each.value is None else _by_text(each.top) for each in logprobs],
                "text_offset": places,
            },
        }


def _by_text(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Of tokens with the same text, as halves of characters have it, the likeliest."""
    return dict(reversed(top))


def completion(request_id: str, model_ref: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's text_completion object, or a piece of one, without its usage."""
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model_ref,
        "choices": choices,
    }


def usage(endings: Sequence[Ending], *, n: int) -> dict[str, int]:
    """What answers are counted as, `n` of them to each prompt, which counts once.

    `completion_tokens` has the end-of-text token in it when there is one.
    """
    read, written = sum(one.prompt_tokens for one in endings[::n]), sum(one.completion_tokens for one in endings)
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


Part = tuple[int, Piece | Ending]
"""The number of an answer, and what comes of it."""


async def events(
    first: Part, rest: AsyncGenerator[Part, None], payload: Told, body: CompletionRequest
) -> AsyncGenerator[bytes, None]:
    """The events of all answers. `first` was waited for already, so that what cannot be answered gets a status of its own."""
    assert payload.taken is not None
    model_ref = payload.taken.model_ref
    include_usage = bool(body.stream_options and body.stream_options.include_usage)
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    count = len(body.prompt) * body.n
    choices = [Choice(index, wants_logprobs=body.logprobs is not None) for index in range(count)]
    endings: dict[int, Ending] = {}
    try:
        async for index, part in _all(first, rest):
            if isinstance(part, Ending):
                endings[index] = part
                choice = choices[index].part("", (), part.finish_reason)
            else:
                choice = choices[index].part(part.text, part.logprobs, None)
            yield _event({**completion(payload.request_id, model_ref, [choice]), **extra})
        if include_usage:
            counted = usage([endings[index] for index in range(count)], n=body.n)
            yield _event({**completion(payload.request_id, model_ref, []), "usage": counted})
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
    "there are POST /v1/completions, GET /v1/models, GET /v1/models/NAME, POST /score, POST /v1/feedback, GET /readyz, "
    "GET /livez, GET /metrics and GET / (docs/endpoint.md)"
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
    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        payload, asks = told_of(request), body.asks()
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
        choices = [
            Choice(index, wants_logprobs=body.logprobs is not None).part(
                one.text, one.logprobs, one.ending.finish_reason
            )
            for index, one in enumerate(given)
        ]
        answer = completion(payload.request_id, taken.model_ref, choices)
        counted = usage([one.ending for one in given], n=body.n)
        return JSONResponse({**answer, "usage": counted}, headers=told_headers(payload))

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
    return ".".join(str(part) for part in loc[1:]) or "body"
