"""What the time of a training run went to, over all its attempts: useful steps, others, starts, standstills, nothing.

Pure: in go the records of `metrics.jsonl` (tasks/jobs/training/metrics_logger.py writes them). How long failures may make a run
is estimated in checkpointing.py. See docs/training.md, "Goodput".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STALLS = ("data_seconds", "checkpoint_seconds", "heldout_seconds", "profile_seconds")
"""Parts of a step in which its rank waits."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run, by cause."""

    useful: float = 0.0
    """Computing and communicating in steps that counted."""
    stalled: float = 0.0
    """Waiting for data, a checkpoint's snapshot, held-out text, a profile; and after the last step for its checkpoint."""
    lost: float = 0.0
    """Steps that did not stay: done again because no checkpoint had them, or left out for safety; and going back."""
    starting: float = 0.0
    """From the start of the first process to its first step: imports, meeting, building the network."""
    restarting: float = 0.0
    """The same of every later one: a checkpoint is verified and loaded, too."""
    idle: float = 0.0
    """Between the last step of an attempt and the start of the next one: noticing, waiting for machines, meeting anew."""

    @property
    def total(self) -> float:
        return self.useful + self.stalled + self.lost + self.starting + self.restarting + self.idle

    @property
    def share(self) -> float:
        """Useful seconds of all: the goodput."""
        return self.useful / self.total if self.total else 0.0

    @property
    def causes(self) -> dict[str, float]:
        """Shares of all time: useful, stall, lost_to_restart, start, idle."""
        seconds = {
            "useful": self.useful,
            "stall": self.stalled,
            "lost_to_restart": self.lost + self.restarting,
            "start": self.starting,
            "idle": self.idle,
        }
        return {cause: value / self.total if self.total else 0.0 for cause, value in seconds.items()}


def goodput(records: Iterable[Mapping[str, Any]], *, ended: float | None = None) -> Goodput:
    """What the records of a run add up to; `ended` is when it was all over, in seconds since 1970.

    Records without `step_seconds`, such as those of another release, count for nothing.
    """
    steps = [record for record in records if "step_seconds" in record]
    counted = {record["step"]: number for number, record in enumerate(steps)}
    useful = stalled = lost = 0.0
    for number, record in enumerate(steps):
        back = float(record.get("rollback_seconds", 0.0))
        seconds = float(record["step_seconds"]) - back
        waited = min(sum(float(record.get(part, 0.0)) for part in STALLS), seconds)
        if counted[record["step"]] != number or record.get("skipped"):
            lost += seconds + back
            continue
        lost += back
        useful, stalled = useful + seconds - waited, stalled + waited
    last = max(0.0, ended - float(steps[-1]["time"])) if ended and steps else 0.0
    starting = float(steps[0].get("start_seconds", 0.0)) if steps else 0.0
    restarting, idle = _between(steps)
    return Goodput(
        useful=useful, stalled=stalled + last, lost=lost, starting=starting, restarting=restarting, idle=idle
    )


def _between(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds of restarting and of nothing: before the first step of each attempt but the first."""
    restarting = idle = 0.0
    for before, record in pairwise(steps):
        if record["attempt"] != before["attempt"]:
            start, gap = float(record.get("start_seconds", 0.0)), _gap(before, record)
            restarting, idle = restarting + min(start, gap), idle + max(0.0, gap - start)
    return restarting, idle


def _gap(before: Mapping[str, Any], record: Mapping[str, Any]) -> float:
    """Both by the clock of the machine of rank 0 at that time."""
    return max(0.0, float(record["time"]) - float(record["step_seconds"]) - float(before["time"]))
