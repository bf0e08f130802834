"""A real Prefect server and a real worker in a home of their own, and a small flow that counts its starts."""

import os
import signal
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import waiting
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import (
    ConcurrencyLimitStrategy,
    ConcurrencyOptions,
    FlowRun,
    StateDetails,
    StateType,
)
from prefect.states import Pending, Scheduled

from deployments.catalogue.flows import POOL
from deployments.services import prefect_server, registration
from deployments.services.flow_runs import flow_runs
from deployments.services.parts import worker
from tasks.common import process
from tasks.orchestration.run_log import RunLog, note_stopped

FLOW = """
import os, time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from prefect import flow, task
from prefect.runtime import flow_run
from flows.support.prefect_run import started_by
from tasks.orchestration.run_log import RunLog
from tasks.config.base import home


@task(name="nap")
def nap(seconds, folder):
    until = time.time() + seconds
    while time.time() < until and not (folder / "go").exists():
        time.sleep(0.05)


@flow(name="probe")
def probe(folder: str, seconds: float = 600.0, tell: str = "home"):
    folder, me = Path(folder), str(flow_run.get_id())
    run = SimpleNamespace(flow="probe", subject="it", flow_run={"id": me}, config_digest="")
    RunLog(home(), me).opened(run)
    with started_by("run", "probe"):
        with open(folder / "starts", "a") as file:
            file.write(f"{me} {os.getpid()} {time.time()}\\n")
        nap(seconds, folder)
    with open(folder / "ends", "a") as file:
        file.write(f"{me} {os.getpid()} {time.time()}\\n")


if __name__ == "__main__":
    import sys
    probe(sys.argv[1])
"""
FAST = {"PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2"}
"""A queued run asks for its slot every two seconds, not every thirty."""


@dataclass
class Live:
    """The environment of all that runs here, the server's address, and the deployments that were made."""

    home: Path
    environment: dict[str, str]
    url: str = ""
    made: dict[str, UUID] = field(default_factory=dict)

    def client(self) -> SyncPrefectClient:
        # As `prefect_server.client` has it: reading all certificates costs more than what is asked.
        plain = {"verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
        password = prefect_server.password(self.home)
        return SyncPrefectClient(api=f"{self.url}/api", auth_string=password, httpx_settings=plain)

    def start_server(self) -> None:
        """Start the server where none runs, and return when it answers: on another port, if its own was taken meanwhile."""
        with environment({key: value for key, value in self.environment.items() if key != "PREFECT_API_URL"}):
            server = prefect_server.prepare(self.home)
            prefect_server.wait(server)
            self.url, self.environment = server["url"], dict(os.environ)

    def start_worker(self) -> None:
        """Start the worker, where the shared folder for temporary files holds a storage of Prefect's that another user made."""
        shared = self.home.parent / "shared"
        shared.mkdir(exist_ok=True)
        (shared / "runner_storage").touch()
        with environment({**self.environment, "TMPDIR": str(shared)}):
            worker.start(self.home)

    def clear(self) -> None:
        """Forget all runs and deployments, so that a worker finds nothing that an earlier test left."""
        with self.client() as client:
            for run in flow_runs(client, *StateType):
                client.delete_flow_run(run.id)
            for deployment in self.made.values():
                client.delete_deployment(deployment)
        self.made.clear()

    def worker_pid(self) -> int:
        """The worker's own process, below its small parent."""
        parent = worker.status(self.home)["pid"]
        return next(
            pid for pid in process.descendants(parent) if b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    def kill_worker(self) -> None:
        """kill -9 the worker and its parent; the flow runs' processes stay."""
        pids = [worker.status(self.home)["pid"], self.worker_pid()]
        for pid in pids:
            kill(pid)

    def deployment(self, client: SyncPrefectClient, name: str, *, collision: str = "ENQUEUE") -> UUID:
        if name not in self.made:
            self.made[name] = client.create_deployment(
                flow_id=client.create_flow_from_name("probe"),
                name=name,
                entrypoint="probed.probe",
                work_pool_name=POOL,
                concurrency_limit=1,
                concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy(collision)),
                parameter_openapi_schema={},
                pull_steps=[],
            )
        return self.made[name]

    def run(self, client: SyncPrefectClient, name: str, folder: Path, **told: Any) -> FlowRun:
        """Start a run of a deployment whose processes count themselves in a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        seconds = told.pop("seconds", 600.0)
        parameters = {"folder": str(folder), "seconds": seconds}
        return client.create_flow_run_from_deployment(self.deployment(client, name), parameters=parameters, **told)

    def stopped(self, run: UUID) -> None:
        """What `headway down` writes before it stops a run's process."""
        note_stopped(self.home / "runs" / str(run))

    def taken_up(self, client: SyncPrefectClient, name: str, folder: Path, **told: Any) -> UUID:
        """A run in the state that a worker leaves when it is killed between taking it up and starting its process."""
        now = datetime.now(UTC)
        run = self.run(client, name, folder, state=Scheduled(scheduled_time=now + timedelta(hours=1)), **told).id
        client.set_flow_run_state(run, Pending(state_details=StateDetails(scheduled_time=now)))
        return run

    def slots(self, client: SyncPrefectClient, name: str) -> int:
        return int(client.read_deployment(self.made[name]).global_concurrency_limit.active_slots)

    def logged(self, run: UUID, *, pid: int, host: str, ended: str = "") -> None:
        """Write a run's folder as if a process of this pid had opened it now."""
        log = RunLog(self.home, str(run))
        log.opened(SimpleNamespace(flow="probe", subject="it", flow_run={"id": str(run)}, config_digest=""))
        path = log.folder / "handle.json"
        process.write_json(path, {**process.read_json(path), "pid": pid, "host": host})
        if ended:
            log.write("closed", status=ended, seconds=1.0, error={"message": "the gate compare is closed"})


@contextmanager
def live(home: Path) -> Iterator[Live]:
    """Start the server in a home, with a work pool; all that runs is stopped at the end. The environment is left as it was."""
    modules = home.parent / "modules"
    modules.mkdir(parents=True)
    (modules / "probed.py").write_text(FLOW)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    paths = os.pathsep.join(part for part in (str(modules), kept.get("PYTHONPATH", "")) if part)
    made = Live(home, {**kept, **FAST, "PYTHONPATH": paths, "HEADWAY_HOME": str(home)})
    try:
        made.start_server()
        with made.client() as client:
            registration.register(client, [])
        yield made
    finally:
        process.stop(home / "platform" / "worker")
        process.stop(home / "prefect")


def kill(pid: int) -> None:
    """kill -9; a process that died with its parent a moment before is none any more."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


until = partial(waiting.until, every=0.8)
"""As it is, and not so often: Prefect is asked, and an answer costs its server 10 ms of a processor."""


def lines(path: Path) -> list[list[str]]:
    """What the processes of a flow counted: flow run, pid and time of each."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def python(*words: str) -> list[str]:
    return [sys.executable, *words]


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
