"""How our servers listen: no client can make one wait for ever, or open more connections than it can hold.

Shared by the bridge of events (deployments/bridge/webhook.py) and by the endpoints (tasks/jobs/serve.py). What a body may be is
for whoever reads it; here is how long a request may take to arrive, whether anybody reads it or not.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""What a client is told whose request has begun and does not get to its end."""
BODY_GRACE_SECONDS = 1.0
"""Beyond a body's time, for whoever reads it: an answer in its own words is better than LATE."""

MOST_HELD = 65536
"""Bytes that wait for the end of a turn of the loop; beyond, the transport says itself when it cannot take more."""


def impatient(*, read_seconds: float, connections: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which waits no longer than that for the head of a request and again for its body, whatever becomes of
    the request, with a bound on open connections.

    Beyond `connections` uvicorn answers 503 (its `limit_concurrency`); beyond twice as many, a connection is closed at once.
    """

    class Impatient(_Impatient):
        seconds, most = read_seconds, connections

    return Impatient


def listen(host: str, port: int, *, backlog: int = 1024, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: others may listen on the same port. Raises OSError when that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # asyncio sets it only where a socket names its protocol; without it, an answer waits 40 ms for the client.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


class _Together:
    """A transport that sends at once what is written in one turn of the loop: the head of an answer goes with its body.

    Else whoever asked is woken by the head alone, for nothing, and takes the processor from whoever answers. All but writing and
    closing is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > MOST_HELD:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if held := b"".join(self._held):
            self._transport.write(held)
        self._held.clear()
        self._size = 0


class _Impatient(H11Protocol):  # type: ignore[misc]
    """Closes a connection whose request does not arrive in time: uvicorn waits for ever for the end of a head or of a body.

    Who answers without having read the body, a refusal among them, is not asked: a client that goes on sending it, byte by byte,
    would hold the connection.
    """

    seconds = 10.0
    most = 128

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self.awaited: object = None
        super().connection_made(_Together(transport, self.loop))
        if len(self.connections) > 2 * self.most:
            transport.abort()
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()

    def _watch(self) -> None:
        """One timer for what is awaited now: the head of a request, or the body of this one."""
        awaited = self.conn.their_state, self.cycle
        if awaited == self.awaited:
            return
        self.awaited = awaited
        if self.timer:
            self.timer.cancel()
            self.timer = None
        if awaited[0] is h11.IDLE:
            self.timer = self.loop.call_later(self.seconds, self._give_up)
        elif awaited[0] is h11.SEND_BODY:
            self.timer = self.loop.call_later(self.seconds + BODY_GRACE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(LATE)
        self.transport.close()
