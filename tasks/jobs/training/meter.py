"""Where a step's time goes: waiting for data, computing, communicating, standing still. One clock a rank.

A step lasts from the end of the one before to its own, so every second of training is in one step. What is made of it (tokens/s,
TFLOP/s, MFU) is metrics_logger.py; what is made of all steps of a run is tasks/planning/spent.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Part = Literal["data", "compute", "communication", "checkpoint", "heldout", "profile", "rollback"]
STANDSTILL: tuple[Part, ...] = ("checkpoint", "heldout", "profile", "rollback")
"""Parts in which a rank does nothing for the step itself: a step's speed is without them."""


@dataclass(frozen=True)
class Step:
    """What a step took, in seconds."""

    all: float
    parts: Mapping[Part, float]

    @property
    def own(self) -> float:
        """Without standing still."""
        return self.all - sum(self.parts.get(part, 0.0) for part in STANDSTILL)


class Meter:
    """Seconds of the step that is under way, by part; what is in no part is the rest. A part inside another is taken from it."""

    def __init__(self) -> None:
        self.began = self._since = time.monotonic()
        self.seconds: dict[Part, float] = {}
        self._parts: list[Part] = []
        self._turned: torch.cuda.Event | None = None

    def start(self) -> None:
        """A new step begins; no part may be open."""
        self.end()

    def end(self) -> Step:
        """The step is over: what it took. The next one begins at the same moment."""
        now = time.monotonic()
        done = Step(now - self.began, self.seconds)
        self.began, self._since, self.seconds = now, now, {}
        return done

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What happens inside is part of this."""
        self._charge()
        self._parts.append(name)
        try:
            yield
        finally:
            self._charge()
            self._parts.pop()
            if self._turned is not None:
                ended = torch.cuda.Event(enable_timing=True)
                ended.record()
                ended.synchronize()
                moved = min(float(self._turned.elapsed_time(ended)) / 1000, self.seconds[name])
                self._turned = None
                self._add(name, -moved)
                self._add("communication", moved)

    def turn(self, name: Part) -> None:
        """From here on, what is left of the open part is this one: called when the last gradients are ready (a hook of DDP).

        On a GPU nothing is done yet when this is called, so the moment is an event of the GPU, which the part's end waits for.
        """
        if torch.cuda.is_initialized():
            self._turned = torch.cuda.Event(enable_timing=True)
            self._turned.record()
            return
        self._charge()
        self._parts[-1] = name

    def _charge(self) -> None:
        now = time.monotonic()
        if self._parts:
            self._add(self._parts[-1], now - self._since)
        self._since = now

    def _add(self, name: Part, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
