"""Deletes what stands on Azure ML and is over: models that were kept warm for the way back, and test endpoints that expired.

What that is, tasks/serving/azureml/endpoint.py knows; an endpoint on this machine looks after itself. A deletion takes minutes,
so it is done in the background (background.py).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from deployments.watch.background import Background
from tasks.serving.known import tidy_all

EVERY_SECONDS = 60.0


class CloudEndpoints:
    """State: when it last looked."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, 0.0
        self.work = Background("cloud endpoints")

    def tick(self, now: float) -> None:
        """Delete what is over. A service that does not answer is raised: the watch says so once, and tries again."""
        if self.work.busy() or 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        self.work.start(self._tidy)

    def _tidy(self) -> None:
        for deleted in tidy_all(self.home, time.time()):
            logging.info("deleted on Azure ML: %s", deleted)
