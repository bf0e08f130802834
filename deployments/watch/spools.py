"""What MLflow missed: publishers that gave up, or died with their machine, are started again."""

from __future__ import annotations

from pathlib import Path

from tasks.common import process
from tasks.lineage.spool import start_publisher, unpublished


class Spools:
    """State: when it last looked."""

    def __init__(self, home: Path, every: float) -> None:
        self.home, self.every, self._last = home, every, 0.0

    def tick(self, now: float) -> None:
        """Start a publisher for every spool that is behind and has none. They try for minutes, so it is not often needed."""
        if now - self._last < self.every:
            return
        self._last = now
        for folder in unpublished(self.home):
            if not process.alive(process.read_json(folder / "handle.json")):
                start_publisher(folder)
