"""A Ray cluster that lives as long as one job: for Azure ML, whose job starts the same program once on each node.

`python -m tasks.jobs.ray.cluster FOLDER`: node rank 0 starts Ray's head, waits for the others, runs the job's driver
(driver.py) and ends with its exit code; the others join, and leave when the head is gone. The environment is that of Azure
ML's PyTorch distribution: NODE_RANK, MASTER_ADDR, MASTER_PORT, all absent on a single node. tasks/compute/ray_driver.py renders
it; see docs/ray.md.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.common.process import die_with_parent, read_json

GONE_SECONDS = 5.0
"""Without an answer of the head for so long, it is gone."""
POLL_SECONDS = 1.0
RANK = "headway-node-rank"
"""Begins the name of a custom resource by which the head knows who is there."""
OURS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
"""As for the cluster of one machine (tasks/compute/ray/local.py): nobody is told, and it ends at once."""
ASKS = (
    "import ray, sys; ray.init(sys.argv[1], log_to_driver=False, configure_logging=False); "
    "print(*ray.cluster_resources())"
)
"""A program that prints the names of all resources of the cluster at an address."""


class Stopped(Exception):
    """The scheduler ends the job."""


def start(more: Sequence[str]) -> list[str]:
    """The command that starts Ray's part of a node, in the foreground."""
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *more]


def head(folder: Path, master: str, port: int, nodes: int, *, join_seconds: float) -> int:
    """Start the head, wait for all, run the driver; its exit code."""
    own = [
        "--head",
        "--port",
        str(port),
        "--include-dashboard",
        "false",
        "--ray-client-server-port",
        str(_free_port()),
        *_shared_options(0),
    ]
    with _Process(start(own)) as raylet:
        address = f"{_reachable(master)}:{port}"
        missing = _wait_for_all(raylet, address, nodes, join_seconds)
        if missing:
            print(
                f"the Ray head at {address} waited up to {join_seconds:g} s for {nodes} nodes, without: {missing}",
                flush=True,
            )
            return 1
        with _Process([sys.executable, "-m", "tasks.jobs.ray.driver", str(folder)], RAY_ADDRESS=address) as driver:
            return driver.wait()


def worker(rank: int, address: str, port: int, *, join_seconds: float) -> int:
    """Join the head, and leave with 0 when it is gone: how the job ended is the head's word."""
    until = time.monotonic() + join_seconds
    while not _answers(address, port):
        if time.monotonic() > until:
            print(f"the Ray head at {address}:{port} did not answer within {join_seconds:g} s", flush=True)
            return 1
        time.sleep(POLL_SECONDS)
    with _Process(start(["--address", f"{address}:{port}", *_shared_options(rank)])) as raylet:
        answered = time.monotonic()
        while time.monotonic() - answered < GONE_SECONDS:
            if raylet.poll() is not None:
                return 0 if not _answers(address, port) else raylet.wait() or 1
            if _answers(address, port):
                answered = time.monotonic()
            time.sleep(POLL_SECONDS)
    return 0


class _Process:
    """A child that dies with this process, and is ended with the block."""

    def __init__(self, argv: Sequence[str], **environment: str) -> None:
        self.argv = list(argv)
        self.environment = {**os.environ, **OURS, **environment}

    def __enter__(self) -> subprocess.Popen[bytes]:
        self.child = subprocess.Popen(
            self.argv, env=self.environment, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        return self.child

    def __exit__(self, *_: object) -> None:
        self.child.terminate()
        try:
            self.child.wait(45)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def _shared_options(rank: int) -> list[str]:
    name = os.environ.get("HEADWAY_NODE_NAME") or f"{socket.gethostname()}-{rank}"
    return ["--node-name", name, "--resources", f'{{"{RANK}-{rank}": 1}}']


def _wait_for_all(raylet: subprocess.Popen[bytes], address: str, nodes: int, seconds: float) -> str:
    """Wait until every node rank is there; the ones that are missing, in words."""
    until = time.monotonic() + seconds
    existing: set[str] = set()
    wanted = {f"{RANK}-{rank}" for rank in range(nodes)}
    while not wanted <= existing and time.monotonic() < until:
        if raylet.poll() is not None:
            return f"the head itself, which ended with exit code {raylet.returncode}"
        time.sleep(POLL_SECONDS)
        # A process of its own asks for the names of the cluster's resources, and leaves again; the cluster may not answer yet.
        argv, environment = [sys.executable, "-c", ASKS, address], {**os.environ, **OURS}
        existing = set()
        with suppress(subprocess.TimeoutExpired):
            asked = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environment)
            existing = set(asked.stdout.split())
    return ", ".join(f"node rank {name.rpartition('-')[2]}" for name in sorted(wanted - existing))


def _reachable(address: str) -> str:
    """The head's own address; a loopback address is replaced by what Ray itself takes for it."""
    from ray.util import get_node_ip_address

    result = socket.gethostbyname(address)
    return get_node_ip_address() if result.startswith("127.") else result


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=2):
            return True
    except OSError:
        return False


def _stop(*_: Any) -> None:
    raise Stopped


def main(folder: Path) -> int:
    """This node's part; the exit code of node rank 0 is the job's."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _stop)
    spec = read_json(folder / "ray.json")
    if spec is None:
        print(f"the job folder {folder} has no ray.json on this node", flush=True)
        return 1
    rank, address = int(os.environ.get("NODE_RANK", "0")), os.environ.get("MASTER_ADDR", "127.0.0.1")
    port, seconds = int(os.environ.get("MASTER_PORT", "0")) or _free_port(), float(spec["join_seconds"])
    try:
        if rank:
            return worker(rank, address, port, join_seconds=seconds)
        return head(folder, address, port, int(spec["nodes"]), join_seconds=seconds)
    except Stopped:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
