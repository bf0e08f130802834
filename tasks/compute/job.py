"""A job as data, and what a backend must do with it.

A job is one submission of a program. Its folder is the whole contract with the program (docs/compute.md, "The job folder";
tasks/jobs/node/runtime.py has the rank's side, tasks/jobs/node/__main__.py the machine's). How a job is supervised lives in
supervisor.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tasks.common.claims import Claims
from tasks.common.errors import Missing
from tasks.common.process import write_json
from tasks.config.base import NodeName, digest
from tasks.config.cluster import ElasticConfig, RetryConfig, ScratchConfig, WatchConfig

Failure = Literal[
    "user",
    "integrity",
    "missing",
    "diverged",
    "limit",
    "cancelled",
    "out_of_memory",
    "infrastructure",
    "node",
    "preempted",
    "timeout",
]
"""Classes of failure; what is retried, and how, is tasks/compute/failures.json."""


class Admission(BaseModel):
    """What a machine of an elastic job must show by itself before it joins, where it did not prove itself before the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    proven: tuple[NodeName, ...]
    """Machines that qualified before the job: they join as they are."""
    settings: dict[str, Any]
    """Of the program that measures the others, tasks/jobs/benchmark.py; each measures itself."""


class Job(BaseModel):
    """What to run. Two jobs with one token are the same work; a different spec under one token is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """The stage, or what `headway submit` calls it."""
    token: str
    """Derived from the stage's key."""
    program: str
    """A module, or with `module` false the path of a program of the user's own."""
    module: bool = True
    driver: bool = False
    """Whether the program is one process that starts its own others, such as a script that calls `ray.init()`: Ray's only."""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Verified folders by name."""
    artifacts: dict[str, str] = {}
    """The same inputs as references KIND/NAME@VERSION, for a job that fetches them itself."""
    by_range: dict[str, tuple[str, ...]] = Field({}, exclude_if=lambda value: not value)
    """Files that it does not fetch, as patterns by the input's name: it reads parts of them in the store, each part verified."""
    nodes: int = 1
    ranks_per_node: int = 1
    threads_per_rank: int = 1
    gpus_per_node: int = 0
    size: str = ""
    """VM size of the machines, for NCCL's environment and topology file; empty: neither is set."""
    cpus_per_node: int | None = None
    """Cores that it may use on a machine."""
    memory_gib: float | None = None
    """A node."""
    time_limit: float | None = None
    """Seconds that one submission may run."""
    image: str = ""
    python: str = ""
    environment: dict[str, str] = {}
    exclusive: bool = False
    preemptible: bool = False
    excluded_nodes: tuple[NodeName, ...] = ()
    only_nodes: tuple[NodeName, ...] = ()
    """The machines that it may run on, such as those that proved themselves; none: any. Azure ML and local choose none."""
    launcher: Literal["torchrun", "mpi"] = "torchrun"
    elastic: ElasticConfig | None = None
    admission: Admission | None = Field(None, exclude_if=lambda value: value is None)
    """Of an elastic job: who may join it; None: whatever machine it gets of those that it may run on."""
    scratch: ScratchConfig | None = None
    watch: WatchConfig = WatchConfig()
    retry: RetryConfig | None = RetryConfig()
    """None: one submission, whatever becomes of it."""
    restarts: int = 2
    """Restarts on the same machines in a row without progress, within one submission."""
    progress: str = ""
    """A file of the job folder whose content changes with progress."""
    smaller_batches: int = 0
    """How often the micro batch is halved, because the job ran out of memory; the program reads it from its settings."""
    array: int = 0
    """Elements of embarrassingly parallel work, on Slurm: each is the whole job once, with its number in HEADWAY_ARRAY_INDEX, in
    `elements/N` of the job folder. 0: no array."""
    submission: int = 1
    """Which submission under the token this is; counts from 1."""
    home: str = Field("", pattern="^[0-9a-f]*$", exclude_if=lambda value: not value)
    """What tells the home that submits it from others, which may do the same work under the same account; empty for a submission
    of an earlier release."""

    @property
    def spec_digest(self) -> str:
        """Of what the job is, without what a further submission of it may change."""
        may_change = {"submission", "home", "excluded_nodes", "only_nodes", "admission", "smaller_batches", "size"}
        return digest(self.model_dump(mode="json", exclude=may_change))

    @property
    def fewest_nodes(self) -> int:
        """Machines without which it does not run."""
        return self.elastic.min_nodes if self.elastic else self.nodes

    @property
    def id(self) -> str:
        """Name of the work: every submission of it has this one."""
        return f"{self.name}-{self.token[:12]}"

    @property
    def submission_id(self) -> str:
        """Name of one submission, the one that schedulers know: found again by it after a crash, and cancelled by it."""
        home = f"-{self.home}" if self.home else ""
        return f"headway-{self.id}{home}-{self.submission}"


class JobState(BaseModel):
    """What a backend knows of a job.

    `queued`: the scheduler has it; `starting`: its machines boot or pull the image; `running`; `ended`, with a code;
    `lost`: it was there, and is gone without a word; `unknown`: the scheduler gives no answer now.
    """

    model_config = ConfigDict(frozen=True)

    state: Literal["queued", "starting", "running", "ended", "lost", "unknown"]
    code: int | None = None
    reason: str = ""
    """How it ended in a word (ended, cancelled, timeout), or why it waits, in the scheduler's words."""
    attempts: int = 1
    failure: Failure | None = None
    """The class, where the scheduler or the machine says it."""
    failed_nodes: tuple[str, ...] = ()
    """Machines that it names as the cause."""

    @property
    def over(self) -> bool:
        return self.state in ("ended", "lost")


