"""A real Azurite queue service for the tests, from the same package as the blob service of azurite.py; and messages as Event Grid
writes them."""

import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import azurite
from waiting import limit

SAYS = "Azurite Queue service successfully listens on "


@dataclass(frozen=True)
class Queues:
    """A running queue service on loopback. Its messages lie in `folder`, and outlive its process."""

    port: int
    process: "subprocess.Popen[str]"
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{azurite.ACCOUNT}"

    @property
    def connection_string(self) -> str:
        said = f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY}"
        return f"{said};QueueEndpoint={self.url};"

    def client(self, name: str):
        """The SDK's client of a queue."""
        from azure.storage.queue import QueueClient

        return QueueClient.from_connection_string(self.connection_string, name)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(limit(10))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(folder: Path, *, port: int = 0) -> Iterator[Queues]:
    """A queue service for as long as the block lasts."""
    started = start(folder, port=port)
    try:
        yield started
    finally:
        started.stop()


def start(folder: Path, *, port: int = 0) -> Queues:
    """Start a queue service on a port that the system gives it, or again on the one that it had."""
    folder.mkdir(parents=True, exist_ok=True)
    script = azurite.program().parents[1] / "queue" / "main.js"
    argv = [str(azurite.node()), str(script), "--queueHost", "127.0.0.1", "--queuePort", str(port)]
    process = subprocess.Popen(
        [
            *azurite.dying_with_us(),
            *argv,
            "--location",
            str(folder),
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
        ],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return Queues(_port_of(process), process, folder)


def _port_of(process: "subprocess.Popen[str]") -> int:
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=azurite.read, args=(process.stdout, lines), daemon=True).start()
    said = []
    while not said or SAYS not in said[-1]:
        try:
            said.append(lines.get(timeout=limit(azurite.STARTS_WITHIN)))
        except queue.Empty:
            process.kill()
            raise AssertionError(f"Azurite did not start within {limit(azurite.STARTS_WITHIN):g} s: {said}") from None
        assert said[-1], f"Azurite ended with {process.wait()}: {said}"
    return int(said[-1].strip().rpartition(":")[2])
