"""How our servers listen: whatever a client does with its request, and whoever reads it, it holds no connection for long."""

import asyncio
import socket
import threading
import time

import pytest
import uvicorn
from waiting import limit, until

from tasks.common.http_server import impatient, listen

HEAD = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"


async def refusing(scope, receive, send):
    """Answers without a look at the body, as whoever refuses a caller does; what is asked for `/read` is read first."""
    if scope["path"] == "/read":
        while (await receive()).get("more_body"):
            pass
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def port():
    listener = listen("127.0.0.1", 0)
    protocol = impatient(read_seconds=limit(0.3), connections=16)
    server = uvicorn.Server(uvicorn.Config(refusing, http=protocol, ws="none", lifespan="off", log_level="critical"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    until(lambda: server.started)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def drip(port, *parts):
    """Send the parts, and then a byte now and then; what was answered until the connection ended, and whether it did."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection:
        connection.sendall(b"".join(parts))
        said = b""
        for _ in range(60):
            try:
                part = connection.recv(65536)
                if not part:
                    return said, True
                said += part
                time.sleep(0.05)
                connection.sendall(b" ")
            except TimeoutError:
                connection.sendall(b" ")
            except OSError:
                return said, True
        return said, False


@pytest.mark.parametrize(
    ("parts", "statuses"),
    [
        ((HEAD,), [b"401"]),
        ((HEAD.replace(b"GET / ", b"POST / "),), [b"401"]),
        ((HEAD.replace(b"/ ", b"/read ", 1),), [b"408"]),
        ((HEAD.replace(b"1000", b"0"), HEAD.replace(b"/ ", b"/read ", 1)), [b"401", b"408"]),
    ],
    ids=["a refused one", "a refused one with POST", "one that is read", "the second of two at once"],
)
def test_a_body_that_does_not_come_to_its_end_ends_the_connection(port, parts, statuses):
    said, ended = drip(port, *parts)
    assert ended
    assert [line.split()[1] for line in said.split(b"\r\n") if line.startswith(b"HTTP/")] == statuses


def test_a_connection_is_kept_for_the_next_request(port):
    with socket.create_connection(("127.0.0.1", port), timeout=limit(10)) as connection:
        for _ in range(3):
            connection.sendall(HEAD + b" " * 1000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 401")
