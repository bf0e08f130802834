"""How many servers of a colour there are: more while requests wait, fewer when idle, none where that is allowed.

Every server is a supervised process of its own (tasks/common/process.py) in `servers/ID/`, so it outlives a gateway that
crashed, which finds it there again: a replica's serve.json names the server that it is a copy of. The deployer stops what it
started, with all copies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.jobs.routing.table import Group, Replica, Table
from tasks.jobs.routing.upstream import HOST, Upstream

PERIOD_SECONDS = 0.25
DRAIN_SECONDS = 30.0
log = logging.getLogger("headway.gateway")


class Scaler:
    """State: what is being started or stopped right now."""

    def __init__(self, servers: Path, table: Table) -> None:
        self._servers, self._table = servers, table
        self._busy: set[str] = set()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Look after the number of servers, until this is cancelled."""
        while True:
            for name, group in list(self._table.groups.items()):
                if name not in self._busy:
                    self._decide(name, group)
            await asyncio.sleep(PERIOD_SECONDS)

    def adopt(self) -> None:
        """Take over what a gateway before this one started, and see what sleeps. Needs routes."""
        for path in sorted(self._servers.glob("*/serve.json")):
            payload = process.read_json(path) or {}
            for name, group in self._table.groups.items():
                known = {one.server for one in group.replicas}
                of_this = payload.get("replica_of") in {place.server for place in group.colour.servers}
                if of_this and path.parent.name not in known and _runs(path.parent):
                    group.replicas.append(Replica(path.parent.name, name, self._upstream(payload["port"]), "live"))
        for group in self._table.groups.values():
            least = int(group.colour.replicas.get("least", 1))
            group.asleep = not least and not any(_runs(self._servers / one.server) for one in group.replicas)
            for replica in group.replicas if group.asleep else ():
                replica.health = "gone"

    def wanted(self, name: str, group: Group, now: float) -> int:
        """Servers that a colour needs now; one without a share keeps its first until its time is over."""
        weight, settings = self._table.weights()[name], group.colour.replicas
        routes = self._table.routes
        assert routes is not None
        if not weight and name != routes.main:
            return 0 if group.colour.until is not None and time.time() >= group.colour.until else 1
        inflight = sum(one.inflight for one in group.replicas)
        if inflight or group.waiting or group.arrived:
            group.asked, group.arrived = now, 0
        least = max(math.ceil(int(settings.get("least", 1)) * weight / 100), int(settings.get("least", 1) > 0))
        need = min(max(math.ceil(inflight / int(settings.get("queue", 8))), least), int(settings.get("most", 1)))
        if not least and now - group.asked < float(settings.get("idle_seconds", math.inf)):
            need = max(need, 0 if group.asleep else 1)
        return max(need, int(group.waiting > 0))

    def _decide(self, name: str, group: Group) -> None:
        now = time.monotonic()
        existing = [one for one in group.replicas if not one.leaving]
        count = 0 if group.asleep else len(existing)
        need = self.wanted(name, group, now)
        if need >= count:
            group.busy = now
        idle = float(group.colour.replicas.get("idle_seconds", 0.0)) if self._table.weights()[name] else 0.0
        if need > count:
            self._spawn(name, self._wake(group) if group.asleep else self._add(name, group))
        elif need < count and now - group.busy >= (idle if need else 0.0):
            extra = next((one for one in reversed(existing) if not self._is_first(group, one)), None)
            self._spawn(name, self._remove(group, extra) if extra else self._sleep(group))

    def _upstream(self, port: Any) -> Upstream:
        return Upstream(int(port), self._table.secret)

    def _is_first(self, group: Group, replica: Replica) -> bool:
        return any(place.server == replica.server for place in group.colour.servers)

    def _spawn(self, name: str, work: Any) -> None:
        """One change of a colour at a time: so servers are started, and stopped, one after the other."""
        self._busy.add(name)
        task = asyncio.create_task(self._doing(name, work))
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _doing(self, name: str, work: Any) -> None:
        try:
            await work
        except (OSError, RuntimeError, TypeError) as error:
            log.error("%s: the number of servers could not be changed: %s", name, error)
            await asyncio.sleep(5.0)
        finally:
            self._busy.discard(name)
            self._table.notify()

    async def _add(self, name: str, group: Group) -> None:
        """A copy of the first server; returns once it is ready, or is over."""
        first = self._servers / group.colour.servers[0].server
        folder = self._servers / uuid.uuid4().hex[:8]
        payload, spec = process.read_json(first / "serve.json"), process.read_json(first / "process.json")
        with socket.socket() as holder:  # bound, not listening: nobody else is given the port meanwhile
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind((HOST, 0))
            port = int(holder.getsockname()[1])
            process.write_json(folder / "serve.json", {**payload, "port": port, "replica_of": first.name}, seal=True)
            spec["env"] = {key: str(folder) if value == str(first) else value for key, value in spec["env"].items()}
            await asyncio.to_thread(process.start, folder, process.ProcessSpec(**spec))
            replica = Replica(folder.name, name, self._upstream(port))
            group.replicas.append(replica)
            log.warning("%s: server %s is started beside %s others", name, folder.name, len(group.replicas) - 1)
            while replica.health not in ("ready", "gone") and self._table.groups.get(name) is group:
                await asyncio.sleep(0.05)
        if self._table.groups.get(name) is not group:  # another model is served by now
            await asyncio.to_thread(process.stop, folder)
        elif replica.health == "gone":
            group.replicas.remove(replica)
            raise RuntimeError(f"server {folder.name} did not start: see {folder}")

    async def _wake(self, group: Group) -> None:
        for place in group.colour.servers:
            folder = self._servers / place.server
            spec = process.ProcessSpec(**process.read_json(folder / "process.json"))
            await asyncio.to_thread(process.start, folder, spec)
        for replica in group.replicas:
            replica.leaving, replica.health = False, "down"
        group.woken = group.asked = time.monotonic()
        group.asleep = False

    async def _remove(self, group: Group, replica: Replica) -> None:
        await self._stop(replica)
        if replica in group.replicas:
            group.replicas.remove(replica)
        await asyncio.to_thread(shutil.rmtree, self._servers / replica.server, ignore_errors=True)

    async def _sleep(self, group: Group) -> None:
        for replica in list(group.replicas):
            await self._stop(replica)
        group.asleep = True

    async def _stop(self, replica: Replica) -> None:
        """No new requests; those under way are finished first."""
        replica.leaving = True
        deadline = time.monotonic() + DRAIN_SECONDS
        while replica.inflight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        log.warning("%s: server %s is stopped: nobody needs it", replica.colour, replica.server)
        await asyncio.to_thread(process.stop, self._servers / replica.server)
        replica.upstream.close()


def _runs(folder: Path) -> bool:
    return process.alive(process.read_json(folder / "handle.json"))
