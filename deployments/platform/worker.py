"""The worker: takes flow runs of the work pool and starts each as a process of its own on this machine.

Flow runs outlive a worker that dies; the watch (deployments/watch) looks after those whose own process died.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

from deployments.catalogue import POOL
from tasks import process

PACE = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_HEARTBEAT_SECONDS": "10"}
"""A person who presses Run looks at the page: two seconds until it starts, not ten."""


def start(home: Path, parallel_runs: int) -> dict[str, Any]:
    """Start the worker, unless it runs. The environment must be that of `prepare`: it hands Prefect's address on."""
    folder = home / "platform" / "worker"
    found = status(home)
    if found:
        return found
    name = f"headway-{socket.gethostname()}"
    worker = ["-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--install-policy", "never"]
    argv = [sys.executable, *worker, "--name", name, "--limit", str(parallel_runs)]
    environment = {**PACE, "HEADWAY_HOME": str(home)}
    spec = process.ProcessSpec(argv=argv, env=environment, log="worker.log", restarts=20, steady=20.0, grace=10.0)
    handle = process.start(folder, spec)
    process.write_json(folder / "part.json", {"name": name, "pid": handle["pid"], "since": time.time()})
    return {"name": name, "pid": handle["pid"], "since": time.time()}


def status(home: Path) -> dict[str, Any] | None:
    """The worker when it runs: name, pid of its supervising parent, since when."""
    folder = home / "platform" / "worker"
    part: dict[str, Any] | None = process.read_json(folder / "part.json")
    return part if part and process.alive(process.read_json(folder / "handle.json")) else None
