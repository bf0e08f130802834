"""One request to one server on loopback, over a connection that is kept where the server keeps it. Which server: table.py.

h11 speaks HTTP/1.1, for the gateway's own front as well (tasks/common/http_server.py): whatever came in can go out. An answer is
handed on as it comes: nothing waits for its end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import h11

from tasks.serving.protocol.routes import SECRET

HOST = "127.0.0.1"
CONNECT_SECONDS = 2.0
KEPT = 16
"""Idle connections that are kept for one server."""
CHUNK = 65536
"""Bytes that are read at once, and that the head of an answer may have."""
ERRORS = (OSError, EOFError, h11.RemoteProtocolError)
"""What a connection raises that ends, or on which something else than HTTP comes."""
Headers = list[tuple[bytes, bytes]]
HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
))  # fmt: skip
"""Headers of one connection and not of the message (RFC 9110, 7.6.1), and the length, which each side counts for itself."""


class Unreachable(Exception):
    """Nothing of an answer came: another server may be asked. `late`: the server took the request, and was too slow."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Broken(Exception):
    """The answer ended before its end."""


@dataclass(frozen=True)
class Asked:
    """A request, whole: it may be sent again. Names of headers are in lower case."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes

    def with_header(self, name: bytes, value: bytes) -> Asked:
        """The same request with one more header, or another value of it."""
        kept = [(key, text) for key, text in self.headers if key != name]
        return Asked(self.method, self.target, [*kept, (name, value)], self.body)


class Connection:
    """One connection to a server. State: the stream, and how far the exchange is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = False
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=CHUNK)

    async def head(self, asked: Asked, *, own: Mapping[bytes, bytes]) -> h11.Response:
        """Send a request and wait for the head of its answer. `own` headers replace those of the same name. Raises ERRORS."""
        headers = [one for one in asked.headers if one[0] not in HOP_BY_HOP and one[0] not in own]
        headers += [*own.items(), (b"content-length", b"%d" % len(asked.body))]
        request = h11.Request(method=asked.method, target=asked.target, headers=headers)
        events = (request, h11.Data(data=asked.body), h11.EndOfMessage())
        self.writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self.writer.drain()
        while not isinstance(event := await self._event(), h11.Response):
            if isinstance(event, h11.ConnectionClosed):
                raise EOFError("the server closed the connection")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive, to the end. Raises ERRORS, also when the connection ends before."""
        while isinstance(event := await self._event(), h11.Data):
            yield bytes(event.data)

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self.reader.read(CHUNK))
        return event

    def renew(self) -> bool:
        """Be ready for the next request; whether the server keeps the connection and the answer was read to its end."""
        if self._http.trailing_data != (
            b"",
            False,
        ):  # else the next answer would begin with them
            return False
        with suppress(h11.ProtocolError):
            self._http.start_next_cycle()
            self.used = True
            return True
        return False

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.writer.close()


class Answer:
    """The answer of a server: its head, and its body as it comes. `close` it, read to the end or not."""

    def __init__(self, upstream: Upstream, connection: Connection, head: h11.Response) -> None:
        self._upstream, self._connection = upstream, connection
        self._headers = dict(reversed(list(head.headers)))
        self.status = head.status_code
        self.headers: Headers = [(name, value) for name, value in head.headers if name not in HOP_BY_HOP]
        self.length = self.header(b"content-length") or None

    def header(self, name: bytes) -> bytes:
        return self._headers.get(name, b"")

    async def body(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive. Raises Broken."""
        try:
            async for piece in self._connection.body():
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
        if len(self._idle) < KEPT and connection.renew():
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _first_head(self, asked: Asked) -> tuple[Connection, h11.Response]:
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
