"""How long a test waits. Limits are written for a quiet machine, and stretched by how slow this one is and how busy it is now."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

SLOWER = "TESTS_SLOWER"
"""By what the machine is slower than the one that the limits were written on, which is measured once a run."""
REFERENCE_SECONDS = 0.03
"""What `measure` took there."""
MOST = 10.0
"""A machine that is slower still has stopped."""


def measure() -> float:
    """The factor of this machine, at least 1: the quickest of three times that the same work takes."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        for number in range(40_000):
            hashlib.sha256(b"%d" % number).hexdigest()
        taken.append(time.perf_counter() - began)
    return min(max(min(taken) / REFERENCE_SECONDS, 1.0), MOST)


def limit(seconds: float) -> float:
    """So many seconds of a quiet machine here and now, where others may want the processors too."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return seconds * min(float(os.environ.get(SLOWER, "1")) * max(busy, 1.0), MOST)


def until(condition: Callable[[], Any], timeout: float = 150.0, *, every: float = 0.02, why: Any = "") -> Any:
    """Ask until the answer is true, and return it. `why` is said, or called and said, when it is not in time."""
    began = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - began > limit(timeout):
            raise AssertionError(f"not within {limit(timeout):g} s. {why() if callable(why) else why}")
        time.sleep(every)
    return found
