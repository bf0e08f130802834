"""The parts of the platform: watch, bridge and worker, each a supervised process; all parts' folders; starting again what
died.

Prefect's server and MLflow's are files of their own beside this one. Flow runs outlive a worker that dies; the watch looks
after those whose own process died.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.catalogue.flows import POOL
from deployments.configuration.events import EventsConfig
from deployments.services import mlflow_server, prefect_server
from tasks.common import process
from tasks.common.redaction import redact
from tasks.config.base import config_digest

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

Duty = Callable[[float], Any]
"""Takes the time, in seconds since the epoch."""
PARTS = ("platform/watch", "platform/bridge", "platform/worker", "platform/mlflow", "prefect")
"""In the order in which they stop: nobody restarts or starts what is being stopped."""
LAST_LOOK = "platform/watch/dead_runs.json"
"""When the watch last looked for runs that died."""
LOOKED_SECONDS = 15.0
"""In which a bridge that starts has looked at its sources once."""
WORKER = "headway-"
"""Our workers are called so, and the host's name follows."""
PACE = {"PREFECT_WORKER_QUERY_SECONDS": "2", "PREFECT_WORKER_HEARTBEAT_SECONDS": "10"}
"""A person who presses Run looks at the page: two seconds until it starts, not ten."""
PREFECT = "import sys, tempfile; tempfile.tempdir = sys.argv.pop(1); from prefect.cli import app; app()"
"""`prefect` with a folder for temporary files of its own: in the shared one `runner_storage` belongs to whoever came first, and
nobody else's worker starts. Not by TMPDIR, which its flow runs and their jobs would inherit."""


def worker_name() -> str:
    """The name of this host's worker."""
    return f"{WORKER}{socket.gethostname()}"


class Part:
    """A process of ours in `platform/NAME` of the home, supervised like the servers: `python -m deployments.NAME HOME`."""

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log

    def status(self, home: Path) -> dict[str, Any] | None:
        """The part when it runs: pid of its supervising parent, since when."""
        folder = home / "platform" / self.name
        part: dict[str, Any] | None = process.read_json(folder / "part.json")
        return part if part and process.alive(process.read_json(folder / "handle.json")) else None

    def start(self, home: Path) -> dict[str, Any]:
        """Start the part, unless it runs. The environment must be that of `prepare`, and hold the secrets that settings name."""
        if result := self.status(home):
            return result
        argv = [sys.executable, "-m", f"deployments.{self.name}", str(home)]
        # Folders in the settings may be relative to where `headway up` was started.
        return self._launch(home, argv, directory=str(Path.cwd()), grace=5.0)

    def _launch(
        self, home: Path, argv: list[str], *, noted: dict[str, str] | None = None, **how: Any
    ) -> dict[str, Any]:
        folder = home / "platform" / self.name
        handle = process.start(folder, process.ProcessSpec(argv=argv, log=self.log, restarts=20, steady=20.0, **how))
        part = {**(noted or {}), "pid": handle["pid"], "since": time.time()}
        process.write_json(folder / "part.json", part)
        return part


class Worker(Part):
    """Takes flow runs of the work pool, and starts each as a process of its own on this machine. Its status has its name too."""

    def start(self, home: Path) -> dict[str, Any]:
        """Start the worker, unless it runs. The environment must be that of `prepare`: it hands Prefect's address on."""
        if result := self.status(home):
            return result
        name = worker_name()
        words = ["worker", "start", "--pool", POOL, "--type", "process", "--install-policy", "never", "--name", name]
        argv = [sys.executable, "-c", PREFECT, str(self.temporary(home)), *words]
        return self._launch(home, argv, noted={"name": name}, env={**PACE, "HEADWAY_HOME": str(home)}, grace=10.0)

    def temporary(self, home: Path) -> Path:
        """The worker's folder for temporary files, made where it is not there. Raises OSError where it cannot be written."""
        place = process.private_folder(home / "platform" / "worker" / "tmp")
        with tempfile.TemporaryFile(dir=place):
            return place

    def allow(self, client: SyncPrefectClient, parallel_runs: int | None) -> None:
        """So many flow runs may be at work at once; None: any number. One that waits for a person is not at work.

        The limit is the work pool's: a worker's own (`--limit`) counts processes, and a run that waits keeps its process.
        """
        from prefect.client.schemas.actions import WorkPoolUpdate

        client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=parallel_runs))


class Bridge(Part):
    """Takes events in (deployments/bridge), and says in `sources.json` of its folder which of its sources are broken."""

    def start(self, home: Path) -> dict[str, Any]:
        if not self.status(home):
            self.forget_problems(home)
        return super().start(home)

    def problems(self, home: Path) -> dict[str, str]:
        """Sources of events that are broken, and why, as the bridge says; empty while it does not run."""
        payload = process.read_json(self._sources(home)) or {}
        return dict(payload.get("problems", {})) if self.status(home) else {}

    def first_problems(self, home: Path, config: EventsConfig) -> dict[str, str]:
        """The same of these settings, once a bridge that starts with them, or starts anew, has looked at its sources."""
        deadline = time.monotonic() + LOOKED_SECONDS
        while time.monotonic() < deadline:
            payload = process.read_json(self._sources(home)) or {}
            if payload.get("settings") == config_digest(config):
                break
            time.sleep(0.2)
        return self.problems(home)

    def tell_problems(self, home: Path, config: EventsConfig, result: dict[str, str]) -> None:
        """Keep what the bridge found broken."""
        problems = {name: redact(why) for name, why in result.items()}
        payload = {"settings": config_digest(config), "problems": problems}
        if process.read_json(self._sources(home)) != payload:
            process.write_json(self._sources(home), payload)

    def forget_problems(self, home: Path) -> None:
        """Nothing is known of the sources until they are looked at."""
        self._sources(home).unlink(missing_ok=True)

    def _sources(self, home: Path) -> Path:
        return home / "platform" / "bridge" / "sources.json"


watch = Part("watch", "watch.log")
worker = Worker("worker", "worker.log")
bridge = Bridge("bridge", "bridge.log")


def restart_what_died(home: Path) -> None:
    """Start again every part whose supervising parent is gone. For whoever stays: the watch, and `up` in the foreground."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow_server.start(home, None)
    prefect_server.prepare(home)
    worker.start(home)
    watch.start(home)
    bridge.start(home)


def take(name: str, duty: Duty, before: str) -> str:
    """Do one duty of a process that must not die of it, as the watch and the bridge; what goes wrong is said once, not at
    every turn.

    Returns what went wrong, to be handed in as `before`.
    """
    try:
        duty(time.time())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if text != before:
            logging.exception("%s: %s", name, text)
        return text
    if before:
        logging.info("%s: well again", name)
    return ""
