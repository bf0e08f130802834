"""When training is saved, to which tier, and what is done when saving is slow or fails: the same on all ranks.

Who writes is the engine's saver (engine.Saving). A save that is due while one is being written is left out and counted: storage
that is slow costs checkpoints, not steps and not memory. One that fails is told and counted; so many in a row end the run.
The interval is the plan's; where the plan chose it, it is corrected by what saving takes here (tasks/planning/checkpointing.py).
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tasks.jobs.training.engine import Saving
from tasks.planning.checkpointing import corrected_every_steps

FAILURES_AT_MOST = 3
"""Saves that may fail in a row: then there is no checkpoint to go on from worth the name."""
POLL_SECONDS = 0.02
STORE, LOCAL = "store", "local"


class Saves:
    """State: the saver of this attempt, and what saving took and came to in this process."""

    def __init__(self, settings: Mapping[str, Any], *, steps: int, local_every: int | None, group: Any) -> None:
        self.every, self.local_every, self.steps, self.group = (
            int(settings["checkpoint_every_steps"]),
            local_every,
            steps,
            group,
        )
        self._wanted = self.every
        """By this rank's clocks. Rank 0's counts, from when ranks next speak to each other."""
        self._written, self.last = 0.0, ""
        """Seconds that the store's last save took to be written; the tier of the last save."""
        self._mean_seconds: float | None = settings.get("seconds_between_failures")
        """Mean time between failures, where the interval is to be corrected."""
        self._stalls: list[float] = []
        self._began, self._first = time.monotonic(), 0
        self.stalled = 0.0
        """Seconds that training stood still for checkpoints; the wait for the last one after training is not among them."""
        self.saved = self.saved_locally = self.skipped = self.failed = self.failed_in_a_row = 0

    def open(self, saver: Saving, step: int) -> None:
        """A new attempt goes on from a step."""
        self.saver, self._began, self._first = saver, time.monotonic(), step

    def look(self) -> None:
        """Raises OSError when a newer attempt has taken this job over."""
        self.saver.busy()

    def due(self, step: int) -> str:
        """The tier that a step is saved to; empty: none."""
        if step % self.every == 0:
            return STORE
        return LOCAL if self.local_every and step % self.local_every == 0 else ""

    def room(self, *, wait: bool = False) -> bool:
        """Whether a save may begin: none is in flight on any rank. When it may not, one is left out and counted."""
        began = time.monotonic()
        free = self._settle(wait=wait)
        self.skipped += not free
        self.stalled += time.monotonic() - began
        return free

    def save(self, tier: str, *, step: int, consumed_samples: int) -> None:
        """Begin a save; ranks have agreed that there is room."""
        began, self.last = time.monotonic(), tier
        if tier == LOCAL:
            self.saver.save(step=step, consumed_samples=consumed_samples, local=True)
            self.saved_locally += 1
        else:
            self.saver.save(step=step, consumed_samples=consumed_samples)
            self.saved += 1
        self._stalls.append(time.monotonic() - began)
        self.stalled += self._stalls[-1]
        # Rank 0's clocks decide; the last save that was written says how long that takes.
        if self._mean_seconds is None or not self._written or step == self._first:
            return
        wanted = corrected_every_steps(
            self.steps,
            (time.monotonic() - self._began) / (step - self._first),
            stall_seconds=max(self._stalls[-1], 1e-6),
            write_seconds=self._written,
            mean_seconds_between_failures=self._mean_seconds,
        )
        self._wanted = wanted

    def close(self) -> None:
        """Wait for the last save of an attempt, then end its writer."""
        self._settle(wait=True)
        self.saver.close()

    def say(self) -> None:
        """Of a run that ends early: its last save did not come to be."""
        if self.failed_in_a_row:
            print("the last save failed: the next start goes on from the one before", file=sys.stderr, flush=True)

    def _settle(self, *, wait: bool) -> bool:
        """Learn from all ranks whether the last save is over, and whether it failed anywhere; whether nothing is in flight."""
        while True:
            busy, failed = self._all(int(self.saver.busy()), int(bool(self.saver.failure)))
            if failed:
                self.saver.abandon()  # ranks that wait for the one that failed wait for nothing
                self.saver.failure, why = "", self.saver.failure
                self.failed += 1
                self.failed_in_a_row += self.last == STORE  # without the local tier training goes on
                if self.failed_in_a_row >= FAILURES_AT_MOST:
                    raise OSError(
                        errno.EIO, f"{FAILURES_AT_MOST} checkpoints in a row failed: {why or 'another rank says why'}"
                    )
                return True
            if not busy:
                if self.last == STORE:
                    self.failed_in_a_row, self._written = 0, self.saver.seconds
                return True
            if not wait:
                return False
            time.sleep(POLL_SECONDS)

    def _all(self, *numbers: int) -> list[int]:
        """The largest of every rank's numbers; the interval is rank 0's."""
        own = self._wanted if dist.get_rank() == 0 else 0
        word = torch.tensor([own, *numbers])
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self.group)
        self.every, *largest = (int(number) for number in word)
        return largest

    def told(self) -> dict[str, Any]:
        """What the result of the job says of it."""
        return {
            "checkpoint_stall_seconds": self.stalled,
            "checkpoints": self.saved,
            "checkpoints_local": self.saved_locally,
            "checkpoints_skipped": self.skipped,
            "checkpoints_failed": self.failed,
            "checkpoint_every_steps": self.every,
        }
