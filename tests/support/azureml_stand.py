"""A home whose job folders lie in a real Azurite, and a workspace of Azure ML beside it (azureml_service.py).

Who logs in is a script that stands in for the Azure CLI; `log_out` makes it say what the real one says then.
"""

import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import azurite
import yaml
from azureml_service import TOKEN, AzureMlService, serving
from azurite import ACCOUNT
from blob_relay import Relay
from waiting import limit

from tasks.compute import open_backend
from tasks.compute.azureml.backend import AzureMlBackend
from tasks.compute.job import Job, JobState
from tasks.config.cluster import ClusterConfig
from tasks.storage import open_files

SECRET = "HEADWAY_TEST_CONNECTION"
AZ = """#!/bin/sh
[ "$1 $2" = "account get-access-token" ] || exit 2
[ -s "{said}" ] || {{ echo "ERROR: Please run 'az login' to setup account." >&2; exit 1; }}
echo "{{\\"accessToken\\": \\"$(cat "{said}")\\", \\"expires_on\\": 4102444800, \\"expiresOn\\": \\"2100-01-01 00:00:00.0\\"}}"
"""


@dataclass(frozen=True)
class Stand:
    """What tests of the backend stand on."""

    home: Path
    service: AzureMlService
    container: str
    relay: Relay
    """Before the blobs: it has a log of every request, the nodes' too."""

    def log_in(self, token: str = TOKEN) -> None:
        (self.home / "az.token").write_text(token)

    def log_out(self) -> None:
        self.log_in("")

    def cluster(self, **changed) -> ClusterConfig:
        workspace = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "cpu"}
        said = {"backend": "azureml", "ranks_per_node": 1, **changed}
        section = {
            **workspace,
            "endpoint": self.service.url,
            "environment": "azureml://registries/r/environments/own/versions/1",
            "shm_size": "1g",
            **said.pop("azureml", {}),
        }
        return ClusterConfig(**said, azureml=section)

    def backend(self, **changed) -> AzureMlBackend:
        return open_backend(self.cluster(**changed), partial(open_files, self.home))

    def blobs(self, container: str = ""):
        from azure.storage.blob import BlobServiceClient

        service = BlobServiceClient.from_connection_string(self.service.blobs.connection_string)
        return service.get_container_client(container or self.container)

    def lying(self, job: Job) -> list[str]:
        """What lies in the store of a job's folder."""
        start = f"some/prefix/jobs/{job.id}/"
        return sorted(blob.name.removeprefix(start) for blob in self.blobs().list_blobs(name_starts_with=start))

    def wait(self, backend: AzureMlBackend, handle, folder: Path, *, until=None, timeout: float = 60.0) -> JobState:
        """The state of a job once it fits, by default once it is over."""
        deadline = time.monotonic() + limit(timeout)
        while True:
            state = backend.states([(handle, folder)])[0]
            if until(state) if until else state.over:
                return state
            assert time.monotonic() < deadline, f"{state} after {timeout:g} s; {self.said()}"
            time.sleep(0.3)  # each look lists the folder in the store, which costs more than the wait

    def said(self) -> str:
        """The nodes' own logs, for a test that fails."""
        logs = sorted(self.service.base.rglob("std_log.txt"))
        return "\n".join(f"{path.parent.name}: {path.read_text()[-1500:]}" for path in logs[-4:])


@contextmanager
def standing(base: Path) -> Iterator[Stand]:
    """The stand for as long as the block lasts; `az` and the connection string are in the environment meanwhile."""
    home, commands, container = base / "home", base / "bin", f"c{uuid.uuid4().hex[:20]}"
    home.mkdir(parents=True)
    az(commands / "az", home / "az.token")
    with azurite.running(base / "azurite", in_memory=True) as behind, Relay(behind).running() as relay:
        blobs = relay.endpoint
        secret = {SECRET: blobs.connection_string}
        store = {"uri": f"az://{ACCOUNT}/{container}/some/prefix", "credential": "connection_string"}
        stores = {"use": "cloud", "stores": {"cloud": {**store, "secret": f"env:{SECRET}"}}}
        (home / "stores.yaml").write_text(yaml.safe_dump(stores))
        changed = {**secret, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        with serving(blobs, base / "nodes", secret) as service, environment(changed):
            stand = Stand(home, service, container, relay)
            stand.blobs().create_container()
            stand.log_in()
            yield stand


def az(path: Path, said: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(AZ.format(said=said))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@contextmanager
def environment(changed: dict[str, str]) -> Iterator[None]:
    kept = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
