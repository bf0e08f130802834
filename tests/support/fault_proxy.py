"""A proxy before a blob service that does what networks and services do: cut, stall, flip a byte, 503, 429, 403.

A fault is armed for the n-th request that fits it, and for as many after it as it says. Unarmed, it passes everything on.
"""

import socket
import threading
import time
from dataclasses import dataclass, replace
from typing import Literal

from azurite import Endpoint
from blob_relay import Handler, Relay, Request, Response, problem

Kind = Literal["cut", "stall", "flip", "busy", "throttled", "expired", "archived"]
Direction = Literal["up", "down"]
ANSWERS = {
    "busy": problem(503, "ServerBusy", "The server is currently unable to receive requests."),
    "throttled": problem(429, "TooManyRequests", "Too many requests.", **{"Retry-After": "1"}),
    "expired": problem(403, "AuthenticationFailed", "Signed expiry time has passed: the token is no longer valid."),
    "archived": problem(409, "BlobArchived", "This operation is not permitted on an archived blob."),
}


@dataclass
class Fault:
    """What to do to which requests."""

    kind: Kind
    direction: Direction = "down"
    """Up: on the way to the service, which does not see the request whole. Down: the service did it, the answer suffers."""
    method: str = ""
    contains: str = ""
    """A part of the target."""
    nth: int = 1
    times: int = 1
    seen: int = 0
    fired: int = 0
    hit: tuple[str, str, str] | None = None
    """Method, target and range of the request that it did it to first."""
    began: float = 0.0
    again: float = float("inf")
    """Seconds from then until the client asked the same again."""

    def takes(self, request: Request) -> bool:
        if self.method not in ("", request.method) or self.contains not in request.target:
            return False
        self.seen += 1
        fires = self.nth <= self.seen < self.nth + self.times
        self.fired += fires
        if fires and not self.hit:
            self.hit, self.began = identity(request), time.monotonic()
        return fires

    def notice(self, request: Request) -> None:
        """Whether the client mends it by asking again, and when."""
        if self.hit == identity(request) and self.again == float("inf"):
            self.again = time.monotonic() - self.began


def identity(request: Request) -> tuple[str, str, str]:
    return request.method, request.target, request.header("x-ms-range")


class FaultProxy(Relay):
    """The proxy."""

    def __init__(self, behind: Endpoint) -> None:
        super().__init__(behind)
        self.faults: list[Fault] = []
        self.every = 0
        """Of so many requests one is hit, by a cut and by a 503 in turn; 0: none."""
        self._count = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def arm(self, kind: Kind, direction: Direction = "down", **which: str | int) -> Fault:
        """Do it to the first request that fits, or as `nth`, `times`, `method` and `contains` say. `fired` counts."""
        fault = Fault(kind, direction, **which)
        self.faults = [fault]
        return fault

    def disarm(self) -> None:
        self.faults = []

    def serve(self, handler: Handler) -> None:
        head = Request(handler.command, handler.path, tuple(handler.headers.items()))
        with self._lock:
            for each in self.faults:
                each.notice(head)
            fault = next((fault for fault in self.faults if fault.takes(head)), None) or self._sprinkled()
        if fault and fault.direction == "up" and fault.kind in ("cut", "stall"):
            handler.rfile.read(int(head.header("content-length") or 0) // 2)
            self.note(head)
            self._break(handler, fault)
            return
        request = handler.read_request()
        self.note(request)
        if fault and fault.kind == "flip" and fault.direction == "up":
            request = replace(request, body=flipped(request.body))
        if fault and fault.kind in ANSWERS:
            handler.write(ANSWERS[fault.kind])
            return
        self._deliver(handler, self.answer(request), fault)

    def _sprinkled(self) -> Fault | None:
        self._count += 1
        if not self.every or self._count % self.every:
            return None
        return Fault("cut" if self._count // self.every % 2 else "busy")

    def _deliver(self, handler: Handler, response: Response, fault: Fault | None) -> None:
        if fault is None or fault.direction == "up":
            handler.write(response)
        elif fault.kind == "flip":
            handler.write(replace(response, body=flipped(response.body)))
        elif response.body:
            handler.write(response, only=len(response.body) // 2)
            self._break(handler, fault)
        else:
            self._break(handler, fault)

    def _break(self, handler: Handler, fault: Fault) -> None:
        """Hang up, or hold the connection and say nothing more for as long as the client waits."""
        handler.close_connection = True
        if fault.kind == "stall":
            while not self._closing.is_set() and not hung_up(handler.connection):
                time.sleep(0.05)

    def shutdown(self) -> None:
        self._closing.set()
        super().shutdown()


def flipped(data: bytes) -> bytes:
    """The same with one bit of the byte in the middle turned."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side has closed; what it still sends is thrown away."""
    connection.settimeout(0)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


def dead_endpoint() -> Endpoint:
    """Where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return Endpoint(held.getsockname()[1])
