"""A model of ONNX Runtime in a process of its own, started again when it crashes or hangs: no server ends with it.

The process is model_child.py, its socket model_link.py; which model answers meanwhile is fallback_models.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.jobs.serving.model_link import Link, open_link
from tasks.jobs.serving.runtime import Ask, Ending, Golden, Gone, Piece
from tasks.storage.manifest import FileEntry

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
    ) -> None:
        """`files`: what every byte is compared with at each start; `golden`: what proves it, empty: the folder's golden.json."""
        self._files, self._named, self._hang_seconds = files, named, hang_seconds
        self.golden: Sequence[Golden] = tuple(golden)
        """What it is proven by."""
        self._link: Link | None = None
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
        link = self._link
        if link is None or not link.alive:
            raise Gone(self.reason or "the model is being loaded")
        async with aclosing(link.complete(ask)) as said:
            async for piece in said:
                yield piece

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
        link = await open_link(hang_seconds=self._hang_seconds)
        try:
            said = await link.load(load, seconds=LOAD_SECONDS)
            self.golden = self.golden or _golden(said["golden"], self._named)
            await prove(link, self.golden)
            self._context_length, self.up_since = int(said["context_length"]), time.monotonic()
            self._link, self._reason, self._loading = link, "", False
            _tell(first, None)
            await link.ended()
            self._reason, self._crashes = link.reason, self.crashes
            self._link = None
            return self._crashes[-1] - self.up_since
        finally:
            self._link = None
            await link.kill()


async def prove(model: Link, golden: Sequence[Golden]) -> None:
    """Ask all golden prompts at once; raises Gone unless each is answered as it was. No tokens: any answer will do."""
    try:
        async with asyncio.timeout(PROVE_SECONDS):
            for each, (text, tokens) in zip(
                golden, await asyncio.gather(*(_answer(model, g) for g in golden)), strict=True
            ):
                if each.tokens and tokens != each.tokens:
                    raise Gone(f"the golden prompt {each.prompt!r} was answered {text!r}")
    except TimeoutError:
        raise Gone(f"the golden prompts were not answered within {PROVE_SECONDS:g} s") from None


async def _answer(model: Link, golden: Golden) -> tuple[str, tuple[int, ...]]:
    text = ""
    async for said in model.complete(Ask(golden.prompt, len(golden.tokens) or 1, measure=False)):
        if isinstance(said, Ending):
            return text, said.tokens
        text += said.text
    raise AssertionError("an answer has an ending")


def _golden(told: list[dict[str, object]], named: str) -> list[Golden]:
    if not told:
        raise Gone(f"{named or 'the model'} has no golden.json to prove it with")
    return [Golden(str(each["prompt"]), tuple(each["tokens"])) for each in told]  # type: ignore[arg-type]


def _tell(first: asyncio.Future[None], error: Exception | None) -> None:
    """How the first start went, once."""
    if first.done():
        return
    first.set_exception(error) if error else first.set_result(None)
