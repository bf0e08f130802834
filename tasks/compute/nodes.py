"""What a backend starts on each machine of a job, as values: tasks/jobs/node/__main__.py under the parent of
tasks/common/process.py; and how the marks that it leaves in the job folder are read.

The parent of node rank 0 counts the attempts and ends the job: its `nodes/0/exit.json` is how the submission ended. The others
are started again until then.

What a backend can say and do about its machines beside running jobs: count them, drain them, look whether they answer.

A backend's section (tasks/config/backends) names its own subclass of `Machines`, and declares what cannot be done. What a failed
machine of Azure needs elsewhere is rendered, and never sent: tasks/compute/azureml/support_requests.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.common import process
from tasks.common.errors import IntegrityError, Missing
from tasks.common.home import home
from tasks.compute.job import Job, JobState, write_folder
from tasks.config.cluster import ClusterConfig
from tasks.hardware.sku import nccl_environment

Finding = tuple[str, bool, str, str]
"""Name, whether it is in order, what was seen, the remedy."""


def network_finding(name: str, size: str, remedy: str) -> Finding:
    """Whether the hardware files know a VM size, by which NCCL's variables are set."""
    try:
        return name, True, f"{size}: {len(nccl_environment(size, home() / 'hardware'))} variables of NCCL", ""
    except ValueError as error:
        return name, False, str(error), remedy


class Drained(BaseModel):
    """What became of one machine."""

    model_config = ConfigDict(frozen=True)

    node: str
    done: bool
    said: str
    """The scheduler's state and reason now, or why nothing changed."""


class Machines:
    """The answers of a backend that knows nothing of its machines and cannot drain them."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config

    def findings(self) -> Iterator[Finding]:
        """What `headway doctor` says of them; never raises. The packages that the backend needs are installed."""
        yield from ()

    def usable(self) -> set[str] | None:
        """Names of those that may take a job, busy ones too; None where nobody can say. Raises Missing without an answer."""
        return None

    def execute(self, node: str, script: str, *, handle: Mapping[str, Any]) -> None:
        """Run a script of sh on a machine, by its name, of the running job of a handle, as the user whose job it is.

        For rehearsals, which make a job's own processes fail. Raises Missing when it cannot be run, or ends with an error.
        """
        raise Missing(
            f"backend {self.config.backend} runs nothing beside a job on its machine {node}",
            remedy="Rehearse this on another backend.",
        )

    def count(self, only: Collection[str] = ()) -> int | None:
        """How many may take a job, of some only where they are named; None where nobody can say. Raises Missing."""
        existing = self.usable()
        return None if existing is None else len(existing & set(only) if only else existing)

    def drain(self, reasons: Mapping[str, str]) -> tuple[Drained, ...]:
        """Take machines out of service, each for its reason. Never raises: no rights, no answer are in what it says."""
        why = self.config.capabilities.cannot_drain
        return tuple(Drained(node=name, done=False, said=why) for name in reasons)

    def resume(self, nodes: Iterable[str] = ()) -> tuple[Drained, ...]:
        """Put machines back that Headway drained; without names all of them. Raises ValueError where that cannot be, Missing."""
        why = self.config.capabilities.cannot_drain
        raise ValueError(f"backend {self.config.backend} has no drained machines: {why}")


def execute_on_this_machine(node: str, script: str) -> None:
    """What `Machines.execute` does where the machine is this one."""
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    require_executed(node, ran.returncode, ran.stderr)


def require_executed(node: str, code: int, output: str) -> None:
    """Raise Missing for a script of `Machines.execute` that ended with an error."""
    if code:
        raise Missing(
            f"a script on machine {node} ended with exit code {code}: {output.strip() or 'no output'}",
            remedy="Check that the machine runs the job, and that commands run on it by hand.",
        )


AGENT_SECONDS = 20.0
"""What a machine's agent has to end by itself when it is stopped, after the grace that it gives its ranks."""
FOLLOWS = 1000
"""Restarts of a machine that follows: it ends when the leader has."""
ROOT = str(Path(__file__).resolve().parents[2])


def python(job: Job) -> str:
    """Python on the machines."""
    return job.python or ("python3" if job.image else sys.executable)


def write_nodes(job: Job, folder: Path, *, seen: Path | None = None, machines: int = 0) -> None:
    """Write the job folder of a job that runs under one parent a machine; `seen` is the folder as the machines see it.

    An elastic job may choose among more machines than it has at a time; `machines` is how many (0: as many as it has)."""
    write_folder(job, folder)
    most = job.elastic.max_nodes if job.elastic else job.nodes
    for rank in range(machines or most):
        process.write_json(folder / "nodes" / str(rank) / "process.json", asdict(node_spec(job, seen or folder, rank)))


def node_spec(job: Job, folder: Path, rank: int) -> process.ProcessSpec:
    """What the parent on one machine is told."""
    leads = rank == 0 or job.elastic is not None
    return process.ProcessSpec(
        argv=[python(job), "-m", "tasks.jobs.node", str(folder)],
        env={"HEADWAY_NODE_RANK": str(rank), "HEADWAY_SUBMISSION": str(job.submission)},
        secrets=(),
        log="node.log",
        restarts=job.restarts if leads else FOLLOWS,
        progress=f"../../{job.progress}" if job.progress else "",
        fatal="../../errors",
        time_limit=job.time_limit,
        grace=job.watch.grace_seconds + AGENT_SECONDS,
        owner=job.submission_id,
        afterwards=clean_up(job, folder, rank),
    )


def clean_up(job: Job, folder: Path, rank: int) -> list[str]:
    """What the parent runs on its machine when the job is over there."""
    return [python(job), "-m", "tasks.jobs.node.scratch", str(folder), str(rank)] if job.scratch else []


def node_command(job: Job, folder: Path, rank: int | str) -> list[str]:
    """What is executed on one machine, in the foreground, with HEADWAY_LEADER and HEADWAY_NODE_NAME in its environment.

    `rank` may be a variable of the shell that runs it.
    """
    return [python(job), "-m", "tasks.common.process", f"{folder}/nodes/{rank}"]


def node_environment(job: Job) -> dict[str, str]:
    """What every machine's parent gets, whatever the backend; outside an image, where Headway's code is too.

    Raises ValueError for a VM size of which nothing is known.
    """
    path = {} if job.image else {"PYTHONPATH": ROOT}
    return {**network_environment(job), **path, "PYTHONSAFEPATH": "1"}


def network_environment(job: Job) -> dict[str, str]:
    """NCCL's variables for the machines' VM size, by the files of tasks/hardware and of the home.

    Raises ValueError for a size of which nothing is known.
    """
    return nccl_environment(job.size, home() / "hardware") if job.size else {}


def read_mark(path: Path) -> dict[str, Any]:
    """What a small JSON file of a job folder says; nothing when it is not there, not whole (a machine that died, a share that
    lags), or no object."""
    try:
        output = process.read_json(path)
    except (OSError, ValueError, IntegrityError):
        return {}
    return output if isinstance(output, dict) else {}


def ended_state(folder: Path) -> JobState | None:
    """How a submission ended, by the leader's mark; None while there is none."""
    ended = process.read_json(folder / "nodes" / "0" / "exit.json")
    if not ended:
        return None
    return JobState(state="ended", code=ended["code"], reason=ended["reason"], attempts=ended["attempts"])
