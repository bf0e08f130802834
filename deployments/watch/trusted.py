"""Models that were served before and are signed by a key that was revoked since answer no more for the one in service.

What is served goes on being served, and an alert says so (deployments/telemetry/alert_rules.py). See docs/trust.md, "A revoked
key".
"""

from __future__ import annotations

import logging
from pathlib import Path

from tasks.registry.served import bar_rungs
from tasks.storage import open_store

EVERY_SECONDS = 30.0


class Trusted:
    """State: when it last looked."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, float("-inf")

    def tick(self, now: float) -> None:
        """Look at every endpoint, every so many seconds."""
        if 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        for one in bar_rungs(self.home, open_store(self.home)):
            logging.warning(
                "%s answers no more on endpoint/%s when its model cannot: %s", one.model, one.endpoint, one.why
            )
