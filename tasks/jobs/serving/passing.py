"""Requests that are handed on to vLLM as they are: chat, and completions that ask for more than every runtime of ours does.

A middleware before the routes of api.py, of a server whose model is vLLM's. What is plain goes on to these routes, so that it
is measured, and a lower rung may answer it. Keys, quotas and sizes are the edge's (api_middleware.py), which learns the tokens of
an answer as there. Only fields that are named below go on, each within its bounds: vLLM has others that read files or fetch
addresses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from fastapi import HTTPException, Response
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.jobs.serving.api import EventStream, told_headers, told_of, unless_gone
from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.forms import DEFAULT_TOKENS, MOST_LOGPROBS, MOST_PROMPTS
from tasks.jobs.serving.runtime import Ending, Gone
from tasks.jobs.serving.service import Service, Told, spent

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLING = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "n", "stream",
    "stream_options", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids", "prompt_logprobs", "response_format",
    "user",
)  # fmt: skip
FIELDS = {
    COMPLETIONS: (*SAMPLING, "prompt", "echo", "suffix", "add_special_tokens"),
    CHAT: (*SAMPLING, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
}
PLAIN = ("prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "model", "user")
"""What is asked of vLLM as of every runtime, so that it is measured and a lower rung may answer it."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""Other fields, and the values by which nothing is asked for; null is one of them."""


class PassedOn:
    """The middleware. State: the service whose vLLM answers."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in FIELDS:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        raw = await request.body()
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if scope["path"] == COMPLETIONS and not (isinstance(body, dict) and _asks_for_more(body)):
            await self._app(scope, _replayed(raw, receive), send)
            return
        payload = told_of(request)
        try:
            response = await unless_gone(request, self._answer(scope["path"], body, payload))
        except HTTPException as error:
            headers = {"X-Headway-Model": self._service.model_ref, **payload.headers(), **(error.headers or {})}
            response = JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, headers)
        await response(scope, receive, send)

    async def _answer(self, path: str, body: Any, payload: Told) -> Response:
        """vLLM's answer, whole or as it comes. Raises HTTPException."""
        wanted = _checked(path, body, most_tokens=self._service.limits.max_tokens)
        taken = self._service.take(wanted.get("model"), payload)
        if taken.rung != "full":
            raise self._service.away(
                "the full model is away, and the one that answers for it takes plain completions only"
            )
        streams, options = bool(wanted.get("stream")), wanted.get("stream_options")
        asked_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        wanted["model"] = taken.model_ref
        wanted |= {"stream_options": {"include_usage": True}} if streams else {}
        stack = AsyncExitStack()
        try:
            async with asyncio.timeout(self._service.limits.request_seconds):
                process = self._service.ladder.vllm()
                assert process is not None
                reply = await stack.enter_async_context(process.forward(path, wanted))
                if reply.status_code == 200 and streams:
                    held, stack = stack, AsyncExitStack()
                    return EventStream(self._events(reply, held, payload, usage=asked_usage), payload.headers())
                output = json.loads(await reply.aread())
        except Gone as error:
            raise self._service.gone(error) from error
        except TimeoutError as error:
            text = f"the answer was not ready within {self._service.limits.request_seconds:g} s: ask for fewer tokens"
            raise HTTPException(504, text) from error
        except ValueError as error:
            raise HTTPException(502, "vLLM answered what is no JSON") from error
        finally:
            await stack.aclose()
        if reply.status_code != 200:
            return JSONResponse(_error(output, reply.status_code), reply.status_code, headers=told_headers(payload))
        self._count(output.get("usage"), payload)
        return JSONResponse(output, headers=told_headers(payload))

    async def _events(
        self, reply: httpx.Response, held: AsyncExitStack, payload: Told, *, usage: bool
    ) -> AsyncGenerator[bytes, None]:
        """vLLM's events, and before their end a comment of the tokens for the edge. What breaks off ends without `[DONE]`."""
        try:
            async with asyncio.timeout(self._service.limits.request_seconds):
                async for line in reply.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    text = line.removeprefix("data: ")
                    if text == "[DONE]":
                        yield b": tokens %d\n\ndata: [DONE]\n\n" % (spent(payload.ending) if payload.ending else 0)
                        return
                    event = json.loads(text)
                    if event.get("usage") and not event.get("choices"):
                        self._count(event["usage"], payload)
                        if not usage:
                            continue
                    yield b"data: %s\n\n" % text.encode()
                    if "error" in event:
                        return
        except Gone as error:
            yield (
                b"data: %s\n\n"
                % json.dumps(error_body(503, f"the model went away while it answered: {error}")).encode()
            )
        except TimeoutError:
            yield (
                b"data: %s\n\n"
                % json.dumps(error_body(504, "the answer was not ready in time: ask for fewer tokens")).encode()
            )
        finally:
            await held.aclose()

    def _count(self, usage: Mapping[str, Any] | None, payload: Told) -> None:
        if usage:
            read, written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            self._service.count(Ending("", read, written), payload)


def _asks_for_more(body: Mapping[str, Any]) -> bool:
    """Whether a completion asks for what not every runtime does: then vLLM judges the whole of it."""
    more = any(
        value is not None and name not in PLAIN and value not in NEUTRAL.get(name, ()) for name, value in body.items()
    )
    prompt = body.get("prompt")
    return more or (isinstance(prompt, list) and [type(one) for one in prompt] != [str])


def _checked(path: str, body: Any, *, most_tokens: int) -> dict[str, Any]:
    """What goes on of a request. Raises HTTPException (400) for what does not, by name."""
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is no JSON object")
    wanted = {name: value for name, value in body.items() if value is not None}
    for name in wanted:
        if name not in FIELDS[path]:
            raise HTTPException(400, f"`{name}` is not passed on to vLLM: leave it out")
    if "model" in wanted and not isinstance(wanted["model"], str):
        raise HTTPException(400, "model: it must be a text")
    for name in ("max_tokens", "max_completion_tokens"):
        _require_at_most(wanted, name, most_tokens, "that one request may ask for")
    _require_at_most(wanted, "n", MOST_PROMPTS, "answers to one request")
    for name in ("logprobs", "prompt_logprobs", "top_logprobs"):
        if not isinstance(wanted.get(name), bool):
            _require_at_most(wanted, name, MOST_LOGPROBS, "that are given", least=0)
    prompts = wanted.get("prompt")
    if isinstance(prompts, list) and len(prompts) > MOST_PROMPTS and not all(isinstance(one, int) for one in prompts):
        raise HTTPException(400, f"prompt: {len(prompts)} prompts are more than the {MOST_PROMPTS} of one request")
    if not {"max_tokens", "max_completion_tokens"} & wanted.keys():
        wanted["max_tokens"] = min(DEFAULT_TOKENS, most_tokens)
    return wanted


def _require_at_most(wanted: Mapping[str, Any], name: str, most: int, what: str, *, least: int = 1) -> None:
    value = wanted.get(name, least)
    if not isinstance(value, int) or not least <= value <= most:
        raise HTTPException(400, f"{name}: {value!r} is no number from {least} to the {most} {what}")


def _error(output: Any, status: int) -> dict[str, Any]:
    """vLLM's error, in the form of all others."""
    error = output.get("error") if isinstance(output, dict) else None
    return error_body(
        status, str(error["message"]) if isinstance(error, dict) and "message" in error else str(output)[:200]
    )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Hands a body on that was read already, then whatever comes next."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying() -> Message:
        return first.pop() if first else await receive()

    return replaying
