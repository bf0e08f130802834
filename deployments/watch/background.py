"""Work that takes longer than a turn of the watch: in a thread of its own, at the lowest priority, one piece at a time.

Reading and hashing let go of the interpreter, and the thread stands behind everything else that wants a core, so the other duties
are taken in their time. What is cut off by the end of the watch is begun anew at its next start.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

LOWEST = 19


class Background:
    """State: the piece of work that was begun last."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_stand_back)
        self._begun: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do a piece of work; nothing must be at work."""
        assert not self.busy()
        self._begun = self._pool.submit(work)

    def busy(self) -> bool:
        """Whether something is at work. Raises, once, what the last piece raised."""
        if self._begun is not None and not self._begun.done():
            return True
        ended, self._begun = self._begun, None
        if ended is not None:
            ended.result()
        return False

    def wait(self, seconds: float) -> None:
        """Let the work end. Raises what it raised, and TimeoutError when it takes longer."""
        if self._begun is not None:
            self._begun.result(seconds)


def _stand_back() -> None:
    if sys.platform == "linux":  # there, a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
