"""The worker: takes flow runs of the work pool and starts each as a process of its own on this machine.

Flow runs outlive a worker that dies; the watch (deployments/watch) looks after those whose own process died.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.catalogue.flows import POOL
from tasks.common import process

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

PACE = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_HEARTBEAT_SECONDS": "10"}
"""A person who presses Run looks at the page: two seconds until it starts, not ten."""
PREFECT = "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1); from prefect.cli import app; app()"
"""`prefect` with a folder for temporary files of its own: in the shared one `runner_storage` belongs to whoever came first, and
nobody else's worker starts. Not by TMPDIR, which its flow runs and their jobs would inherit."""


def allow(client: SyncPrefectClient, parallel_runs: int | None) -> None:
    """So many flow runs may be at work at once; None: any number. One that waits for a person is not at work.

    The limit is the work pool's: a worker's own (`--limit`) counts processes, and a run that waits keeps its process.
    """
    from prefect.client.schemas.actions import WorkPoolUpdate

    client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=parallel_runs))


def start(home: Path) -> dict[str, Any]:
    """Start the worker, unless it runs. The environment must be that of `prepare`: it hands Prefect's address on."""
    folder = home / "platform" / "worker"
    result = status(home)
    if result:
        return result
    name = f"headway-{socket.gethostname()}"
    worker = ["worker", "start", "--pool", POOL, "--type", "process", "--install-policy", "never"]
    argv = [sys.executable, "-c", PREFECT, str(temporary(home)), *worker, "--name", name]
    environment = {**PACE, "HEADWAY_HOME": str(home)}
    spec = process.ProcessSpec(argv=argv, env=environment, log="worker.log", restarts=20, steady=20.0, grace=10.0)
    handle = process.start(folder, spec)
    process.write_json(folder / "part.json", {"name": name, "pid": handle["pid"], "since": time.time()})
    return {"name": name, "pid": handle["pid"], "since": time.time()}


def temporary(home: Path) -> Path:
    """The worker's folder for temporary files, made where it is not there. Raises OSError where it cannot be written."""
    place = process.private_folder(home / "platform" / "worker" / "tmp")
    with tempfile.TemporaryFile(dir=place):
        return place


def status(home: Path) -> dict[str, Any] | None:
    """The worker when it runs: name, pid of its supervising parent, since when."""
    folder = home / "platform" / "worker"
    part: dict[str, Any] | None = process.read_json(folder / "part.json")
    return part if part and process.alive(process.read_json(folder / "handle.json")) else None
