"""The loader: a rank's next batches are read and built by a thread while it computes.

Which samples they are is samples.py's; how long a rank waited for them is the part `data` of a step (training/meter.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tasks.jobs.data.samples import Batch, Shares, Source

TASK_SECONDS = 0.002
"""Of one task of the thread: small steps are read several at once, for waking a thread takes longer than building one."""
MOST_STEPS = 8


class Loader:
    """One rank's batches in their order. State: those that are being read, the next one first.

    Reading ahead changes nothing that is read: whoever asks for another position than the next one gets that one.
    """

    def __init__(
        self, source: Source, shares: Shares, *, device: torch.device, ahead: int, eod: int | None = None
    ) -> None:
        """`ahead` batches are read before they are asked for; `eod`: documents are masked, see Shares.micro_batches."""
        self._source, self._shares, self._ahead, self._eod = source, shares, ahead, eod
        self._pinned = device.type == "cuda"
        # A thread's own GPU is the first one, where pinning would open a context that nobody uses.
        begin = (torch.cuda.set_device, (device,)) if self._pinned else (None, ())
        self._thread = ThreadPoolExecutor(1, "loader", *begin)
        self._seconds = TASK_SECONDS
        """That the last step took to be read."""
        self._reading: deque[tuple[int, Future[list[list[Batch]]], int]] = deque()
        """Position, the task that reads it, and its place among that task's steps."""

    def take(self, consumed: int) -> list[Batch]:
        """This rank's part of the batch after `consumed` samples; raises what reading raised."""
        if not self._reading or self._reading[0][0] != consumed:
            self._forget()
            self._read(consumed)
        while len(self._reading) <= self._ahead:
            self._read(self._reading[-1][0] + self._shares.global_batch)
        _, task, place = self._reading.popleft()
        if task.exception():  # of one of its steps: this one is read by itself, and is good, or raises
            return self._thread.submit(self._batches, consumed).result()
        return task.result()[place]

    def close(self, *, done: bool) -> None:
        """End the thread, then close what it reads; it is waited for no longer than one batch takes."""
        self._forget()
        self._thread.shutdown()
        self._source.close(done=done)

    def _read(self, consumed: int) -> None:
        steps = min(MOST_STEPS, max(1, int(TASK_SECONDS / self._seconds)))
        positions = [consumed + step * self._shares.global_batch for step in range(steps)]
        task = self._thread.submit(self._several, positions)
        self._reading.extend((position, task, place) for place, position in enumerate(positions))

    def _several(self, positions: Sequence[int]) -> list[list[Batch]]:
        began = time.perf_counter()
        results = [self._batches(position) for position in positions]
        self._seconds = (time.perf_counter() - began) / len(positions)
        return results

    def _forget(self) -> None:
        while self._reading:
            self._reading.pop()[1].cancel()

    def _batches(self, consumed: int) -> list[Batch]:
        batches = self._shares.micro_batches(self._source, consumed, eod=self._eod)
        return [batch.pinned() for batch in batches] if self._pinned else batches
