"""Reading a request's body with bounds: how large, how long it may take, how deep its JSON goes. Not what it says."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from starlette.types import Receive

MOST_MARKS = 10_000
"""Brackets of a body: a request that is meant has a few, and each is looked at here."""
_MARKS = re.compile(rb'[\[\]{}]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A bracket, or a whole string, whose brackets are text. Nothing is tried twice, so it takes as long as the body is."""
_OPENING = (b"[", b"{")
_CLOSING = (b"]", b"}")


class Unread(Exception):
    """A body that is not taken."""

    def __init__(self, status: int, why: str, said: str) -> None:
        super().__init__(said)
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
        found = mark[0]
        level += (found in _OPENING) - (found in _CLOSING)
        if level > depth or count > MOST_MARKS:
            raise Unread(400, "depth", f"the body is nested more than {depth} deep, or has too many brackets")
