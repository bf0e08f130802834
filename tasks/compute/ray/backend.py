"""The Ray backend: Ray Jobs on a cluster that runs, or on one that is started on this machine.

The job's program is tasks/jobs/ray/driver.py, which starts the same part on each machine as every backend. The
cluster on this machine is local.py's, what the driver is given ../ray_driver.py. See docs/ray.md.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import OpenFiles
from tasks.common import process
from tasks.common.errors import JobFailed, Missing
from tasks.common.home import home
from tasks.common.process import read_json
from tasks.compute import elastic
from tasks.compute.job import Failure, Job, JobState, Rendered, before_submission
from tasks.compute.job_folder import FOLDER_KEY, NO_STORE, MirroredFolders, key_of
from tasks.compute.nodes import ended_state, node_environment, python, write_nodes
from tasks.compute.ray.local import living_cluster, start_local_cluster
from tasks.compute.ray_driver import driver_spec, mirrored_driver, mirrored_spec
from tasks.config.cluster import ClusterConfig

# Ray's Jobs API: the SDK's client with bounded waits and the house's errors.


try:
    from ray.job_submission import JobSubmissionClient
except ModuleNotFoundError as absent:
    raise Missing("backend ray needs the package ray", remedy="pip install -c constraints.txt -e '.[ray]'") from absent

ANSWER_SECONDS = (5.0, 30.0)
"""Longest wait for a connection, and then for the answer; the SDK by itself waits for ever."""


class RayJobs(JobSubmissionClient):  # type: ignore[misc]
    """The Jobs API of one cluster, by the address of its dashboard. OSError: it does not answer. RuntimeError: it refuses."""

    def __init__(self, address: str, token: str = "") -> None:
        super().__init__(address, headers={"Authorization": f"Bearer {token}"} if token else None)

    def _do_request(self, method: str, endpoint: str, **more: Any) -> Any:
        return super()._do_request(method, endpoint, **{"timeout": ANSWER_SECONDS, **more})


def unreachable(address: str, error: Exception) -> Missing:
    """For a cluster that must answer, and does not."""
    output = str(error).splitlines()[0]
    return Missing(
        f"the Ray cluster at {address} does not answer: {output}",
        remedy="Start it, or set ray.address to the address of its dashboard (`ray status` on its head shows whether it runs).",
    )


def refused(error: Exception, folder: Path) -> JobFailed:
    """For a cluster that answers, and does not do it."""
    return JobFailed(f"Ray refused the job: {error}", failure="infrastructure", folder=str(folder))


# The state of a job on Ray: of what the cluster says of it, and of what its driver wrote into the job folder.


REPORT = "headway-report "
"""As in tasks/jobs/ray/driver.py, which nobody may import."""
LOST = "the Ray cluster at {} no longer has the job: it was restarted or stopped, and jobs end with their cluster"


@dataclass(frozen=True)
class Told:
    """What a cluster said of all its jobs."""

    jobs: dict[str, Any] | None = None
    """By submission id; None when it gave no answer."""
    gone: bool = False
    """The cluster itself is known to have ended."""
    why: str = ""
    """There was no answer because of this."""


def state_of(handle: dict[str, Any], folder: Path, payload: Told) -> JobState:
    """One job's state."""
    # What the driver of this very submission said.
    output = read_json(folder / "ray-state.json") or {}
    mine = handle["submission_id"].endswith(f"-{output.get('submission')}")
    mark = output if mine else {}
    job = (payload.jobs or {}).get(handle["submission_id"])
    if job is None:
        if mark.get("state") == "ended":
            return _by_mark(mark, folder)
        if payload.jobs is None and not payload.gone:
            return JobState(state="unknown", reason=payload.why)
        return _ended(folder) or JobState(state="lost", reason=LOST.format(handle["address"]))
    status = str(job.status.value)
    if status == "PENDING":
        return JobState(state="queued", reason=job.message or "")
    if status == "RUNNING":
        if mark.get("state") in ("queued", "starting", "running"):
            return JobState(state=mark["state"], reason=mark["reason"])
        return JobState(state="running") if mark else JobState(state="starting", reason="Ray starts the job's driver")
    if status == "STOPPED":
        return JobState(state="ended", code=1, reason="cancelled", attempts=_attempts(folder))
    if mark.get("state") == "ended":
        return _by_mark(mark, folder)
    # A job that ended before its driver saw the folder, or whose driver was killed: what Ray says.
    text = job.message or ""
    line = next((line for line in text.splitlines() if line.startswith(REPORT)), None)
    if line:
        report = json.loads(line.removeprefix(REPORT))
        reason = " ".join(filter(None, (report["message"], report["remedy"])))
        return JobState(state="ended", code=1, reason=reason, failure=report["class"])
    absent = "No module named" in text or job.driver_exit_code == NO_STORE
    failure: Failure = "missing" if absent else "infrastructure"
    # The first and the last lines of what Ray says; it adds up to 20,000 letters of the driver's log.
    lines = [line for line in text.splitlines() if line.strip()]
    return JobState(
        state="ended",
        code=job.driver_exit_code or 1,
        reason=" ".join(lines if len(lines) <= 4 else [lines[0], "...", *lines[-3:]]),
        failure=failure,
    )


def _by_mark(mark: dict[str, Any], folder: Path) -> JobState:
    return JobState(
        state="ended",
        code=mark["code"],
        reason=mark["reason"],
        attempts=_attempts(folder),
        failure=mark["failure"],
        failed_nodes=tuple(mark["failed_nodes"]),
    )


def _ended(folder: Path) -> JobState | None:
    """How a job ended, by its own marks: those of the leader, or of the holder of an elastic job's store."""
    return elastic.ended_state(folder) if (folder / "rendezvous").is_dir() else ended_state(folder)


