"""HTTP/1.1 on one connection from the gateway to a server of ours, and no more of it than these servers speak.

Not h11, which checks every byte again: requests come from uvicorn, which has checked them, and answers from our own servers. That
is a third of the gateway's time. Which connection, and what is done when it fails, is upstream.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

CHUNK = 65536
Headers = list[tuple[bytes, bytes]]
HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length",
))  # fmt: skip
"""Headers of one connection and not of the message (RFC 9110, 7.6.1), and the length, which each side counts for itself."""
BODILESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


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

    def render(self, own: Mapping[bytes, bytes]) -> bytes:
        """As it is sent; `own` headers stand in for those of the same name."""
        lines = [b"%b %b HTTP/1.1" % (self.method, self.target)]
        lines += [b"%b: %b" % one for one in self.headers if one[0] not in HOP_BY_HOP and one[0] not in own]
        lines += [b"%b: %b" % one for one in own.items()]
        lines.append(b"content-length: %d\r\n\r\n" % len(self.body))
        return b"\r\n".join(lines) + self.body


@dataclass(frozen=True)
class Head:
    """Of an answer. Names of headers are in lower case."""

    status: int
    headers: Headers
    bodiless: bool
    keeps: bool
    """Whether the server keeps the connection, as far as the first line says."""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class Connection:
    """One connection to a server. State: the stream, and whether the last answer was read to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = self.reusable = False

    async def head(self, asked: Asked, *, own: Mapping[bytes, bytes]) -> Head:
        """Send a request and wait for the head of its answer. Raises what the stream raises, and ValueError for no HTTP."""
        self.reusable = False
        self.writer.write(asked.render(own))
        await self.writer.drain()
        while True:
            head = _parsed(await self.reader.readuntil(b"\r\n\r\n"), bodiless=asked.method == b"HEAD")
            if head.status >= HTTPStatus.OK:
                return head

    async def body(self, head: Head) -> AsyncIterator[bytes]:
        """Pieces as they arrive, to the end. Raises as `head` does, and EOFError when the connection ends before."""
        length, until_it_closes = head.header(b"content-length"), False
        if head.bodiless:
            pass
        elif head.header(b"transfer-encoding").lower() == b"chunked":
            while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                async for piece in self._pieces(size):
                    yield piece
                await self.reader.readexactly(2)
            while await self.reader.readuntil(b"\r\n") != b"\r\n":  # trailers are of no interest
                pass
        elif length:
            async for piece in self._pieces(int(length)):
                yield piece
        else:
            until_it_closes = True
            while piece := await self.reader.read(CHUNK):
                yield piece
        self.reusable = head.keeps and not until_it_closes and head.header(b"connection").lower() != b"close"

    async def _pieces(self, left: int) -> AsyncIterator[bytes]:
        while left > 0:
            piece = await self.reader.read(min(left, CHUNK))
            if not piece:
                raise EOFError("the server closed the connection")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.writer.close()


def _parsed(text: bytes, *, bodiless: bool) -> Head:
    first, *lines = text[:-4].split(b"\r\n")
    protocol, _, rest = first.partition(b" ")
    status = rest[:3]
    if protocol not in (b"HTTP/1.1", b"HTTP/1.0") or not status.isdigit():
        raise ValueError(f"the server does not speak HTTP: {first[:40]!r}")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise ValueError(f"the server sent a header without a colon: {line[:40]!r}")
        headers.append((name.strip().lower(), value.strip()))
    bodiless = bodiless or int(status) in BODILESS
    return Head(int(status), headers, bodiless, keeps=protocol == b"HTTP/1.1")
