"""Program `tasks.jobs.gateway`: holds an endpoint's public port for good, and hands requests to the servers behind it.

The folder named by HEADWAY_GATEWAY holds `gateway.json` {"routes", "servers", "limits", "access", "keys", "secret"}: where
routes.json (tasks/serving/protocol/routes.py) and the servers' folders lie, what is asked of callers, and what servers are
shown. Both files are looked at 20 times a second and followed without losing a request. It writes `control.json` {"port",
"token", "pid", "secret"}. When it crashes, its parent (tasks/common/process.py) starts it again, and it goes on
with the same files. It is put together in routing/gateway.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import struct
import sys
from pathlib import Path

from tasks.common import process

LOOPBACK = "127.0.0.1"
BACKLOG = 1024
SO_ATTACH_REUSEPORT_CBPF = 51


class Listeners:
    """Opens listening sockets. State: those that were opened before anybody asked for them."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str, int], socket.socket] = {}

    def open_early(self, folder: Path) -> None:
        """Listen where the gateway before this one did: callers wait a moment, and are not refused, while this one loads."""
        payload = process.read_json(folder / "gateway.json") or {}
        routes = process.read_json(Path(payload["routes"])) if "routes" in payload else None
        host = (payload.get("access") or {}).get("host", LOOPBACK)
        if routes and host == LOOPBACK:  # another address is guarded first
            try:
                self._ready[host, int(routes["port"])] = self._listen(host, int(routes["port"]))
            except OSError:
                return  # it is said when the gateway tries it

    def __call__(self, host: str, port: int) -> socket.socket:
        """The socket of an address; port 0 is any free one, and shared with nobody. Raises OSError."""
        return self._ready.pop((host, port), None) or self._listen(host, port)

    def _listen(self, host: str, port: int) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        if port and sys.platform == "linux":
            # Have the kernel give new connections to the second socket of the port's group, or to the first if it is
            # alone.
            instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))
            program = struct.pack("@HP", 1, ctypes.addressof(instruction))
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)
        return listener


def main(folder: Path) -> None:
    """Run the gateway of a folder. What takes long to load is loaded once the port is open."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    listeners = Listeners()
    listeners.open_early(folder)
    from tasks.jobs.routing.gateway import Gateway

    asyncio.run(Gateway(folder, listeners).run())


if __name__ == "__main__":
    main(Path(os.environ["HEADWAY_GATEWAY"]))
