"""A model in a process of its own, started again when it crashes or hangs: no server ends with it.

The process is model_child.py, of ONNX Runtime, whose socket comes first here, or vLLM's (vllm.py); which model answers meanwhile
is fallback_models.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tasks.common.errors import IntegrityError
from tasks.jobs.serving.runtime import Ask, Ending, Golden, Gone, Logprob, Piece, Unfit
from tasks.storage.manifest import FileEntry

# The server's end of a model's process (model_child.py): start it, ask it, notice at once when it dies or hangs.
#
# One object is one process.


PROGRAM = "tasks.jobs.serving.model_child"
LINE_BYTES = 64 << 20
END_SECONDS = 1.0
"""Time in which a process whose socket is closed must have ended."""
LOOKS = 8
"""How often in `hang_seconds` it is looked whether the process hangs."""


class ModelProcess(Protocol):
    """One process with one model, from its start to its end."""

    reason: str
    """Why it ended; empty while it runs."""
    ended_at: float | None
    """When that was seen, by the monotonic clock."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    @property
    def under_way(self) -> int: ...

    async def load(self, payload: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """What the process says of the model that it has loaded. Raises IntegrityError for changed files, else Gone."""

    async def prove(self, golden: Sequence[Golden], *, seconds: float) -> None:
        """Ask what proves the model; raises Gone unless it is answered as it was."""

    def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """As Runtime.complete."""

    async def ended(self) -> None:
        """Return when the process has ended."""

    async def kill(self) -> None:
        """End the process, and what it has under way."""


class OpenProcess(Protocol):
    """Starts a process that has no model yet. Raises OSError when it cannot be."""

    def __call__(self, *, hang_seconds: float) -> Awaitable[ModelProcess]: ...


class Link:
    """A ModelProcess of ONNX Runtime. State: the requests that it has, each with a box of what was said, and when that was."""

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

    async def load(self, payload: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """What the process says of the model that it has loaded. Raises IntegrityError for changed files, else Gone."""
        self._send({"load": payload})
        try:
            async with asyncio.timeout(seconds):
                output = await asyncio.shield(self._loaded)
        except TimeoutError:
            raise Gone(f"the model was not loaded within {seconds:g} s") from None
        if "refused" in output:
            raise IntegrityError(output["refused"]["message"], problems=output["refused"]["problems"])
        if "failed" in output:
            raise Gone(f"the model could not be loaded: {output['failed']}")
        return dict(output["ready"])

    async def prove(self, golden: Sequence[Golden], *, seconds: float) -> None:
        """See ModelProcess.prove: all golden prompts at once, each answered token for token. No tokens: any answer will do."""
        try:
            async with asyncio.timeout(seconds):
                answers = await asyncio.gather(*(_answer(self, each) for each in golden))
                for each, (text, tokens) in zip(golden, answers, strict=True):
                    if each.tokens and tokens != each.tokens:
                        raise Gone(f"the golden prompt {each.prompt!r} was answered {text!r}")
        except TimeoutError:
            raise Gone(f"the golden prompts were not answered within {seconds:g} s") from None

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
            while not isinstance(output := await box.get(), Ending):
                if isinstance(output, Exception):
                    raise output
                yield output
            yield output
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
                message = json.loads(line)
                for number, kind, *rest in message.get("said", ()):
                    box = self._boxes.get(number)
                    if box is not None:
                        self._waiting.discard(number)
                        if kind == "piece":
                            text, tokens, likely, of_prompt = rest
                            box.put_nowait(Piece(text, tokens, tuple(map(_logprob, likely)), of_prompt))
                        else:
                            del self._boxes[number]
                            ending = kind == "ending"
                            box.put_nowait(
                                Ending(**rest[0] | {"tokens": tuple(rest[0]["tokens"])}) if ending else Unfit(rest[0])
                            )
                if message.keys() & {"ready", "refused", "failed"} and not self._loaded.done():
                    self._loaded.set_result(message)
        self.reason, self.ended_at = "the model's process ended", time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        code = await self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self.reason = f"the model's process ended: {self._hung or how}"
        for number in list(self._boxes):
            self._boxes.pop(number).put_nowait(Gone(self.reason, taken=True))
        if not self._loaded.done():
            self._loaded.set_result({"failed": self.reason})
        self._writer.close()

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


def _logprob(fields: list[Any]) -> Logprob:
    text, value, top = fields
    return Logprob(text, value, tuple((name, likely) for name, likely in top))


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


LOAD_SECONDS = 600.0
PROVE_SECONDS = 600.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0
MOMENT_SECONDS = 1.0
"""A pause that is longer is no moment: whoever asks is told so, and does not wait."""
STEADY_SECONDS = 60.0
"""A process that ran for so long counts as sound: the next pause is the first one again."""
log = logging.getLogger("headway.serve")


class ProcessRuntime:
    """A Runtime. State: the process that answers now, if any, and the task that keeps one there.

    `reason` says why there is none; `refused` is set once the files were found changed: then it is not tried again.
    """

    def __init__(
        self,
        *,
        files: Sequence[FileEntry] | None = None,
        golden: Sequence[Golden] = (),
        named: str = "",
        hang_seconds: float = 30.0,
        open_process: OpenProcess = open_link,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        """`files`: what every byte is compared with at each start; `golden`: what proves it, empty: the folder's golden.json."""
        self._open_process, self._load_seconds = open_process, load_seconds
        self._files, self._named, self._hang_seconds = files, named, hang_seconds
        self.golden: Sequence[Golden] = tuple(golden)
        """What it is proven by."""
        self._link: ModelProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._context_length = 0
        self._reason = ""
        self.refused: IntegrityError | None = None
        self._crashes: list[float] = []
        self._loading = False
        self.up_since = 0.0
        """Since when it is up, by the monotonic clock."""

    async def start(self, folder: Path, *, threads: int) -> None:
        """Load a folder's model and prove it by its golden prompts, all at once.

        Raises IntegrityError for files that are not what they were, which is final. Raises Gone when it cannot be started,
        crashes or answers wrongly; it then goes on trying, with pauses that grow, until it is closed.
        """
        files = None if self._files is None else [file.model_dump() for file in self._files]
        load = {"folder": str(folder), "files": files, "threads": threads, "named": self._named}
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(load, first))
        await first

    async def complete(self, ask: Ask) -> AsyncGenerator[Piece | Ending, None]:
        """As Runtime says."""
        async with aclosing(self.process().complete(ask)) as output:
            async for piece in output:
                yield piece

    def process(self) -> ModelProcess:
        """The process that answers now. Raises Gone without one."""
        if self._link is None or not self._link.alive:
            raise Gone(self.reason or "the model is being loaded")
        return self._link

    @property
    def crashes(self) -> list[float]:
        """When it ended by itself, by the monotonic clock, after it had been up; from the moment on in which it is not `up`."""
        ended = self._link.ended_at if self._link else None
        return self._crashes if ended is None else [*self._crashes, ended]

    @property
    def loading(self) -> bool:
        """Whether a process is being started, or will be in a moment."""
        return self._loading or (self._link is not None and not self._link.alive)

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def up(self) -> bool:
        return self._link is not None and self._link.alive

    @property
    def reason(self) -> str:
        """Why it does not answer; empty while it is first loaded, and when it is up."""
        return self._reason or (self._link.reason if self._link else "")

    @property
    def waiting(self) -> int:
        return self._link.waiting if self._link else 0

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self._link.under_way if self._link else 0

    @property
    def pid(self) -> int | None:
        """Of the process that answers now."""
        return self._link.pid if self._link else None

    async def close(self) -> None:
        """As Runtime says."""
        if self._keeper:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    async def _keep(self, load: Mapping[str, object], first: asyncio.Future[None]) -> None:
        failures = 0
        while True:
            try:
                lasted = await self._run(load, first)
                failures = 0 if lasted > STEADY_SECONDS else failures
            except IntegrityError as error:
                self.refused, self._reason, self._loading = error, str(error), False
                _tell(first, error)
                return
            except (Gone, OSError, ValueError, KeyError) as error:  # Unfit is a ValueError: of a golden prompt
                odd = "" if isinstance(error, Gone) else f"the model could not be started: {type(error).__name__}: "
                self._reason = f"{odd}{error}"
                _tell(first, Gone(self._reason))
            log.warning("model %s: %s", self._named, self.reason)
            pause = min(FIRST_PAUSE * 2**failures, LONGEST_PAUSE)
            self._loading = pause < MOMENT_SECONDS
            await asyncio.sleep(pause)
            failures += 1

    async def _run(self, load: Mapping[str, object], first: asyncio.Future[None]) -> float:
        """One process from its start to its end; seconds for which it was up."""
        self._loading = True
        link = await self._open_process(hang_seconds=self._hang_seconds)
        try:
            output = await link.load(load, seconds=self._load_seconds)
            if not self.golden:
                if not output["golden"]:
                    raise Gone(f"{self._named or 'the model'} has no golden.json to prove it with")
                self.golden = [Golden(str(each["prompt"]), tuple(each["tokens"])) for each in output["golden"]]
            await link.prove(self.golden, seconds=PROVE_SECONDS)
            self._context_length, self.up_since = int(output["context_length"]), time.monotonic()
            self._link, self._reason, self._loading = link, "", False
            _tell(first, None)
            await link.ended()
            self._reason, self._crashes = link.reason, self.crashes
            self._link = None
            return self._crashes[-1] - self.up_since
        finally:
            self._link = None
            await link.kill()


async def _answer(model: Link, golden: Golden) -> tuple[str, tuple[int, ...]]:
    text = ""
    async for output in model.complete(Ask(golden.prompt, len(golden.tokens) or 1, measure=False)):
        if isinstance(output, Ending):
            return text, output.tokens
        text += output.text
    raise AssertionError("an answer has an ending")


def _tell(first: asyncio.Future[None], error: Exception | None) -> None:
    """How the first start went, once."""
    if first.done():
        return
    first.set_exception(error) if error else first.set_result(None)
