"""What tests of runtimes share: whole answers, waiting in a loop, and a model's file spoilt."""

import asyncio
import os
import time
from contextlib import aclosing
from dataclasses import dataclass

from waiting import limit

from tasks.jobs.serving.runtime import Ask, Ending, Piece

REF = "model/tiny@" + "a" * 64
BEFORE = "model/tiny@" + "b" * 64


@dataclass(frozen=True)
class Whole:
    """An answer: its pieces, and its ending."""

    pieces: list[Piece]
    ending: Ending

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


async def whole(runtime, ask, *, after=0.0):
    await asyncio.sleep(after)
    async with aclosing(runtime.complete(ask)) as said:
        *pieces, ending = [each async for each in said]
    return Whole(pieces, ending)


async def until(said, *, seconds=60.0):
    deadline = time.monotonic() + limit(seconds)
    while not said():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


def asked(golden, **more):
    return Ask(golden.prompt, len(golden.tokens), **more)


def flip(path):
    """Change one byte in place and keep size and times, as somebody who knows would."""
    status = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(status.st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
