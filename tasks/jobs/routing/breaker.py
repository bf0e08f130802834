"""Sends another colour's share back to the main one when it plainly fails, or when whoever moves the traffic died.

It needs no deployer: the gateway itself decides, at once, and keeps what it decided over a crash of its own. What takes a
comparison, slowness or odd answers, is for the deployer's judge (tasks/endpoints/judge.py).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from tasks import process
from tasks.endpoints.judge import too_many_errors
from tasks.jobs.routing.counts import Counts
from tasks.jobs.routing.table import Table

WINDOW_SECONDS = 60.0
ORPHAN_SECONDS = 10.0
"""Time after which a deployer that died in the middle is no longer waited for."""
log = logging.getLogger("headway.gateway")


class Breaker:
    """State: since when the deployer is seen dead; what it decided is in the table and in `trip.json`."""

    def __init__(self, folder: Path, table: Table, counts: Counts) -> None:
        self._path, self._table, self._counts = folder / "trip.json", table, counts
        self._orphan_since: float | None = None
        table.tripped = process.read_json(self._path)

    def look(self) -> None:
        """Send traffic back when a colour that is not the main one has failed too often in the last minute."""
        routes = self._table.routes
        if routes is None or self._table.lost():
            return
        for name, group in self._table.groups.items():
            if name == routes.main or not (group.colour.weight or routes.mirror):
                continue
            seen = self._counts.since(group.colour.servers[0].server, time.time() - WINDOW_SECONDS)
            failed = [sight.failed for sight in seen]
            if too_many_errors(len(failed), sum(failed), routes.max_error_share):
                self._trip(name, f"{sum(failed)} of its {len(failed)} requests of the last minute failed")

    def look_for_deployer(self) -> None:
        """Send traffic back when it is shared and nobody is left who would judge it."""
        routes = self._table.routes
        shared = routes is not None and (routes.mirror or routes.colours[routes.main].weight < 100)
        if routes is None or not shared or not routes.deployer or process.alive(routes.deployer) or self._table.lost():
            self._orphan_since = None
            return
        self._orphan_since = self._orphan_since or time.monotonic()
        if time.monotonic() - self._orphan_since >= ORPHAN_SECONDS:
            name = next((name for name in self._table.groups if name != routes.main), "")
            if name:
                self._trip(name, "whoever moved the traffic died in the middle")

    def _trip(self, colour: str, why: str) -> None:
        group = self._table.groups[colour]
        said: dict[str, Any] = {"server": group.colour.servers[0].server, "why": why, "time": time.time()}
        self._table.tripped = said
        process.write_json(self._path, said, seal=True)
        log.error("%s (%s) lost its traffic: %s", colour, group.colour.model_ref, why)
        self._table.notify()
