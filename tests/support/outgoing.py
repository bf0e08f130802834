"""What a test lets the process reach: every connection is written down, and a canary server counts who came."""

import http.server
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_seen: list[list[tuple]] = []


def _hook(event: str, args: tuple) -> None:
    if event == "socket.connect":
        for one in _seen:
            one.append(args[1])
    elif event == "socket.getaddrinfo":
        for one in _seen:
            one.append(("name", args[0], args[1]))


sys.addaudithook(_hook)


@contextmanager
def connections() -> Iterator[list[tuple]]:
    """Every address that something in this process connects to or looks up, while the block lasts: Python itself tells."""
    mine: list[tuple] = []
    _seen.append(mine)
    try:
        yield mine
    finally:
        _seen.remove(mine)


class Canary:
    """A web server that must not be asked anything."""

    def __init__(self) -> None:
        self.hits: list[str] = []
        hits = self.hits

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_one_request(self):
                hits.append(str(self.client_address))
                super().handle_one_request()

            def do_GET(self):
                self.send_response(200)
                self.end_headers()

            do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    @contextmanager
    def running(self) -> Iterator["Canary"]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()
