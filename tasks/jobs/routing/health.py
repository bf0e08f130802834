"""Asks every server whether it is ready, again and again: one that does not answer gets no requests until it does.

What a request itself meets counts at once (table.py, `lost_sight`). Starting and stopping servers is scaling.py.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from tasks.common import process
from tasks.jobs.routing.table import Health, Replica, Table
from tasks.jobs.routing.upstream import Unreachable, fetch
from tasks.serving.protocol.routes import TRAFFIC, WANTED

PERIODS: dict[Health, float] = {"ready": 1.0, "live": 0.25, "loading": 0.1, "mute": 0.25, "down": 0.1, "gone": 0.25}
"""Seconds between two looks."""
TIMEOUT_SECONDS = 3.0
TRIES = 3
"""Looks in a row that got no answer in time before a busy server counts as down; a refused connection counts at once."""


class Watch:
    """State: one task a server."""

    def __init__(self, servers: Path, table: Table) -> None:
        self._servers, self._table = servers, table
        self._tasks: dict[Replica, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look after all servers of the table, until this is cancelled."""
        try:
            while True:
                there = {one for group in self._table.groups.values() for one in group.replicas}
                for replica in there - self._tasks.keys():
                    self._tasks[replica] = asyncio.create_task(self._follow(replica))
                for replica in self._tasks.keys() - there:
                    self._tasks.pop(replica).cancel()
                await asyncio.sleep(0.05)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _follow(self, replica: Replica) -> None:
        late = 0
        while True:
            found = await look(replica, wanted=self._table.waiting > 0)
            late = late + 1 if found is None else 0
            health: Health = replica.health if found is None and late < TRIES else found or "down"
            if health == "down" and not process.alive(
                process.read_json(self._servers / replica.server / "handle.json")
            ):
                health = "gone"
            if health != replica.health:
                replica.health = health
                self._table.notify()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIODS[health]):
                    while replica.health == health:  # a request that met another state has it looked at again
                        await self._table.changed.wait()


async def look(replica: Replica, *, wanted: bool) -> Health | None:
    """What a server says of itself; None: nothing, in the time that it had. `wanted`: requests wait for some server."""
    headers = [(TRAFFIC.encode(), WANTED.encode())] if wanted else []
    try:
        status, body = await fetch(replica.upstream, b"/readyz", timeout=TIMEOUT_SECONDS, headers=headers)
        said = json.loads(body)
    except Unreachable as error:
        return None if error.late else "down"
    except ValueError:
        return "live"
    if not isinstance(said, dict):
        return "live"
    if status == HTTPStatus.OK and said.get("ready"):
        return "ready"
    if said.get("answers", True):  # a server of a release before this one does not say so: it is asked
        return "live"
    return "loading" if said.get("loading") else "mute"
