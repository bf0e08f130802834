"""What stands before the model: who asks, how much, how large, how long. A refusal never touches the model.

One pure ASGI middleware. The server mounts it where it stands alone (in a container, or on its public port), the gateway where it
stands before several. What is behind it finds in the request's headers `X-Request-Id`, always made here, and `X-Headway-Caller`,
where callers have to say who they are; their keys and tokens are taken out. It tells the edge how many tokens an answer had: in
the header `X-Headway-Tokens`, or in a comment of a stream, `: tokens N`. Who a caller is lives in keys.py.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tasks.config.access import LOOPBACK, AccessConfig
from tasks.config.serving import LimitsConfig
from tasks.jobs.serving.keys import Door, Nobody
from tasks.jobs.serving.metrics import Metrics
from tasks.serving.protocol.routes import SECRET, TRAFFIC, USER

if TYPE_CHECKING:
    pass

# Tokens of Microsoft Entra that callers show, checked beside the server's loop. What makes one right is
# tasks/azure/entra.py.


# Reading a request's body with bounds: how large, how long it may take, how deep its JSON goes. Not what it says.


MOST_MARKS = 10_000
"""Brackets of a body: a request that is meant has a few, and each is looked at here."""
_MARKS = re.compile(rb'[\[\]{}]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A bracket, or a whole string, whose brackets are text. Nothing is tried twice, so it takes as long as the body is."""
_OPENING = (b"[", b"{")
_CLOSING = (b"]", b"}")


class Unread(Exception):
    """A body that is not taken."""

    def __init__(self, status: int, why: str, message: str) -> None:
        super().__init__(message)
        self.status, self.why = status, why


def require_json(headers: Mapping[bytes, bytes]) -> None:
    """Raise Unread (415) for a body that does not say that it is JSON."""
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":  # what any page on the web may send without asking first is another type
        raise Unread(415, "type", "the body must be JSON, with `Content-Type: application/json`")


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, *, most: int, seconds: float) -> bytes:
    """The body of a request. Raises Unread: 400, 408, 413; of what is too large, no more is read."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > most:
        raise Unread(413, "size", f"the body has {int(announced)} bytes; at most {most} are taken")
    try:
        async with asyncio.timeout(seconds):
            return await _read(receive, most)
    except TimeoutError:
        raise Unread(408, "slow", f"the body did not arrive within {seconds:g} s") from None


async def _read(receive: Receive, most: int) -> bytes:
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise Unread(400, "gone", "the client went away before its body had arrived")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > most:
            raise Unread(413, "size", f"the body has more than {most} bytes")
    return b"".join(parts)


def require_flat(body: bytes, *, depth: int) -> None:
    """Raise Unread (400) for JSON that is nested more deeply: found before anything is parsed, whose stack could overflow."""
    level = 0
    for count, mark in enumerate(_MARKS.finditer(body)):
        result = mark[0]
        level += (result in _OPENING) - (result in _CLOSING)
        if level > depth or count > MOST_MARKS:
            raise Unread(400, "depth", f"the body is nested more than {depth} deep, or has too many brackets")


# How much one caller may ask for in a minute: requests, and tokens that are charged once they are known.
#
# A request is counted before it is answered, its tokens after. So one answer may go beyond the tokens of a minute; what
# is beyond is a debt, and its caller waits until later minutes have paid it. Counting is the `limits` library's, by a
# sliding window in memory: a server that is started again forgets it.


LONGEST_SECONDS = 60


class Quotas:
    """The counts of all callers. State: their last two minutes, and their debts."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._counts = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerMinute(limits.requests_per_minute, namespace="requests")
        self._tokens = RateLimitItemPerMinute(limits.tokens_per_minute, namespace="tokens")
        self._debts: dict[str, int] = {}

    async def admit(self, caller: str) -> tuple[int, str]:
        """Count a request. Whole seconds that the caller must wait first, and of what there is too much; (0, "") lets it in."""
        if self._debts.get(caller):
            await self._pay(caller)
        if self._debts.get(caller) or not await self._counts.test(self._tokens, caller):
            return await self._wait(self._tokens, caller), "tokens"
        if not await self._counts.hit(self._requests, caller):
            return await self._wait(self._requests, caller), "requests"
        return 0, ""

    async def charge(self, caller: str, tokens: int) -> None:
        """Count the tokens of an answer, whether there is room for them or not."""
        if tokens > 0:
            self._debts[caller] = self._debts.get(caller, 0) + tokens
            await self._pay(caller)

    async def _pay(self, caller: str) -> None:
        """Move as much of a debt into this minute as there is room for."""
        room = (await self._counts.get_window_stats(self._tokens, caller)).remaining
        part = min(self._debts.get(caller, 0), room)
        if part and await self._counts.hit(self._tokens, caller, cost=part):
            self._debts[caller] -= part
        if not self._debts.get(caller):
            self._debts.pop(caller, None)

    async def _wait(self, item: RateLimitItemPerMinute, caller: str) -> int:
        reset = (await self._counts.get_window_stats(item, caller)).reset_time
        return max(1, min(LONGEST_SECONDS, math.ceil(reset - time.time())))


