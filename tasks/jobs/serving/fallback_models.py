"""Which model answers: the full one, else the one before it, else a smaller variant, else none.

Each rung is a model in a process of its own (model_process.py). What lies below the first rung is loaded when it is needed, or
held ready where the memory allows, and left again by itself once the full model is back and proven. HTTP does not live here:
tasks/jobs/serving/api.py marks what a lower rung answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.common.errors import IntegrityError
from tasks.config.serving import VllmConfig
from tasks.jobs.serving.model_process import LOAD_SECONDS, ProcessRuntime, open_link
from tasks.jobs.serving.runtime import Golden, Gone, Runtime, available, resident
from tasks.jobs.serving.vllm import VllmProcess, opener
from tasks.storage.manifest import FileEntry

RungName = Literal["full", "previous", "smaller"]
ANY = Golden("def ", ())
"""What a smaller variant is asked while the full model has not said its prompts."""
LOOK_SECONDS = 0.25
FLAP_SECONDS = 300.0
"""Crashes within this time count: after the second, the full model must have been up for a while before it is used again."""
LONGEST_HOLD = 60.0
LEAVE_SECONDS = 30.0
"""A lower rung that was loaded in need is left when the full model has been up for so long."""
SPARE = 2.0
"""A lower rung is held ready when this many times its memory is available."""
UNMEASURED = 2.0
"""Memory of a loaded model by the size of its files, until the full one was measured (29 M parameters: fp32 1.8, int8 1.9)."""
PROCESS_BYTES = 100 << 20
"""What a process of a model holds besides it."""
log = logging.getLogger("headway.serve")


@dataclass(frozen=True)
class Rung:
    """One model that may answer."""

    name: RungName
    model_ref: str
    """Of the artifact; of a variant with its path: `model/tiny@VERSION/variants/int8`."""
    folder: Path
    files: tuple[FileEntry, ...] | None
    """What every byte of `folder` is compared with; None: whoever mounted the folder has verified it."""
    golden: tuple[Golden, ...] = ()
    """Prompts with the answers that prove it; empty: those of `golden.json` in `folder`.

    A smaller variant without that file is proven by answering the full model's prompts in any way.
    """
    unless: Path | None = None
    """It answers nothing while this file is there: its key was revoked, for example."""
    vllm: VllmConfig | None = None
    """It is served by vLLM, under these settings; None: by ONNX Runtime."""


@dataclass(frozen=True)
class Taken:
    """The rung that answers a request."""

    rung: RungName
    model_ref: str
    runtime: Runtime


@dataclass
class _Floor:
    """A rung, and its runtime once it is loaded."""

    rung: Rung
    runtime: ProcessRuntime | None = None
    held: bool = False
    """Whether it is held ready, and not left."""
    refused: bool = False

    @property
    def up(self) -> bool:
        return self.runtime is not None and self.runtime.up and not self.barred

    @property
    def barred(self) -> bool:
        return self.rung.unless is not None and self.rung.unless.exists()

    @property
    def bytes(self) -> int:
        """Of the files that are loaded."""
        if self.rung.files is None:
            return sum(path.stat().st_size for path in self.rung.folder.iterdir() if path.is_file())
        return sum(file.size for file in self.rung.files if "/" not in file.path)


class Ladder:
    """The rungs of one server, the best first. State: what is loaded, and since when it holds."""

    def __init__(self, rungs: Sequence[Rung], *, threads: int, hang_seconds: float = 30.0) -> None:
        """`hang_seconds`: a model that has work and says nothing for so long is killed and started again."""
        if not rungs or rungs[0].name != "full":
            raise ValueError(f"the first rung is {rungs[0].name if rungs else 'missing'}: it must be `full`")
        self._floors = [_Floor(rung) for rung in rungs]
        self._full, self._lower = self._floors[0], self._floors[1:]
        self._threads, self._hang_seconds = threads, hang_seconds
        self._factor = UNMEASURED
        self._loading: asyncio.Task[None] | None = None
        self._minding: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the first rung and prove it; returns once it is ready, or has failed first: then `reason` says why.

        Raises IntegrityError, with nothing loaded, for files of the first rung that are not what they were. A model that
        crashes while it loads is tried again, with pauses that grow; lower rungs answer meanwhile.
        """
        with suppress(Gone):
            await self._load(self._full)
        self._minding = asyncio.create_task(self._mind())

    async def lost(self) -> None:
        """Never return; raise IntegrityError once the full model's files were found changed and no rung below may answer."""
        while self.refused is None or not all(floor.refused or floor.barred for floor in self._lower):
            await asyncio.sleep(LOOK_SECONDS)
        raise self.refused

    def take(self) -> Taken | None:
        """The best rung that would answer now; None when there is none: 503, and try again in `retry_seconds`.

        Never waits; has lower rungs loaded when they are needed. The rung may go while it answers: its runtime then raises
        Gone. Do not send a request again that raised Gone after its runtime took it: it may be what crashes the model.
        """
        result = next((floor for floor in self._floors if floor.up and self._trusted(floor)), None)
        if result is None and self._lower and self._full.runtime and not self._busy_loading():
            self._loading = asyncio.create_task(self._load_lower())
        if result is None or result.runtime is None:
            return None
        return Taken(result.rung.name, result.rung.model_ref, result.runtime)

    def vllm(self) -> VllmProcess | None:
        """The vLLM that answers for the full model now; None: it is not vLLM's. Raises Gone while it is away."""
        if self._full.rung.vllm is None:
            return None
        if self._full.runtime is None:
            raise Gone("the model is being loaded")
        process = self._full.runtime.process()
        assert isinstance(process, VllmProcess)
        return process

    async def figures(self) -> str:
        """Metrics of what answers for the full model, in Prometheus' text format, where it has any of its own."""
        try:
            process = self.vllm()
        except Gone:
            return ""
        return await process.figures() if process else ""

    @property
    def by_vllm(self) -> bool:
        """Whether the full model is served by vLLM."""
        return self._full.rung.vllm is not None

    @property
    def ready(self) -> bool:
        """Whether the full model is up and proven."""
        return self._full.up

    @property
    def answers(self) -> bool:
        """Whether any rung would answer now."""
        return any(floor.up for floor in self._floors)

    @property
    def loading(self) -> bool:
        """Whether a rung is being loaded, so that asking again in a while may help; before the first one, too."""
        runtimes = [floor.runtime for floor in self._floors if floor.runtime]
        return not runtimes or self._busy_loading() or any(runtime.loading for runtime in runtimes)

    @property
    def reason(self) -> str:
        """Why the full model does not answer; empty while it is first loaded, and when it is ready."""
        return self._full.runtime.reason if self._full.runtime else ""

    @property
    def refused(self) -> IntegrityError | None:
        """Set once the full model's files were found changed at a restart: it is not tried again; lower rungs may answer."""
        return self._full.runtime.refused if self._full.runtime else None

    @property
    def waiting(self) -> int:
        """Requests of all rungs that have got no piece yet."""
        return sum(floor.runtime.waiting for floor in self._floors if floor.runtime)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, of the full model; 0 until it is loaded."""
        return self._full.runtime.context_length if self._full.runtime else 0

    @property
    def up(self) -> dict[str, bool]:
        """Every rung by its model, and whether it would answer now."""
        return {floor.rung.model_ref: floor.up for floor in self._floors}

    @property
    def retry_seconds(self) -> int:
        """Whole seconds after which a client that got no rung should ask again; at least 1."""
        return int(min(2 ** self._crashes(), LONGEST_HOLD // 2)) if self.refused is None else int(LONGEST_HOLD)

    async def close(self) -> None:
        """Give up what is under way, and end the models' processes."""
        for task in (self._minding, self._loading):
            if task:
                task.cancel()
                await asyncio.wait([task])
        for floor in self._floors:
            if floor.runtime:
                await floor.runtime.close()

    async def _load(self, floor: _Floor) -> None:
        rung = floor.rung
        floor.runtime = ProcessRuntime(
            files=rung.files,
            golden=self._golden(rung),
            named=rung.model_ref,
            hang_seconds=self._hang_seconds,
            open_process=opener(rung.vllm) if rung.vllm else open_link,
            load_seconds=rung.vllm.start_seconds if rung.vllm else LOAD_SECONDS,
        )
        await floor.runtime.start(rung.folder, threads=self._threads)
        if floor is self._full and floor.runtime.pid:
            held = resident(floor.runtime.pid) - PROCESS_BYTES
            self._factor = min(max(held / max(floor.bytes, 1), 1.0), UNMEASURED)

    def _golden(self, rung: Rung) -> Sequence[Golden]:
        if rung.golden or rung.name != "smaller" or (rung.folder / "golden.json").exists():
            return rung.golden
        known = self._full.runtime.golden if self._full.runtime else ()
        return [Golden(golden.prompt, ()) for golden in known] or [ANY]

    async def _load_lower(self) -> None:
        """The best lower rung that is not loaded, for which there is memory; a rung whose files were changed is never one."""
        for floor in self._lower:
            if floor.runtime or floor.refused or floor.barred or not self._fits(floor, times=1.0):
                continue
            try:
                await self._load(floor)
                log.warning("%s is ready to answer for %s", floor.rung.model_ref, self._full.rung.model_ref)
                return
            except IntegrityError as error:
                floor.runtime, floor.refused = None, True
                log.error("%s", error)
            except Gone:
                continue  # its runtime has said why, and goes on trying

    async def _mind(self) -> None:
        """Hold a lower rung ready once the full one is up, and leave what was loaded in need when it is up for good."""
        looked = False
        while True:
            if self._full.up and not looked:
                looked = True
                first = next(iter(self._lower), None)
                if first and first.runtime is None and not self._busy_loading() and self._fits(first, times=SPARE):
                    first.held = True
                    self._loading = asyncio.create_task(self._load_lower())
            if self._full.up and self._up_for() > max(LEAVE_SECONDS, self._hold()):
                for floor in self._lower:
                    if floor.runtime and not floor.held and not floor.runtime.under_way and not self._busy_loading():
                        runtime, floor.runtime = floor.runtime, None
                        await runtime.close()
                        log.warning("%s is back: %s is left", self._full.rung.model_ref, floor.rung.model_ref)
            await asyncio.sleep(LOOK_SECONDS)

    def _fits(self, floor: _Floor, *, times: float) -> bool:
        """Whether there is memory for a rung; while it is loaded, its files are held beside it."""
        fits = (PROCESS_BYTES + floor.bytes * (self._factor + 1)) * times <= available()
        if not fits:
            log.warning("there is no memory for %s", floor.rung.model_ref)
        return fits

    def _busy_loading(self) -> bool:
        return self._loading is not None and not self._loading.done()

    def _trusted(self, floor: _Floor) -> bool:
        """The full model after crashes only when it has been up for a while, unless nothing else would answer."""
        if floor is not self._full or self._up_for() >= self._hold():
            return True
        return not any(other.up for other in self._lower)

    def _up_for(self) -> float:
        return time.monotonic() - self._full.runtime.up_since if self._full.runtime else 0.0

    def _hold(self) -> float:
        """Seconds for which the full model must have been up: none after one crash, then 4, 8, ... at most a minute."""
        crashes = self._crashes()
        return min(2.0**crashes, LONGEST_HOLD) if crashes > 1 else 0.0

    def _crashes(self) -> int:
        since = time.monotonic() - FLAP_SECONDS
        return sum(at > since for at in self._full.runtime.crashes) if self._full.runtime else 0
