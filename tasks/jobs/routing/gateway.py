"""The gateway as a whole: it follows its two files, and listens where they say. Program: tasks/jobs/gateway.py.

Handing requests on is proxy.py, who gets them table.py; what is asked of callers, tasks/jobs/serving/api_middleware.py.

How many servers of a colour there are: more while requests wait, fewer when idle, none where that is allowed.

Every server is a supervised process of its own (tasks/common/process.py) in `servers/ID/`, so it outlives a gateway that
crashed, which finds it there again: a replica's serve.json names the server that it is a copy of. The deployer stops what it
started, with all copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import uvicorn

from tasks.common import process
from tasks.common.http_server import impatient
from tasks.config.access import AccessConfig
from tasks.config.serving import LimitsConfig
from tasks.jobs.routing.counts import Counts, Exposition, exposed
from tasks.jobs.routing.proxy import Breaker, Message, Proxy, Receive, Send, say
from tasks.jobs.routing.table import Group, Health, Replica, Table
from tasks.jobs.routing.upstream import HOST, Unreachable, Upstream, fetch
from tasks.jobs.serving.api_middleware import Edge
from tasks.jobs.serving.keys import require_guarded
from tasks.serving.protocol.routes import TRAFFIC, WANTED, read_routes, read_secret

PERIOD_SECONDS = 0.25
STOP_SECONDS = 30.0


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
            first = {place.server for place in group.colour.servers}
            extra = next((one for one in reversed(existing) if one.server not in first), None)
            self._spawn(name, self._remove(group, extra) if extra else self._sleep(group))

    def _upstream(self, port: Any) -> Upstream:
        return Upstream(int(port), self._table.secret)

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
        deadline = time.monotonic() + STOP_SECONDS
        while replica.inflight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        log.warning("%s: server %s is stopped: nobody needs it", replica.colour, replica.server)
        await asyncio.to_thread(process.stop, self._servers / replica.server)
        replica.upstream.close()


def _runs(folder: Path) -> bool:
    return process.alive(process.read_json(folder / "handle.json"))


# The gateway's private port: what the deployer asks it, on loopback, with the token of `control.json`. Callers never
# come here.
#
# `GET /state`: what holds. `GET /observed?SERVER=SECONDS`: what was seen of the model that was deployed with a server,
# since then. `GET /metrics`: the same for Prometheus.


class Control:
    """State: none of its own. `problem` is why the newest routes or settings are not followed."""

    def __init__(self, token: str, table: Table, counts: Counts) -> None:
        self._token, self._table, self._counts = token.encode(), table, counts
        self.problem = ""
        self.listening: int | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        payload = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(payload, b"Bearer " + self._token):
            await say(send, 401, {"error": "the token is in control.json"})
        elif scope["path"] == "/state":
            await say(send, 200, self.state())
        elif scope["path"] == "/observed":
            asked = parse_qsl(scope["query_string"].decode())
            await say(send, 200, {server: self._counts.seen(server, float(since)) for server, since in asked})
        elif scope["path"] == "/metrics":
            body = self.metrics()
            head = [(b"content-type", b"text/plain; version=0.0.4"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": body})
        else:
            await say(send, 404, {"error": "there is /state, /observed and /metrics"})

    def state(self) -> dict[str, Any]:
        """What the gateway does now."""
        table, routes = self._table, self._table.routes
        return {
            "pid": os.getpid(),
            "applied": routes.number if routes else None,
            "port": self.listening,
            "problem": self.problem,
            "weights": table.weights() if routes else {},
            "tripped": table.tripped if table.lost() else None,
            "waiting": table.waiting,
            "colours": {
                name: {
                    "asleep": group.asleep,
                    "totals": vars(self._counts.totals[name]) if name in self._counts.totals else {},
                    "servers": [
                        {"server": one.server, "port": one.port, "health": one.health, "inflight": one.inflight}
                        for one in group.replicas
                    ],
                }
                for name, group in table.groups.items()
            },
        }

    def metrics(self) -> bytes:
        """Prometheus' text format 0.0.4."""
        lines: dict[str, list[str]] = {}
        weights = self._table.weights() if self._table.routes else {}
        for name, group in self._table.groups.items():
            lines.setdefault("weight", []).append(f'{{colour="{name}"}} {weights[name]}')
            ready = sum(one.health == "ready" for one in group.replicas)
            lines.setdefault("servers_ready", []).append(f'{{colour="{name}"}} {ready}')
            inflight = sum(one.inflight for one in group.replicas)
            lines.setdefault("requests_under_way", []).append(f'{{colour="{name}"}} {inflight}')
        for name, totals in self._counts.totals.items():
            for what, value in vars(totals).items():
                lines.setdefault(f"{what}_total", []).append(f'{{colour="{name}"}} {value}')
        text = ""
        for what, rows in lines.items():
            kind = "counter" if what.endswith("_total") else "gauge"
            text += f"# TYPE headway_gateway_{what} {kind}\n" + "".join(
                f"headway_gateway_{what}{row}\n" for row in rows
            )
        return text.encode()


