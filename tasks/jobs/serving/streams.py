"""An answer as server-sent events, as OpenAI streams one: https://html.spec.whatwg.org/multipage/server-sent-events.html.

Every piece is an event; `[DONE]` ends them. What goes wrong once the answer has begun is an event with an `error`, and no
`[DONE]`: a client can tell a cut answer from a whole one. A comment, which clients skip, tells the edge how many tokens there
were.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tasks.jobs.serving.api_middleware import error_body
from tasks.jobs.serving.forms import completion, usage
from tasks.jobs.serving.runtime import Ending, Piece
from tasks.jobs.serving.service import Told, spent


class EventStream(StreamingResponse):
    """Closes what it streams when the client goes away: the model stops, and its place is free."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        told = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, headers=told, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def events(
    first: Piece | Ending, rest: AsyncGenerator[Piece | Ending, None], told: Told, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of one answer. `first` was waited for already, so that what cannot be answered gets a status of its own."""
    assert told.taken is not None
    model_ref = told.taken.model_ref
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    try:
        async for part in _all(first, rest):
            text, ending = (part.text, None) if isinstance(part, Piece) else ("", part)
            yield _event({**completion(told.request_id, model_ref, text, ending, kind="piece"), **extra})
            if ending is not None:
                if include_usage:
                    empty = completion(told.request_id, model_ref, "", None, kind="piece")
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


def _event(said: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
