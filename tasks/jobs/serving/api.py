"""The routes of a server: OpenAI's completions and models, Azure ML's score, probes, figures, and the page to try it.

What stands before them is api_middleware.py; how a request is answered, service.py; the forms of bodies, forms.py. No page of
FastAPI's own: they load scripts from elsewhere.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.feedback import router
from tasks.jobs.serving.forms import CompletionRequest, ScoreRequest, completion, score
from tasks.jobs.serving.metrics import CONTENT_TYPE
from tasks.jobs.serving.runtime import Ask
from tasks.jobs.serving.service import Said, Service, Told, spent
from tasks.jobs.serving.streams import EventStream, events
from tasks.jobs.serving.try_page import HEADERS, PAGE
from tasks.serving.protocol.routes import TRAFFIC, USER, WANTED

REQUEST_ID = re.compile(r"cmpl-[0-9a-f]{32}")
GONE = 499
"""Status of an answer that nobody waits for any more; no client sees it."""
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
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    @api.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)


def _add_completions(api: FastAPI, service: Service) -> None:
    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        told = _told(request)
        _require_tokens(service, body.max_tokens)
        taken = service.take(body.model, told)
        if body.stream:
            options = body.stream_options
            return await _stream(service, body.ask(), told, include_usage=bool(options and options.include_usage))
        said = await _unless_gone(request, service.answer(body.ask(), taken, told))
        answer = completion(told.request_id, taken.model_ref, said.text, said.ending, kind="whole")
        return JSONResponse(answer, headers=_headers(told))

    @api.post("/score")
    async def scored(body: ScoreRequest, request: Request) -> Response:
        told, asks = _told(request), body.asks()
        _require_tokens(service, asks[0].max_tokens)
        said = await _unless_gone(request, _together(service, asks, told))
        texts = [one.text for one in said]
        full = body.input_data.parameters.return_full_text
        return JSONResponse(score(asks, texts, full=full), headers=_headers(told))


def _add_errors(api: FastAPI, service: Service) -> None:
    def error(request: Request, status: int, message: str, headers: dict[str, str]) -> JSONResponse:
        told = {"X-Headway-Model": service.model_ref, **_told(request).headers()}
        return JSONResponse(error_body(status, message), status, {**told, **headers})

    @api.exception_handler(StarletteHTTPException)
    async def refused(request: Request, raised: StarletteHTTPException) -> JSONResponse:
        return error(request, raised.status_code, str(raised.detail), dict(raised.headers or {}))

    @api.exception_handler(RequestValidationError)
    async def invalid(request: Request, raised: RequestValidationError) -> JSONResponse:
        said = (f"{_place(one['loc'])}: {one['msg'].removeprefix('Value error, ')}" for one in raised.errors()[:5])
        return error(request, 400, "; ".join(said), {})

    @api.exception_handler(Exception)
    async def broken(request: Request, raised: Exception) -> JSONResponse:
        return error(request, 500, "the server has a fault; its log says more", {})


async def _stream(service: Service, ask: Ask, told: Told, *, include_usage: bool) -> Response:
    """The first piece is waited for: what cannot be answered has a status of its own."""
    assert told.taken is not None
    rest = service.pieces(ask, told.taken, told)
    try:
        first = await anext(rest)
    except BaseException:
        await rest.aclose()
        raise
    return EventStream(events(first, rest, told, include_usage=include_usage), told.headers())


async def _together(service: Service, asks: list[Ask], told: Told) -> list[Said]:
    """Answers to several prompts at once; the first that fails ends the others."""
    work = [asyncio.create_task(service.answer(ask, service.take(None, told), told)) for ask in asks]
    try:
        return await asyncio.gather(*work)
    finally:
        for one in work:
            one.cancel()


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


def _told(request: Request) -> Told:
    """What is known of a request; the first who asks begins it."""
    told = getattr(request.state, "told", None)
    if told is None:
        given = request.headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"cmpl-{uuid.uuid4().hex}"
        kept = request.headers.get(TRAFFIC) == USER
        told = request.state.told = Told(request_id, caller=_caller(request), kept=kept)
    return told


def _caller(request: Request) -> str:
    """Who asks, as the edge found out; behind it nobody else can say so."""
    return request.headers.get("x-headway-caller", "")


def _headers(told: Told) -> dict[str, str]:
    return {**told.headers(), "X-Headway-Tokens": str(spent(told.ending) if told.ending else 0)}


def _require_tokens(service: Service, wanted: int) -> None:
    most = service.limits.max_tokens
    if wanted > most:
        raise HTTPException(400, f"max_tokens: {wanted} is more than the {most} that one request may ask for")


def _place(loc: tuple[Any, ...]) -> str:
    """Where in a body something is wrong."""
    return ".".join(str(part) for part in loc[1:]) or "body"
