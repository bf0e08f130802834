"""Which rank is slow, by what each does of a step before it waits for others. A straggler is named, never killed.

A rank's own part is what its meter counts as data and compute when the step's collective begins. Under DDP waiting for others is
none of that; under FSDP and ZeRO 3 the forward pass waits too, so there only a rank that waits for its data is seen.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WINDOW = 20
"""Steps whose median counts."""
LEAST_SECONDS = 0.002
"""What a rank must be slower by: less is the clock's and the scheduler's."""


class Stragglers:
    """State: of each rank, the own part of its last steps; and which ranks were slow, how much, and when."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._last: deque[Sequence[float]] = deque(maxlen=WINDOW)
        self.found: dict[int, dict[str, Any]] = {}

    def take(self, step: int, seconds: Sequence[float]) -> dict[str, float]:
        """What a step's record says: the slowest rank where it is a straggler, and how many times the middle one it takes."""
        self._last.append(seconds)
        if len(self._last) < WINDOW or len(seconds) < 2:
            return {}
        usual = [statistics.median(each) for each in zip(*self._last, strict=True)]
        middle, slowest = statistics.median_low(usual), max(range(len(usual)), key=usual.__getitem__)
        if usual[slowest] < self.factor * middle or usual[slowest] < middle + LEAST_SECONDS:
            return {}
        times = usual[slowest] / max(middle, 1e-9)
        known = self.found.setdefault(slowest, {"rank": slowest, "first_step": step, "times": 0.0})
        known.update(last_step=step, times=max(known["times"], times))
        return {"straggler": slowest, "straggler_times": times}

    def named(self, job: Path) -> list[dict[str, Any]]:
        """All of this start, with the machine that each ran on."""
        return [{**known, "host": _host(job, rank)} for rank, known in sorted(self.found.items())]


def _host(job: Path, rank: int) -> str:
    return str(json.loads((job / "ranks" / f"{rank}.json").read_bytes())["host"])
