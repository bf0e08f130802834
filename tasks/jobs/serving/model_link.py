"""The server's end of a model's process (model_child.py): start it, ask it, notice at once when it dies or hangs.

One object is one process. Starting another one, and proving it, are model_process.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.jobs.serving.runtime import Ask, Ending, Gone, Piece, Unfit

PROGRAM = "tasks.jobs.serving.model_child"
LINE_BYTES = 64 << 20
END_SECONDS = 1.0
"""Time in which a process whose socket is closed must have ended."""
LOOKS = 8
"""How often in `hang_seconds` it is looked whether the process hangs."""


class Link:
    """A running process. State: the requests that it has, each with a box of what was said, and when it last said something."""

    def __init__(self, process: asyncio.subprocess.Process, streams: tuple[Any, Any], *, hang_seconds: float) -> None:
        self._process, (self._reader, self._writer) = process, streams
        self._hang_seconds = hang_seconds
        self._numbers = itertools.count(1)
        self._boxes: dict[int, asyncio.Queue[Piece | Ending | Exception]] = {}
        self._waiting: set[int] = set()
        self._asked = False
        """Whether it was asked if it lives, and has not answered yet."""
        self._heard = time.monotonic()
        self._loaded: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.reason = ""
        """Why it ended; empty while it runs."""
        self.ended_at: float | None = None
        """When that was seen, by the monotonic clock."""
        self._hung = ""
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._watch())]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self.reason

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        return len(self._boxes)

    async def load(self, told: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """What the process says of the model that it has loaded. Raises IntegrityError for changed files, else Gone."""
        self._send({"load": told})
        try:
            async with asyncio.timeout(seconds):
                said = await asyncio.shield(self._loaded)
        except TimeoutError:
            raise Gone(f"the model was not loaded within {seconds:g} s") from None
        if "refused" in said:
            raise IntegrityError(said["refused"]["message"], problems=said["refused"]["problems"])
        if "failed" in said:
            raise Gone(f"the model could not be loaded: {said['failed']}")
        return dict(said["ready"])

    async def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """As Runtime.complete."""
        number, box = next(self._numbers), asyncio.Queue[Piece | Ending | Exception]()
        if self.reason:
            raise Gone(self.reason)
        if not self._boxes:
            self._heard = time.monotonic()
        self._boxes[number] = box
        self._waiting.add(number)
        self._send({"ask": asdict(ask), "number": number})
        try:
            while not isinstance(said := await box.get(), Ending):
                if isinstance(said, Exception):
                    raise said
                yield said
            yield said
        finally:
            self._waiting.discard(number)
            if self._boxes.pop(number, None):  # it was closed before its end
                self._send({"drop": number})

    async def ended(self) -> None:
        """Return when the process has ended."""
        await asyncio.wait([self._tasks[0]])

    async def kill(self) -> None:
        """End the process, and what it has under way."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self.ended()
        self._tasks[1].cancel()

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _pump(self) -> None:
        with suppress(OSError):
            while line := await self._reader.readline():
                self._heard, self._asked = time.monotonic(), False
                self._heed(json.loads(line))
        self.reason, self.ended_at = "the model's process ended", time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        self._give_up(_ended(await self._process.wait()))
        self._writer.close()

    def _heed(self, message: dict[str, Any]) -> None:
        for number, kind, *rest in message.get("said", ()):
            self._deliver(number, kind, rest=rest)
        if message.keys() & {"ready", "refused", "failed"} and not self._loaded.done():
            self._loaded.set_result(message)

    def _deliver(self, number: int, kind: str, *, rest: list[Any]) -> None:
        box = self._boxes.get(number)
        if box is None:  # it was dropped meanwhile
            return
        self._waiting.discard(number)
        if kind == "piece":
            box.put_nowait(Piece(*rest))
            return
        del self._boxes[number]
        ending = kind == "ending"
        box.put_nowait(Ending(**rest[0] | {"tokens": tuple(rest[0]["tokens"])}) if ending else Unfit(rest[0]))

    def _give_up(self, how: str) -> None:
        self.reason = f"the model's process ended: {self._hung or how}"
        for number in list(self._boxes):
            self._boxes.pop(number).put_nowait(Gone(self.reason, taken=True))
        if not self._loaded.done():
            self._loaded.set_result({"failed": self.reason})

    async def _watch(self) -> None:
        """Kill a process that has work and says nothing; ask one that has none now and then whether it lives."""
        await asyncio.shield(self._loaded)
        while not self.reason:
            await asyncio.sleep(self._hang_seconds / LOOKS)
            if self._silent() > self._hang_seconds and (self._boxes or self._asked):
                await asyncio.sleep(self._hang_seconds / LOOKS)  # what it said may not have been read yet
                if self._silent() > self._hang_seconds:
                    self._hung = f"it said nothing for {self._hang_seconds:g} s and was killed"
                    self._process.kill()
                    return
            if self._silent() > self._hang_seconds / 2 and not self._boxes and not self._asked:
                self._asked = True
                self._heard = time.monotonic()
                self._send({"ping": True})

    def _silent(self) -> float:
        return time.monotonic() - self._heard


async def open_link(*, hang_seconds: float) -> Link:
    """Start a process that has no model yet. Raises OSError when it cannot be."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            argv = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
            process = await asyncio.create_subprocess_exec(
                *argv, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL
            )
        streams = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES)
    except BaseException:
        ours.close()  # a process that was started ends with it
        raise
    return Link(process, streams, hang_seconds=hang_seconds)


def _ended(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