def _attempts(folder: Path) -> int:
    if (folder / "rendezvous").is_dir():
        return elastic.attempts(folder)
    output = read_json(folder / "nodes" / "0" / "exit.json") or read_json(folder / "nodes" / "0" / "attempts.json")
    return int((output or {"attempts": 1})["attempts"])


MIRRORED_POLL_SECONDS = 2.0
"""Each look lists the job's folder in the store, too."""
CANCEL_SECONDS = 60.0
STOP_WAIT_SECONDS = 45
"""For the driver to end all machines' parts before Ray kills it; the ranks have 30 s of it, Ray's own default is 3 s."""


class RayBackend:
    """A Ray cluster. State: the open clients, by address, and of mirrored jobs what is known of their folders."""

    poll_seconds = 1.0

    def __init__(self, config: ClusterConfig, files: OpenFiles | None = None) -> None:
        """`files` gives the container of a store by its name, where `cluster.mirror` names one. Raises ValueError."""
        self._config = config
        self._mirrored = MirroredFolders(config.mirror, files(config.mirror.store)) if config.mirror and files else None
        self._clients: dict[str, RayJobs] = {}
        if self._mirrored:
            self.poll_seconds = MIRRORED_POLL_SECONDS

    def render(self, job: Job, folder: Path) -> Rendered:
        if self._mirrored:
            spec = mirrored_spec(job, folder, self._config.ray, self._mirrored)
            entrypoint = mirrored_driver(job, folder, self._mirrored)
        else:
            spec = driver_spec(job, folder, self._config.ray)
            entrypoint = f"exec {shlex.join([python(job), '-m', 'tasks.jobs.ray.driver', str(folder)])}"
        environment = {**node_environment(job), "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)}
        request = {
            "submission_id": job.submission_id,
            "entrypoint": entrypoint,  # by exec: no shell stays between Ray and the driver
            "runtime_env": {"env_vars": environment},
            "metadata": {"headway_job": job.id, "headway_token": job.token, "headway_submission": str(job.submission)},
        }
        return Rendered(backend="ray", files={"ray.json": json.dumps(spec, indent=1)}, request=request)

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        rendered = self.render(job, folder)
        address = self._config.ray.address or start_local_cluster(home()).address
        with process.locked(folder / "submit.lock"):
            existing = self._find(job.submission_id, address)
            if existing:
                return existing
            write_nodes(job, folder)
            shutil.rmtree(folder / "rendezvous", ignore_errors=True)  # an earlier submission's
            if job.elastic:
                process.write_json(folder / "rendezvous" / "process.json", asdict(elastic.spec(job, folder)))
            for name, text in rendered.files.items():
                process.write_text(folder / name, text)
            request = dict(rendered.request or {})
            if self._mirrored:
                with before_submission():
                    self._mirrored.send(job, folder)
                # Ray gives it to the driver and to every actor of the job; the mirrors take it out of what programs get.
                variables = {**request["runtime_env"]["env_vars"], FOLDER_KEY: key_of(folder).decode()}
                request["runtime_env"] = {"env_vars": variables}
            try:
                self._client(address).submit_job(**request)
            except OSError as error:
                raise unreachable(address, error) from error
            except RuntimeError as error:
                existing = self._find(job.submission_id, address)
                if not existing:
                    raise refused(error, folder) from error
        return _handle(job.submission_id, address)

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        local = None if self._config.ray.address else living_cluster(home())
        address = self._config.ray.address or (local.address if local else "")
        return self._find(job.submission_id, address) if address else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        payload = {address: self._told(address) for address in {handle["address"] for handle, _ in jobs}}
        return [self._state(handle, folder, payload[handle["address"]]) for handle, folder in jobs]

    def _state(self, handle: dict[str, Any], folder: Path, payload: Told) -> JobState:
        if not self._mirrored:
            return state_of(handle, folder, payload)
        return self._mirrored.state(folder, lambda: state_of(handle, folder, payload))

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        """Raises Missing when the cluster does not answer, JobFailed when the job does not end."""
        address, name = handle["address"], handle["submission_id"]
        if self._gone(address):
            return
        if why := self._elsewhere(address):
            raise Missing(why, remedy="Run the command with the settings of the cluster that the job was started with.")
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
        answer = self._told(address)
        if answer.jobs is None and not answer.gone:
            raise unreachable(address, OSError(answer.why))
        return _handle(name, address) if name in (answer.jobs or {}) else None

    def _told(self, address: str) -> Told:
        """What the cluster says of all jobs, in one call."""
        if self._gone(address):
            return Told(gone=True)
        if why := self._elsewhere(address):
            return Told(why=why)
        try:
            jobs = self._client(address).list_jobs()
        except (OSError, RuntimeError) as error:
            return Told(why=str(error))
        return Told(jobs={job.submission_id: job for job in jobs if job.submission_id})

    def _gone(self, address: str) -> bool:
        """Whether it was a cluster of this machine that has ended."""
        local = None if self._config.ray.address else living_cluster(home())
        return not self._config.ray.address and (local is None or local.address != address)

    def _elsewhere(self, address: str) -> str:
        """Why a cluster is not asked: the settings name another one. A handle lies in the store, and whoever can write to it
        would be
        sent the cluster's token."""
        named = self._config.ray.address
        same = not named or address == named
        return "" if same else f"the job was submitted to {address}, and cluster.ray.address is {named}"

    def _client(self, address: str) -> RayJobs:
        if address not in self._clients:
            local = None if self._config.ray.address else living_cluster(home())
            self._clients[address] = RayJobs(address, local.token if local else "")
        return self._clients[address]


def _handle(name: str, address: str) -> dict[str, Any]:
    return {"submission_id": name, "address": address}
