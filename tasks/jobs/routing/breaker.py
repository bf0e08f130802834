"""Sends another colour's share back to the main one when it plainly fails, or when whoever moves the traffic died.

It needs no deployer: the gateway itself decides, at once, by the test of failures that the deployer's judge has
(tasks/serving/protocol/judge.py), and keeps what it decided over a crash of its own. What takes a comparison, slowness or odd
answers, is for the judge.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.jobs.routing.counts import Counts
from tasks.jobs.routing.table import Table
from tasks.serving.protocol.judge import SequentialTest, error_test, late

LATE_LOOK_SECONDS = 0.25
"""Between two looks for requests that hang."""
ORPHAN_SECONDS = 10.0
"""Time after which a deployer that died in the middle is no longer waited for."""
log = logging.getLogger("headway.gateway")


class Breaker:
    """State: the test of each model, since when the deployer is seen dead; what it decided is in the table and in `trip.json`."""

    def __init__(self, folder: Path, table: Table, counts: Counts) -> None:
        self._path, self._table, self._counts = folder / "trip.json", table, counts
        self._tests: dict[str, SequentialTest] = {}
        self._orphan_since: float | None = None
        self._looked = 0.0
        table.tripped = process.read_json(self._path)

    def count(self, colour: str, *, failed: bool) -> None:
        """Count a request, and send traffic back when a colour that is not the main one has failed too often."""
        routes = self._table.routes
        if routes is None or colour == routes.main or self._table.lost():
            return
        test = self._test(colour)
        if test.add(1, int(failed)) == "bad" and failed:
            self._trip(colour, f"{test.total_beyond} of its {test.total} requests failed")

    def look_for_late(self) -> None:
        """Send traffic back when too many of the requests that a colour has are late: who hangs has not failed yet."""
        routes, now = self._table.routes, time.monotonic()
        if routes is None or now - self._looked < LATE_LOOK_SECONDS or self._table.lost():
            return
        self._looked = now
        for name, group in self._table.groups.items():
            waits = self._counts.waits(group.colour.servers[0].server) if name != routes.main else []
            if not waits:
                continue
            hang, test = self._late(waits), self._test(name)
            if hang and test.is_bad(more=hang):
                self._trip(name, f"{test.total_beyond} of its {test.total} requests failed, {hang} under way are late")

    def is_late(self, colour: str, seconds: float) -> bool:
        """Whether a request to a colour that is not the main one has waited too long, by what callers wait for the main one."""
        return self._table.routes is not None and colour != self._table.routes.main and bool(self._late([seconds]))

    def _late(self, waits: Iterable[float]) -> int:
        routes = self._table.routes
        assert routes is not None
        longest, requests = self._counts.longest_wait(routes.colours[routes.main].servers[0].server)
        return late(waits, longest=longest, requests=requests)

    def _test(self, colour: str) -> SequentialTest:
        """Of the model that has the colour now; one with other limits begins anew."""
        routes = self._table.routes
        assert routes is not None
        server = self._table.groups[colour].colour.servers[0].server
        test = self._tests.get(server)
        if test is None or test.share != routes.max_error_share:
            self._tests = {server: error_test(routes.max_error_share)}
        return self._tests[server]

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
        output: dict[str, Any] = {"server": group.colour.servers[0].server, "why": why, "time": time.time()}
        self._table.tripped = output
        process.write_json(self._path, output, seal=True)
        log.error("%s (%s) lost its traffic: %s", colour, group.colour.model_ref, why)
        self._table.notify()