class JobResult(BaseModel):
    """A job that ended with a result."""

    model_config = ConfigDict(frozen=True)

    id: str
    folder: str
    submissions: int
    attempts: int
    adopted: bool
    resumed_from_step: int | None = None
    excluded_nodes: tuple[str, ...] = ()
    result: dict[str, Any]

    @property
    def output(self) -> Path:
        return Path(self.folder) / "out"

    def summary(self) -> dict[str, Any]:
        """What the command line prints of a job."""
        return self.model_dump(mode="json", exclude={"result"})


class Journal(Protocol):
    """Where intents and handles are kept, so that they outlive the orchestrator."""

    @property
    def claims(self) -> Claims | None:
        """What several hosts on one store claim from each other; None where only one works."""
        ...

    def put(self, key: str, value: dict[str, Any]) -> bool:
        """Create-only; False when the key exists."""
        ...

    def get(self, key: str) -> dict[str, Any] | None: ...

    def list(self, prefix: str) -> list[str]: ...


class Rendered(BaseModel):
    """What would be submitted, whole, as a value: `headway job render` prints it, and `submit` sends nothing else."""

    model_config = ConfigDict(frozen=True)

    backend: str
    command: tuple[str, ...] = ()
    """What is executed to submit it."""
    environment: dict[str, str] = {}
    """What the command gets beside the environment of whoever starts it."""
    files: dict[str, str] = {}
    """Texts that are written into the job folder, by name: a batch script, a YAML."""
    request: dict[str, Any] | None = None
    """Body of the request, of a backend that has an API."""


class NotAccepted(Missing):
    """Something was missing before the scheduler was asked to take the job: it has nothing of it."""

    def __init__(self, reason: Missing, *, final: bool = False) -> None:
        """`final`: the answer would be the same later, so nobody waits for another one."""
        super().__init__(reason.message, remedy=reason.remedy)
        self.reason, self.final = reason, final


@contextmanager
def before_submission() -> Iterator[None]:
    """Around what a backend does before it hands a job to the scheduler: raises NotAccepted in place of Missing."""
    try:
        yield
    except Missing as error:
        raise NotAccepted(error) from error


class Backend(Protocol):
    """Five methods. Whatever a backend stands on, the job folder on this side is up to date after `states` returned.

    On each machine a job starts `node_command(job, folder, rank)` with `node_environment(job)`, `HEADWAY_LEADER` and
    `HEADWAY_NODE_NAME`; what follows is tasks/jobs/node/__main__.py, the same on every backend. Retries, the detection of
    hangs and further submissions are the supervisor's. tasks/compute/local.py is the shortest backend.

    Errors: ValueError for what the user must change (unknown partition, too many nodes), Missing for what is absent (a
    command, a login, a shared folder, quota), JobFailed when the scheduler refused for another reason. `submit` raises
    NotAccepted for what it misses before the scheduler is asked. A scheduler that does not answer is no error of `states`: it
    says `unknown`.
    """

    poll_seconds: float
    """Time between two looks at the scheduler; files are looked at more often."""

    def render(self, job: Job, folder: Path) -> Rendered:
        """Everything that will be submitted, as a value: nothing is asked or changed."""
        ...

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        """Submit what `render` gives, under `job.submission_id`; returns the handle, plain JSON."""
        ...

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        """The handle of what was submitted under `job.submission_id`; None when the scheduler does not have it.

        Raises Missing when the scheduler does not answer: no answer is not an absence.
        """
        ...

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        """The state of each job of (handle, folder), by one call of the scheduler; `ended_state(folder)` is how one ended.

        `lost` is a job that is gone without a word, `unknown` one whose scheduler does not answer.
        """
        ...

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        """End the job and all of its processes; returns when they are gone or the scheduler took it over."""
        ...


WRITTEN_HERE = (
    "job.json",
    "config.json",
    "cluster.json",
    "job.sbatch",
    "ssh.json",
    "ssh.lock",
    "program",
    "supervisor.json",
    "supervisor.lock",
    "submissions",
    "settled.json",
)
"""Names at the top of a job folder that are written where jobs are submitted, and never brought from where they run."""


def require_enough(job: Job) -> None:
    """Raise ValueError when the machines that a job may run on do not suffice any more, because some of them failed since."""
    left = [name for name in job.only_nodes if name not in job.excluded_nodes]
    if not job.only_nodes or len(left) >= job.fewest_nodes:
        return
    gone = [name for name in job.only_nodes if name in job.excluded_nodes]
    without = f" without {', '.join(gone)}" if gone else ""
    raise ValueError(
        f"{job.name} needs {job.fewest_nodes} machines, and of those that qualified {len(left)} are left{without}: "
        f"{', '.join(left) or 'none'}. Qualify others: `headway qualify`, with benchmark.spare_nodes more than the job needs"
    )


def write_folder(job: Job, folder: Path) -> None:
    """The launcher's half of the job folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "program": job.program,
            "settings": {
                **job.settings,
                **({"smaller_batches": job.smaller_batches} if job.smaller_batches else {}),
                **({"elastic": True} if job.elastic else {}),
            },
            "inputs": job.inputs,
            "name": job.name,
        },
    )
    write_json(folder / "job.json", job.model_dump(mode="json"))
