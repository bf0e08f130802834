"""A whole server: the model, the edge, and the listeners, from its settings to its end. Program: tasks/jobs/serve.py.

Standing alone, as in its container, it is its own edge. Else its port is private, on loopback; once its folder also holds
`public.json` {"port"}, and the model is ready, it listens there too, behind the edge, beside its predecessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from tasks import listening
from tasks.access_config import LOOPBACK
from tasks.errors import IntegrityError
from tasks.jobs.outputs import Outputs
from tasks.jobs.serving import traces
from tasks.jobs.serving.api import make_api
from tasks.jobs.serving.edge import Edge
from tasks.jobs.serving.keys import require_guarded
from tasks.jobs.serving.ladder import Ladder
from tasks.jobs.serving.metrics import Counted, Metrics
from tasks.jobs.serving.service import Service
from tasks.jobs.serving.settings import ServeSettings, read_settings
from tasks.process import read_json

HOST = "127.0.0.1"
POLL_SECONDS = 0.1
HANDOVER_SECONDS = 0.3
CLOSE_SECONDS = 2
REFUSED_SECONDS = 2.0
"""Time for which /readyz says why the server ends."""
SO_ATTACH_REUSEPORT_CBPF = 51
log = logging.getLogger("headway.serve")


class _Server(uvicorn.Server):
    """A listener of this process; signals are handled once, in `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Program:
    """The server as a whole. State: the model, the edge, and the listeners."""

    def __init__(self, folder: Path, *, collector: str = "") -> None:
        """`collector`: where traces are sent. Raises ValueError for an address that others reach and nobody guards."""
        self.folder, self.settings = folder, read_settings(folder)
        if self.settings.alone:
            require_guarded(self.settings.access, self.settings.keys)
        metrics = Metrics()
        self.outputs = Outputs(self.settings.outputs, folder.name, self.settings.answers)
        self.service = _service(self.settings, folder.name, self.outputs, metrics)
        self._provider = traces.provider(collector, server=folder.name)
        api: ASGIApp = Counted(make_api(self.service), metrics)
        self._api = traces.Traced(api, self._provider) if self._provider else api
        self.edge = _edge(self._api, self.settings, metrics)
        self._servers: list[_Server] = []

    async def run(self) -> None:
        """Serve until SIGTERM; then requests under way are finished. Raises when the model cannot be loaded."""
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            async with asyncio.TaskGroup() as group:
                self._listen_first(group)
                opening = group.create_task(self._open(group))
                await stopping.wait()
                opening.cancel()
                await self._drain()
        finally:
            await self.service.ladder.close()
            self.outputs.close()
            if self._provider:
                self._provider.shutdown()

    def _listen_first(self, group: asyncio.TaskGroup) -> None:
        settings = self.settings
        if settings.alone:
            self._serve(group, self.edge, listening.listen(settings.access.host, settings.port), kept=True)
            return
        # A page on the web could have its own name resolve to loopback; its requests carry that name.
        private = TrustedHostMiddleware(self._api, allowed_hosts=[*LOOPBACK, "[::1]"])
        self._serve(group, private, listening.listen(HOST, settings.port, shared=True), kept=True)

    async def _open(self, group: asyncio.TaskGroup) -> None:
        """Load the model, and let requests in."""
        try:
            await self.service.ladder.start()
        except IntegrityError:
            await asyncio.sleep(REFUSED_SECONDS)
            raise
        self.outputs.counting = True
        if self.settings.alone:
            return
        while not (self.service.ladder.ready and (public := read_json(self.folder / "public.json"))):
            await asyncio.sleep(POLL_SECONDS)
        port = int(public["port"])
        listener = listening.listen(HOST, port, shared=True)
        _take_all_connections(listener)
        self._serve(group, self.edge, listener, kept=False)
        log.warning("listening on %s:%s for %s", HOST, port, self.settings.model_ref)

    def _serve(self, group: asyncio.TaskGroup, app: ASGIApp, listener: socket.socket, *, kept: bool) -> None:
        """Listen on one more port. Where another server may take it over, no connection is kept: it would end with this one."""
        limits = self.settings.limits
        config = uvicorn.Config(
            app,
            http=listening.impatient(head_seconds=limits.read_seconds, connections=limits.connections),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="error",
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=CLOSE_SECONDS if self.settings.alone else int(limits.drain_seconds),
            headers=[] if kept else [("Connection", "close")],
        )
        server = _Server(config)
        self._servers.append(server)
        group.create_task(server.serve(sockets=[listener]))

    async def _drain(self) -> None:
        """Finish what is under way. Alone, what comes meanwhile is told 503; else the next server has the port already."""
        if self.settings.alone:
            self.edge.draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.limits.drain_seconds):
                    while self.edge.under_way:
                        await asyncio.sleep(POLL_SECONDS / 2)
        # What connected before another server took the port is still accepted and answered.
        await asyncio.sleep(HANDOVER_SECONDS)
        for server in self._servers:
            server.should_exit = True


def _service(settings: ServeSettings, server: str, outputs: Outputs, metrics: Metrics) -> Service:
    ladder = Ladder(settings.rungs(), threads=settings.threads, hang_seconds=settings.hang_seconds)
    return Service(
        ladder,
        model_ref=settings.model_ref,
        server=server,
        outputs=outputs,
        metrics=metrics,
        limits=settings.limits,
    )


def _edge(api: ASGIApp, settings: ServeSettings, metrics: Metrics) -> Edge:
    return Edge(
        api,
        limits=settings.limits,
        access=settings.access,
        keys_file=settings.keys,
        metrics=metrics,
        model=lambda: settings.model_ref,
    )


def _take_all_connections(listener: socket.socket) -> None:
    """Have the kernel give new connections to the second socket of the port's group, or to the first if it is alone.

    So the old server's queue runs dry before it closes: connections that wait on a closed listener are reset. The
    program is `return 1`; an index out of range leaves the choice to the kernel (net/core/sock_reuseport.c).
    """
    if sys.platform != "linux":
        return
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)
