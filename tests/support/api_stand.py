"""A server of a model as its program runs it, standing alone, and raw HTTP to it: what no client library would send."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from stand import free_ports
from waiting import limit

JSON = {"Content-Type": "application/json"}


@dataclass
class Server:
    """One that runs."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes]"
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")

    def complete(self, prompt: str = "def ", **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **body})

    def figure(self, name: str) -> float:
        """One figure of /metrics, its labels as they are written there."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"headway_endpoint_{name} ")]
        return float(found[0].split()[-1]) if found else 0.0

    def wait(self, seconds: float = 90.0) -> "Server":
        """Until it is ready."""
        deadline = time.monotonic() + limit(seconds)
        while True:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready after {seconds:g} s:\n{self.log}"
            try:
                if self.client.get("/readyz").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)

    def stop(self, seconds: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit(seconds))


def start(folder: Path, model: Path, *, environment: dict[str, str] | None = None, **settings: Any) -> Server:
    """Start a server and return at once."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_ports("server")["server"]
    told = {"model_folder": str(model), "model_ref": "model/tiny", "files": None, "alone": True}
    told |= {"outputs": str(folder / "outputs" / "model"), "port": port, **settings}
    (folder / "serve.json").write_text(json.dumps(told))
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.serve"],
            env={**os.environ, "HEADWAY_SERVE": str(folder), **(environment or {})},
            stdout=log,
            stderr=log,
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=limit(60), trust_env=False)
    return Server(folder, port, process, client)


@contextmanager
def serving(folder: Path, model: Path, **how: Any) -> Iterator[Server]:
    """A server that is ready, for as long as the block lasts."""
    server = start(folder, model, **how)
    try:
        yield server.wait()
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def raw(port: int, *parts: bytes, pause: float = 0.0, timeout: float = 30.0) -> bytes:
    """Send bytes as they are, with a pause after each part, and return all that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=limit(timeout)) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause)
        except OSError:
            pass  # it was closed on us; what was said before counts
        return _all(connection)


def head(path: str = "/v1/completions", *, length: int | str, **headers: str) -> bytes:
    """The head of a POST with a body of JSON."""
    told = {"Host": "127.0.0.1", **JSON, "Content-Length": str(length), "Connection": "close", **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0


def _all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found