# Asks every server whether it is ready, again and again: one that does not answer gets no requests until it does.
#
# What a request itself meets counts at once (table.py, `lost_sight`). Starting and stopping servers is `Scaler`.


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
                existing = {one for group in self._table.groups.values() for one in group.replicas}
                for replica in existing - self._tasks.keys():
                    self._tasks[replica] = asyncio.create_task(self._follow(replica))
                for replica in self._tasks.keys() - existing:
                    self._tasks.pop(replica).cancel()
                await asyncio.sleep(0.05)
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _follow(self, replica: Replica) -> None:
        late = 0
        while True:
            result = await look(replica, wanted=self._table.waiting > 0)
            late = late + 1 if result is None else 0
            health: Health = replica.health if result is None and late < TRIES else result or "down"
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
        output = json.loads(body)
    except Unreachable as error:
        return None if error.late else "down"
    except ValueError:
        return "live"
    if not isinstance(output, dict):
        return "live"
    if status == HTTPStatus.OK and output.get("ready"):
        return "ready"
    if output.get("answers", True):  # a server of a release before this one does not say so: it is asked
        return "live"
    return "loading" if output.get("loading") else "mute"


POLL_SECONDS = 0.05
DRAIN_SECONDS = 15
log = logging.getLogger("headway.gateway")


class Settings:
    """gateway.json."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.routes, self.servers = Path(settings["routes"]), Path(settings["servers"])
        self.limits = LimitsConfig.model_validate(settings.get("limits") or {})
        self.access = AccessConfig.model_validate(settings.get("access") or {})
        self.keys = Path(settings["keys"]) if settings.get("keys") else None
        self.secret = read_secret(settings.get("secret"))


class _Server(uvicorn.Server):
    """A listener of this process; signals are handled once, in `Gateway.run`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """State: the routes that it follows, the application before them, and where it listens."""

    def __init__(self, folder: Path, listen: Callable[[str, int], socket.socket]) -> None:
        """`listen` gives the listening socket of an address; the first one may be open already."""
        self.folder, self._open = folder, listen
        self.settings = Settings(process.read_json(folder / "gateway.json"))
        self.table, self.counts = Table(self.settings.secret), Counts()
        self.breaker = Breaker(folder, self.table, self.counts)
        self.scaler = Scaler(self.settings.servers, self.table)
        self.watch = Watch(self.settings.servers, self.table)
        self.control = Control(secrets.token_urlsafe(32), self.table, self.counts)
        self._figures = Exposition(self.table)
        self._edge = self._front()
        self._public: tuple[tuple[str, int], _Server] | None = None
        self._marks: dict[Path, int] = {}
        self._group: asyncio.TaskGroup | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, by the settings of this moment."""
        await self._edge(scope, receive, send)

    async def run(self) -> None:
        """Serve until SIGTERM; then requests under way are finished."""
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        async with asyncio.TaskGroup() as group:
            self._group = group
            private = self._listen(self.control, HOST, 0)
            self._follow()
            self.scaler.adopt()
            work = [group.create_task(one) for one in (self.watch.run(), self.scaler.run(), self._keep_up())]
            port = private[1]
            payload = {"port": port, "token": self.control._token.decode(), "pid": os.getpid(), "secret": True}
            process.write_json(self.folder / "control.json", payload, seal=True)
            await stopping.wait()
            self._edge.draining = True
            for one in work:
                one.cancel()
            for server in (private[0], *([self._public[1]] if self._public else [])):
                server.should_exit = True

    async def _keep_up(self) -> None:
        """Follow both files, and look whether the deployer lives and requests hang."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self._follow()
            self.breaker.look_for_deployer()
            self.breaker.look_for_late()

    def _follow(self) -> None:
        """What cannot be followed is told, and what held before holds."""
        try:
            if self._changed(self.folder / "gateway.json"):
                self.settings = Settings(process.read_json(self.folder / "gateway.json"))
                self.table.secret = self.settings.secret
                self._edge = self._front()
            if self._changed(self.settings.routes) and (routes := read_routes(self.settings.routes)):
                self.table.apply(routes)
                self.counts.keep_only(place.server for colour in routes.colours.values() for place in colour.servers)
            self._listen_where_wanted()
            self.control.problem = ""
        except (ValueError, OSError) as error:
            if self.control.problem != str(error):
                log.error("%s", error)
            self.control.problem = str(error)

    def _changed(self, path: Path) -> bool:
        try:
            mark = path.stat()
        except FileNotFoundError:
            return False
        seen = hash((mark.st_mtime_ns, mark.st_ino))
        changed = self._marks.get(path) != seen
        self._marks[path] = seen
        return changed

    def _front(self) -> Edge:
        limits = self.settings.limits
        proxy = Proxy(self.table, self.counts, self.breaker, limits=limits)
        app, asks = exposed(proxy, self._figures), self.settings
        return Edge(app, limits=limits, access=asks.access, keys_file=asks.keys, model=self._model)

    def _model(self) -> str:
        routes = self.table.routes
        return routes.colours[routes.main].model_ref if routes else ""

    def _listen_where_wanted(self) -> None:
        """On another port or address than before: first there, then no longer here."""
        routes = self.table.routes
        wanted = (self.settings.access.host, routes.port) if routes else None
        if wanted is None or (self._public and self._public[0] == wanted):
            return
        require_guarded(self.settings.access, self.settings.keys)
        server, _ = self._listen(self, *wanted)
        if self._public:
            self._public[1].should_exit = True
        self._public = (wanted, server)
        self.control.listening = wanted[1]
        log.warning("listening on %s:%s", *wanted)

    def _listen(self, app: Any, host: str, port: int) -> tuple[_Server, int]:
        limits = self.settings.limits
        listener = self._open(host, port)
        config = uvicorn.Config(
            app,
            http=impatient(read_seconds=limits.read_seconds, connections=limits.connections),
            lifespan="off",
            access_log=False,
            log_level="warning",
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        server = _Server(config)
        assert self._group is not None
        self._group.create_task(server.serve(sockets=[listener]))
        return server, int(listener.getsockname()[1])
