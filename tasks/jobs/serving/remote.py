"""A Runtime over another server that speaks OpenAI's completions: vLLM, or DeepSpeed-MII's where a user still has it.

Answers come by SSE (WHATWG HTML, "Server-sent events"). It loads nothing: whoever runs that server has chosen its model, and
verified it; what opens a prompt is in that model's tokenizer (tasks/formats/opening.py), which the server
reads itself. Which server answers is chosen in fallback_models.py and serve.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx

from tasks.jobs.serving.runtime import Ask, Ending, Gone, Piece, Unfit, require_text

LOOK_SECONDS = 2.0
CONNECT_SECONDS = 5.0
LENGTHS = ("max_model_len", "context_length")
"""Where a server's `/v1/models` says how long prompt and answer may be together: vLLM's name first."""
UNFIT = (400, 413, 422)
TOKEN_CHARACTERS = 4
"""About so many: by them the prompt's tokens are told where a server tells no usage."""


class RemoteRuntime:
    """A Runtime. State: whether the server answered when it was last looked at, and how many wait for a first piece."""

    def __init__(
        self, url: str, *, key: str | None = None, model: str | None = None, hang_seconds: float = 30.0
    ) -> None:
        """`url` without `/v1`; `model`: one that the server names, its first one without this."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(hang_seconds, connect=CONNECT_SECONDS)
        # A server on this machine, or one that was named: never by way of a proxy of the environment.
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        self._url, self._model = url, model
        self._context_length = self._waiting = 0
        self._up = False
        self._looking: asyncio.Task[None] | None = None

    async def start(self, folder: Path, *, threads: int) -> None:
        """Ask the server for its model; `folder` and `threads` are what it was started with, and not used here."""
        await self._look()
        self._looking = asyncio.create_task(self._keep_looking())

    async def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """As Runtime says; no tokens and no entropy, which the API does not tell."""
        require_text(ask.prompt)
        self._waiting += 1
        waits, answer = True, _Answer(ask)
        try:
            async with aclosing(self._events(ask)) as events:
                async for event in events:
                    if piece := answer.piece(event):
                        self._waiting -= waits
                        waits = False
                        yield piece
            yield answer.ending()
        except httpx.HTTPError as error:
            self._up = not isinstance(error, httpx.TransportError)
            never = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            raise Gone(f"{self._url} does not answer: {type(error).__name__} {error}", taken=not never) from error
        finally:
            self._waiting -= waits

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def up(self) -> bool:
        return self._up

    @property
    def waiting(self) -> int:
        return self._waiting

    async def close(self) -> None:
        """As Runtime says."""
        if self._looking:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        self._up = False
        await self._client.aclose()

    async def _events(self, ask: Ask) -> AsyncGenerator[dict[str, Any], None]:
        async with self._client.stream("POST", "/v1/completions", json=_body(ask, self._model)) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(self._url, response)
            async for event in _data(response.aiter_lines()):
                yield event

    async def _look(self) -> None:
        """Which model it has. Raises Gone."""
        try:
            payload = (await self._client.get("/v1/models")).raise_for_status().json()["data"]
            result = next(model for model in payload if self._model in (None, model["id"]))
        except (httpx.HTTPError, ValueError, KeyError, StopIteration) as error:
            self._up = False
            raise Gone(f"{self._url} names no model {self._model or ''}: {type(error).__name__} {error}") from error
        self._model = result["id"]
        self._context_length = next((int(result[name]) for name in LENGTHS if result.get(name)), self._context_length)
        self._up = True

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(Gone):
                await self._look()


class _Answer:
    """What was said of one request. A stop text that spans two events is cut by the server."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self._events = ask, 0
        self._reason: str | None = None
        self._usage: Mapping[str, Any] = {}

    def piece(self, event: dict[str, Any]) -> Piece | None:
        if "error" in event:
            raise Gone(str(event["error"]), taken=True)
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            self._reason = choice.get("finish_reason") or self._reason
            if choice.get("text"):
                self._events += 1
                return Piece(choice["text"], 1)
        return None

    def ending(self) -> Ending:
        if self._reason is None:
            raise Gone("the answer ended without a reason: its server went away", taken=True)
        prompt = int(self._usage.get("prompt_tokens", 0)) or -(-len(self._ask.prompt) // TOKEN_CHARACTERS)
        return Ending(self._reason, prompt, int(self._usage.get("completion_tokens", 0)) or self._events)


def _body(ask: Ask, model: str | None) -> dict[str, Any]:
    optional = {"seed": ask.seed, "stop": list(ask.stop) or None}
    return {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in optional.items() if value is not None},
    }


async def _data(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event until `[DONE]`."""
    async for line in lines:
        field, _, value = line.partition(":")
        if field == "data" and value.strip() == "[DONE]":
            return
        if field == "data":
            yield json.loads(value)


def _refusal(url: str, response: httpx.Response) -> Exception:
    try:
        payload = response.json()
        text = str((payload.get("error") or payload).get("message", payload))
    except (ValueError, AttributeError):
        text = response.text[:200]
    if response.status_code in UNFIT:
        return Unfit(text)
    return Gone(f"{url} answered {response.status_code}: {text}")
