"""Where a step's time goes: waiting for data, computing, communicating, standing still for a checkpoint. One clock a rank.

What is made of it (tokens/s, TFLOPs, MFU) is told by tasks/jobs/train.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

Part = Literal["data", "compute", "communication", "checkpoint"]


@dataclass
class Meter:
    """Seconds of the step that is under way, by part; what is in no part is the rest."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[Part, float] = field(default_factory=dict)

    def start(self) -> None:
        """A new step begins."""
        self.began, self.seconds = time.monotonic(), {}

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """What happens inside is part of this."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    @property
    def step_seconds(self) -> float:
        """Since the step began."""
        return time.monotonic() - self.began
