"""The Ray backend: Ray Jobs on a cluster that runs, or on one that is started on this machine.

The job's program is tasks/jobs/ray/driver.py, which starts the same part on each machine as every backend. What Ray's SDK is
asked is api.py, the cluster on this machine local.py, Ray on Azure ML azureml.py. See docs/ray.md.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import JobFailed
from tasks.common.home import home
from tasks.compute.job import Job, JobState, Rendered
from tasks.compute.nodes import node_environment, python, write_nodes
from tasks.compute.ray.api import RayJobs, refused, unreachable
from tasks.compute.ray.local import living_cluster, start_local_cluster
from tasks.compute.ray.states import Told, state_of
from tasks.compute.ray_driver import driver_spec
from tasks.config.cluster import ClusterConfig

CANCEL_SECONDS = 60.0
STOP_WAIT_SECONDS = 45
"""For the driver to end all machines' parts before Ray kills it; the ranks have 30 s of it, Ray's own default is 3 s."""


class RayBackend:
    """A Ray cluster. State: the open clients, by address."""

    poll_seconds = 1.0

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._clients: dict[str, RayJobs] = {}

    def render(self, job: Job, folder: Path) -> Rendered:
        spec = driver_spec(job, folder, self._config.ray)
        driver = [python(job), "-m", "tasks.jobs.ray.driver", str(folder)]
        environment = {**node_environment(job), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)}
        request = {
            "submission_id": job.submission_id,
            "entrypoint": f"exec {shlex.join(driver)}",  # no shell stays between Ray and the driver
            "runtime_env": {"env_vars": environment},
            "metadata": {"headway_job": job.id, "headway_token": job.token, "headway_submission": str(job.submission)},
        }
        return Rendered(backend="ray", files={"ray.json": json.dumps(spec, indent=1)}, request=request)

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        rendered = self.render(job, folder)
        address = self._config.ray.address or start_local_cluster(home()).address
        with process.locked(folder / "submit.lock"):
            there = self._find(job.submission_id, address)
            if there:
                return there
            write_nodes(job, folder)
            for name, text in rendered.files.items():
                process.write_text(folder / name, text)
            try:
                self._client(address).submit_job(**(rendered.request or {}))
            except OSError as error:
                raise unreachable(address, error) from error
            except RuntimeError as error:
                there = self._find(job.submission_id, address)
                if not there:
                    raise refused(error, folder) from error
        return _handle(job.submission_id, address)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        local = None if self._config.ray.address else living_cluster(home())
        address = self._config.ray.address or (local.address if local else "")
        return self._find(job.submission_id, address) if address else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        told = {address: self._told(address) for address in {handle["address"] for handle, _ in jobs}}
        return [state_of(handle, folder, told[handle["address"]]) for handle, folder in jobs]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        """Raises Missing when the cluster does not answer, JobFailed when the job does not end."""
        address, name = handle["address"], handle["submission_id"]
        if self._gone(address):
            return
        try:
            client = self._client(address)
            client.stop_job(name)
            until = time.monotonic() + CANCEL_SECONDS
            while not client.get_job_status(name).is_terminal():
                if time.monotonic() > until:
                    raise JobFailed(
                        f"Ray did not end {name} within {CANCEL_SECONDS:g} s",
                        failure="infrastructure",
                        folder=str(folder),
                    )
                time.sleep(0.2)
        except OSError as error:
            raise unreachable(address, error) from error
        except RuntimeError as error:
            if self._find(name, address):
                raise refused(error, folder) from error

    def _find(self, name: str, address: str) -> dict[str, Any] | None:
        told = self._told(address)
        if told.jobs is None and not told.gone:
            raise unreachable(address, OSError(told.why))
        return _handle(name, address) if name in (told.jobs or {}) else None

    def _told(self, address: str) -> Told:
        """What the cluster says of all jobs, in one call."""
        if self._gone(address):
            return Told(gone=True)
        try:
            jobs = self._client(address).list_jobs()
        except (OSError, RuntimeError) as error:
            return Told(why=str(error))
        return Told(jobs={job.submission_id: job for job in jobs if job.submission_id})

    def _gone(self, address: str) -> bool:
        """Whether it was a cluster of this machine that has ended."""
        local = None if self._config.ray.address else living_cluster(home())
        return not self._config.ray.address and (local is None or local.address != address)

    def _client(self, address: str) -> RayJobs:
        if address not in self._clients:
            local = None if self._config.ray.address else living_cluster(home())
            self._clients[address] = RayJobs(address, local.token if local else "")
        return self._clients[address]


def _handle(name: str, address: str) -> dict[str, Any]:
    return {"submission_id": name, "address": address}
