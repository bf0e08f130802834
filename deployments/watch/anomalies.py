"""The answers of every endpoint in service, looked at every few minutes, in the background (background.py).

What a window is, when it stands out, and what is said then is tasks/serving/monitor/watch.py: the flow watch and `headway watch`
look by the same, and share what is known.
"""

from __future__ import annotations

from pathlib import Path

from deployments.watch.background import Background
from tasks.serving.monitor import watch

EVERY_SECONDS = 120.0


class Anomalies:
    """State: when it last looked; what is known of each endpoint is on disk."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")
        self.work = Background("anomalies")

    def tick(self, now: float) -> None:
        """Begin to look, every few minutes. Raises what went wrong at the last look."""
        if self.work.busy() or 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        self.work.start(lambda: self.look(now))

    def look(self, now: float) -> None:
        """Look at every endpoint in service."""
        watch.look(self.home, now)