OPEN = ("/livez", "/readyz", "/")
"""Asked by probes, and by whoever wants to try the model by hand: the page asks for a key itself."""
PRIVATE = (b"authorization", b"api-key", b"x-request-id", b"x-headway-caller", TRAFFIC.encode(), SECRET.encode())
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
SPENT = re.compile(rb"^: tokens (\d+)$", re.MULTILINE)
TAIL_BYTES = 400
STREAM_GRACE_SECONDS = 5.0
"""Beyond `request_seconds`: an answer that has begun ends itself, with a word on why; what does not is cut off."""


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, why: str, message: str, *, retry_after: int = 0, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.why, self.retry_after, self.close = status, why, retry_after, close


@dataclass
class _Answer:
    """How far one answer is."""

    begun: bool = False
    waiting: bool = False
    stream: bool = False
    events: int = 0
    tail: bytes = b""
    tokens: int = 0

    def spent(self) -> int:
        """Its tokens; of a stream that was cut off, one for each event."""
        results = SPENT.findall(self.tail)
        return int(results[-1]) if results else self.tokens or self.events


class Edge:
    """The middleware. State: how many requests wait and are under way, what callers have used, and whether it stops."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: LimitsConfig,
        access: AccessConfig | None = None,
        keys_file: Path | None = None,
        metrics: Metrics | None = None,
        model: Callable[[], str] = str,
    ) -> None:
        """`keys_file`: keys.json of the endpoint. `model`: the reference that answers of the edge's own name."""
        self._app, self._limits = app, limits
        self._access = access or AccessConfig()
        self._door = Door(self._access, keys_file)
        self._quotas = Quotas(limits)
        self._metrics, self._model = metrics, model
        self._local = self._access.host in LOOPBACK
        self.draining = False
        """Set when the server is to stop: what comes from now on is answered 503."""
        self.waiting = 0
        """Requests whose answer has not begun."""
        self.under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request_id = f"cmpl-{uuid.uuid4().hex}"
        answer = _Answer()
        self.under_way += 1
        try:
            await self._handle(scope, receive, self._marked(send, answer, request_id), answer, request_id)
        except Refused as refused:
            if self._metrics:
                self._metrics.refused.labels(refused.why, str(refused.status)).inc()
            if not answer.begun:
                headers = {"X-Request-Id": request_id, "X-Headway-Model": self._model()}
                headers |= {"Retry-After": str(refused.retry_after)} if refused.retry_after else {}
                headers |= {"Connection": "close"} if refused.close else {}
                headers |= {"WWW-Authenticate": "Bearer"} if refused.status == 401 else {}
                await send_json(send, refused.status, error_body(refused.status, str(refused)), headers=headers)
        finally:
            self.under_way -= 1
            self._leave(answer)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, answer: _Answer, request_id: str) -> None:
        headers = dict(scope["headers"])
        self._require_host(headers)
        if scope["method"] != "POST":  # before anything waits for it: whoever asks so has no body to send
            receive = _replayed(await self._read(headers, receive, most=0), receive)
        if scope["path"] == "/livez" and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        if self.draining:
            raise Refused(503, "drain", "the server is stopping", retry_after=1, close=True)
        kept = [(name, value) for name, value in scope["headers"] if name not in PRIVATE]
        inner = {**scope, "headers": [*kept, (b"x-request-id", request_id.encode()), (TRAFFIC.encode(), USER.encode())]}
        if scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            await self._app(inner, receive, send)
            return
        try:
            caller = await self._door.caller(headers)
        except Nobody as error:
            raise Refused(error.status, "caller", str(error), retry_after=error.retry_after) from error
        inner["headers"] += [(b"x-headway-caller", caller.encode())] if caller else []
        who = caller or f"ip:{(scope['client'] or ('', 0))[0]}"
        if scope["method"] != "POST":
            await self._app(inner, receive, send)
            return
        self._require_room()
        seconds, what = await self._quotas.admit(who)
        if seconds:
            text = f"too many {what} in a minute: try again in {seconds} s"
            raise Refused(429, what, text, retry_after=seconds)
        # The body of a request with JSON in it.
        with _refusing():
            require_json(headers)
            body = await self._read(headers, receive, most=self._limits.body_bytes)
            require_flat(body, depth=self._limits.depth)
        self._require_room()
        self.waiting, answer.waiting = self.waiting + 1, True
        try:
            await self._ask(inner, _replayed(body, receive), send, answer)
        finally:
            await self._quotas.charge(who, answer.spent())

    async def _ask(self, scope: Scope, receive: Receive, send: Send, answer: _Answer) -> None:
        """Hand a request on, for so long and no longer."""
        try:
            async with asyncio.timeout(self._limits.request_seconds) as limit:

                async def sending(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        limit.reschedule((limit.when() or 0) + STREAM_GRACE_SECONDS)
                    await send(message)

                await self._app(scope, receive, sending)
        except TimeoutError:
            text = f"the request was given up after {self._limits.request_seconds:g} s"
            raise Refused(504, "timeout", text, retry_after=1, close=True) from None

    def _require_host(self, headers: Mapping[bytes, bytes]) -> None:
        """A page on the web could have its own name resolve to loopback; its requests carry that name."""
        if not self._local:
            return
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name not in LOOPBACK:
            raise Refused(400, "host", "this server answers to 127.0.0.1 and localhost only")

    def _require_room(self) -> None:
        if self.waiting >= self._limits.waiting:
            text = f"{self.waiting} requests wait already: try again in a second"
            raise Refused(429, "waiting", text, retry_after=1)

    async def _read(self, headers: Mapping[bytes, bytes], receive: Receive, *, most: int) -> bytes:
        with _refusing():
            return await read_body(headers, receive, most=most, seconds=self._limits.read_seconds)

    def _marked(self, send: Send, answer: _Answer, request_id: str) -> Send:
        """Notes how far an answer is, and that it has an id."""

        async def marking(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._leave(answer)
                answer.begun = True
                # The answer's own headers, less what is for the edge, with an id if they have none.
                kept = [(name.lower(), value) for name, value in message.get("headers", [])]
                output = dict(kept)
                answer.stream = output.get(b"content-type", b"").startswith(b"text/event-stream")
                answer.tokens = int(output.get(b"x-headway-tokens", b"0"))
                if b"x-request-id" not in output:
                    kept.append((b"x-request-id", request_id.encode()))
                if b"x-headway-model" not in output and self._model():
                    kept.append((b"x-headway-model", self._model().encode("latin-1")))
                message = {**message, "headers": [one for one in kept if one[0] != b"x-headway-tokens"]}
            elif message["type"] == "http.response.body" and answer.stream:
                part = message.get("body", b"")
                answer.events += part.count(b"data:")
                answer.tail = (answer.tail + part)[-TAIL_BYTES:]
            await send(message)

        return marking

    def _leave(self, answer: _Answer) -> None:
        self.waiting -= answer.waiting
        answer.waiting = False


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "unavailable")
    return {"error": {"message": message, "type": kind, "code": status}}


async def send_json(send: Send, status: int, output: Any, *, headers: Mapping[str, str]) -> None:
    """Answer with a JSON object."""
    body = json.dumps(output).encode()
    payload = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in payload.items() if value]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Unread as error:
        raise Refused(error.status, error.why, str(error), close=True) from error


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Hands a body on that was read already, then whatever comes next: the client's going away."""
    replayed = False

    async def replaying() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying
