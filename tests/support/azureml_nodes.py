"""The nodes of a job of azureml_service.py: one process a node on this machine, each with folders of its own.

A node has what the service gives it: the command with its inputs filled in, the variables of the distribution, and what is
downloaded for it. What it does not have is any folder of another node.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from azure.storage.blob import BlobServiceClient
from azureml_bodies import DATASTORE
from azurite import Endpoint, dying_with_us

from tasks.common.process import descendants


class Nodes:
    """The machines of one job."""

    def __init__(
        self,
        blobs: Endpoint,
        base: Path,
        name: str,
        job: dict[str, Any],
        environment: dict[str, str],
        datastores: dict[str, dict[str, Any]],
    ) -> None:
        self.blobs, self.base, self.name, self.job, self.given = blobs, base, name, job, environment
        self.datastores = datastores
        self.count = int((job.get("resources") or {}).get("instanceCount") or 1)
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Run the command once a node, to the end; the first exit code that is not 0 ends the others."""
        self.processes = [self._start(rank) for rank in range(self.count)]
        waiting = list(self.processes)
        failed = 0
        while waiting:
            for process in list(waiting):
                try:
                    code = process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(process)
                if code and not failed:
                    failed = code if code > 0 else 128 - code
                    self.terminate()
        return failed

    def terminate(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    def kill(self) -> None:
        """As a machine ends that is taken away: everything on it at once."""
        for process in self.processes:
            for pid in (process.pid, *descendants(process.pid)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def folder(self, rank: int) -> Path:
        return self.base / f"node-{rank}"

    def log(self, rank: int) -> str:
        return (self.folder(rank) / "std_log.txt").read_text()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        here = self.folder(rank)
        (here / "tmp").mkdir(parents=True)
        with open(here / "std_log.txt", "wb") as log:
            return subprocess.Popen(
                [*dying_with_us(), "bash", "-c", self._command(here)],
                cwd=here,
                env=self._environment(rank, here),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _environment(self, rank: int, here: Path) -> dict[str, str]:
        """Of the container and of the distribution; nothing of whoever runs the tests."""
        machine = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(here)}
        run = {"TMPDIR": f"{here}/tmp", **self.of_the_service(rank, "127.0.0.1")}
        return {**machine, **run, **self.given, **(self.job.get("environmentVariables") or {})}

    def of_the_service(self, rank: int, leader: str) -> dict[str, str]:
        """The variables by which a node knows its job and its place in it."""
        kind = (self.job.get("distribution") or {}).get("distributionType")
        launch = {"NODE_RANK": str(rank), "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self.count)}
        torch = {**launch, "MASTER_ADDR": leader, "MASTER_PORT": "6105"}
        mpi = {"OMPI_COMM_WORLD_RANK": str(rank), "AZ_BATCH_MASTER_NODE": f"{leader}:6000"}
        distributed = {"PyTorch": torch, "Mpi": mpi}.get(str(kind), {})
        return {"AZUREML_RUN_ID": self.name, "AZ_BATCH_NODE_ID": f"node-{self.name[-6:]}-{rank}", **distributed}

    def _command(self, here: Path) -> str:
        """The command, its inputs filled in: a direct one is its address, a downloaded one the path of what came."""

        def fill(found: "re.Match[str]") -> str:
            entry = self.job["inputs"][found.group(1)]
            return self._downloaded(entry["uri"], here) if entry["mode"] == "Download" else str(entry["uri"])

        return re.sub(r"\$\{\{inputs\.(\w+)\}\}", fill, self.job["command"])

    def _downloaded(self, address: str, here: Path) -> str:
        datastore, name = DATASTORE.fullmatch(address).groups()
        container = self.datastores[datastore]["properties"]["containerName"]
        service = BlobServiceClient.from_connection_string(self.blobs.connection_string)
        target = here / Path(name).name
        target.write_bytes(service.get_blob_client(container, name).download_blob().readall())
        return str(target)
