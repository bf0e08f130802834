"""What versioned_blobs.py and fault_proxy.py share: a small HTTP server before a blob service, which passes requests on.

Each request is read whole, noted in `log`, handed to `answer`, and answered whole. Shared Key signatures are made and
checked here, as "Authorize with Shared Key" of the REST documentation has them.
"""

import base64
import email.utils
import hashlib
import hmac
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from azurite import ACCOUNT, KEY, Endpoint

SIGNED = (
    *("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date"),
    *("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
)
OF_ONE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Request:
    """What a client asks; `target` as it was sent, encoded."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    @property
    def asked_bytes(self) -> int:
        """Length of the range of a blob that it asks for; 0 where it names none."""
        first, _, last = (self.header("x-ms-range") or self.header("range")).removeprefix("bytes=").partition("-")
        return int(last) - int(first) + 1 if last else 0

    @property
    def place(self) -> tuple[str, str]:
        """Container and blob, decoded; empty where the request is about something larger."""
        _, _, container, blob = [*urlsplit(self.target).path.split("/", 3), "", ""][:4]
        return unquote(container), unquote(blob)

    def without(self, *names: str) -> "Request":
        kept = tuple((key, value) for key, value in self.headers if key.lower() not in names)
        return replace(self, headers=kept)

    def with_header(self, name: str, value: str) -> "Request":
        return replace(self, headers=(*self.without(name.lower()).headers, (name, value)))


@dataclass(frozen=True)
class Response:
    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def with_headers(self, **changed: str | None) -> "Response":
        """The same with other headers (`_` stands for `-`); None takes one away."""
        names = {name.replace("_", "-"): value for name, value in changed.items()}
        kept = [(key, value) for key, value in self.headers if key.lower() not in names]
        return replace(self, headers=(*kept, *((name, value) for name, value in names.items() if value is not None)))


def problem(status: int, code: str, message: str, **headers: str) -> Response:
    """An error as the service says it: the code in a header and in XML."""
    body = (
        f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>'
    )
    said = (("x-ms-error-code", code), ("Content-Type", "application/xml"), *headers.items())
    return Response(status, said, body.encode())


def target_of(container: str, blob: str, **query: str) -> str:
    words = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    return f"/{ACCOUNT}/{quote(container)}/{quote(blob)}" + (f"?{words}" if words else "")


def signature(request: Request, key: str = KEY) -> str:
    """What the Authorization header of a request must say."""
    told = {name: request.header(name) for name in SIGNED}
    told["content-length"] = "" if told["content-length"] == "0" else told["content-length"]
    ours = {name.lower(): value for name, value in request.headers if name.lower().startswith("x-ms-")}
    lines = [request.method, *told.values()]
    lines += [f"{name}:{ours[name]}" for name in sorted(ours, key=lambda name: name.replace("-", ""))]
    lines.append(f"/{ACCOUNT}{urlsplit(request.target).path}")
    lines += sorted(f"{name.lower()}:{value}" for name, value in request.query.items())
    code = hmac.new(base64.b64decode(key), "\n".join(lines).encode(), hashlib.sha256).digest()
    return f"SharedKey {ACCOUNT}:{base64.b64encode(code).decode()}"


def signed(request: Request) -> Request:
    """A request that we changed, with a signature that fits it again."""
    sized = request.with_header("Content-Length", str(len(request.body)))
    return sized.with_header("Authorization", signature(sized))


def own_request(method: str, target: str, body: bytes = b"", **headers: str) -> Request:
    """A request that a test makes itself, signed."""
    told = (("x-ms-date", email.utils.formatdate(usegmt=True)), ("x-ms-version", "2026-06-06"), *headers.items())
    return signed(Request(method, target, told, body))


@dataclass
class Upstream:
    """The service behind, over one connection for each thread."""

    port: int
    _local: threading.local = field(default_factory=threading.local)

    def ask(self, request: Request) -> Response:
        """Ask once; once more when the connection was kept from before and has gone away since."""
        kept = getattr(self._local, "connection", None)
        if kept:
            try:
                return self._ask(kept, request)
            except (ConnectionError, http.client.HTTPException):
                kept.close()
        self._local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        return self._ask(self._local.connection, request)

    def _ask(self, connection: http.client.HTTPConnection, request: Request) -> Response:
        connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.without("host", "connection").with_header("Host", f"127.0.0.1:{self.port}").headers:
            connection.putheader(name, value)
        connection.endheaders(request.body or None)
        if connection.sock:
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = connection.getresponse()
        return Response(answer.status, tuple(answer.getheaders()), answer.read())


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    server: "Relay"

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        try:
            super().finish()
        except OSError:
            self.close_connection = True

    def serve(self) -> None:
        try:
            self.server.serve(self)
        except OSError:  # the client went away
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = serve  # noqa: N815

    def read_request(self) -> Request:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # passed on like this, the service behind would wait for the rest
            raise ConnectionError("the client went away in the middle of a request")
        return Request(self.command, self.path, tuple(self.headers.items()), body)

    def write(self, response: Response, *, only: int | None = None) -> None:
        """Answer; `only` so many bytes of a body whose whole length was announced."""
        self.send_response_only(response.status)
        self.send_header("Date", email.utils.formatdate(self.server.clock(), usegmt=True))
        for name, value in response.headers:
            if name.lower() not in OF_ONE_CONNECTION:
                self.send_header(name, value)
        empty = self.command == "HEAD" or response.status in (204, 304)
        length = response.header("content-length") if self.command == "HEAD" else str(len(response.body))
        if response.status != 204:
            self.send_header("Content-Length", length or "0")
        self.end_headers()
        if not empty:
            self.wfile.write(response.body[:only])
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: the relay has its own log."""


class Relay(ThreadingHTTPServer):
    """A server before another one; without an address, on a port that the system gives it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: Endpoint, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.upstream = Upstream(behind.port)
        self.log: list[Request] = []
        """Every request, without its body."""
        self.connections: set[socket.socket] = set()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.server_address[1])

    def clock(self) -> float:
        """Seconds since 1970, as the service has them."""
        return time.time()

    def serve(self, handler: Handler) -> None:
        request = handler.read_request()
        self.note(request)
        handler.write(self.answer(request))

    def note(self, request: Request) -> None:
        self.log.append(replace(request, body=b""))

    def answer(self, request: Request) -> Response:
        return self.upstream.ask(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up in the middle is what these servers are for."""

    @contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()
            for connection in list(self.connections):
                connection.close()
