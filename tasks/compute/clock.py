"""The time that a supervisor goes by, and how it waits: handed in, so that hours of a job's life need none of a test's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """The system's."""

    now: Callable[[], float] = time.monotonic
    """Seconds; only differences mean something."""
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()
