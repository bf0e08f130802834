"""One request to one server on loopback, over a connection that is kept where the server keeps it. Which server: table.py.

What HTTP/1.1 looks like on it is wire.py. An answer is handed on as it comes: nothing waits for its end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable

from tasks.jobs.routing.wire import HOP_BY_HOP, Asked, Connection, Head, Headers
from tasks.serving.protocol.routes import SECRET

HOST = "127.0.0.1"
CONNECT_SECONDS = 2.0
KEPT = 16
"""Idle connections that are kept for one server."""
ERRORS = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""What a connection raises that ends, or on which something else than HTTP comes."""


class Unreachable(Exception):
    """Nothing of an answer came: another server may be asked. `late`: the server took the request, and was too slow."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Broken(Exception):
    """The answer ended before its end."""


class Answer:
    """The answer of a server: its head, and its body as it comes. `close` it, read to the end or not."""

    def __init__(self, upstream: Upstream, connection: Connection, head: Head) -> None:
        self._upstream, self._connection, self._head = upstream, connection, head
        self.status = head.status
        self.headers: Headers = [(name, value) for name, value in head.headers if name not in HOP_BY_HOP]
        self.length = head.header(b"content-length") or None

    def header(self, name: bytes) -> bytes:
        return self._head.header(name)

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive. Raises Broken."""
        try:
            async for piece in self._connection.body(self._head):
                yield piece
        except ERRORS as error:
            raise Broken(str(error)) from error

    def close(self) -> None:
        """Keep the connection when the answer was read to its end; else it goes, and the server learns that nobody waits."""
        self._upstream.give_back(self._connection)


class Upstream:
    """One server. State: the idle connections to it."""

    def __init__(self, port: int, secret: str = "") -> None:
        """`secret`: what it is shown with each request; empty: nothing."""
        self.port = port
        self._own = {b"host": f"{HOST}:{port}".encode(), **({SECRET.encode(): secret.encode()} if secret else {})}
        self._idle: list[Connection] = []

    async def ask(self, asked: Asked, *, timeout: float) -> Answer:
        """Send a request; returns with the head of the answer. Raises Unreachable, also after `timeout` seconds without one.

        Whatever name the endpoint was called by, its server is asked by its own: it answers to no other (serving/program.py).
        """
        try:
            async with asyncio.timeout(timeout):
                connection, head = await self._first_head(asked)
        except TimeoutError as error:
            raise Unreachable(f"no answer from port {self.port} within {timeout:g} s", late=True) from error
        except ERRORS as error:
            raise Unreachable(f"port {self.port}: {error}") from error
        return Answer(self, connection, head)

    def give_back(self, connection: Connection) -> None:
        if connection.reusable and len(self._idle) < KEPT:
            connection.used = True
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _first_head(self, asked: Asked) -> tuple[Connection, Head]:
        """An idle connection may have been closed by the server meanwhile: then a new one is tried."""
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                return connection, await connection.head(asked, own=self._own)
            except ERRORS:
                connection.close()
                if not connection.used:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _connect(self) -> Connection:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(reader, writer)


async def fetch(
    upstream: Upstream, target: bytes, *, timeout: float, headers: Iterable[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """Status and whole body of a small GET. Raises Unreachable."""
    answer = await upstream.ask(Asked(b"GET", target, list(headers), b""), timeout=timeout)
    try:
        async with asyncio.timeout(timeout):
            return answer.status, b"".join([piece async for piece in answer.body()])
    except TimeoutError as error:
        raise Unreachable("the body did not come", late=True) from error
    except Broken as error:
        raise Unreachable(str(error)) from error
    finally:
        answer.close()
