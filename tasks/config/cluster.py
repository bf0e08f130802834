"""Where jobs run, as settings: the machines of a job, what is retried, and which backends there are.

What does not live here: a backend's own section and what it can do (tasks/config/backends), the other stages' sections
(tasks/config/flows.py), and what a backend makes of its section (tasks/compute). A field's docstring is its help text, in
docs/configuration.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from tasks.config.backends import BackendSettings, Capabilities
from tasks.config.backends.azureml import AzureMlConfig
from tasks.config.backends.local import LocalConfig
from tasks.config.backends.ray import RayConfig
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.backends.ssh import SshConfig
from tasks.config.base import Name, NodeName, Positive, Settings

RANGE = re.compile(r"(\d+):(\d+)")
BRACKETS = re.compile(r"<[A-Za-z][\w .-]*>")
"""What a template has where its reader is to write something: <workspace>."""
BackendName = Literal["local", "ssh", "slurm", "azureml", "ray"]
BACKENDS: dict[str, Capabilities] = {
    "local": LocalConfig.capabilities,
    "ssh": SshConfig.capabilities,
    "slurm": SlurmConfig.capabilities,
    "azureml": AzureMlConfig.capabilities,
    "ray": RayConfig.capabilities,
}
"""What each backend declares."""


def backends_with(able: Callable[[Capabilities], bool]) -> str:
    """Names of the backends of which something holds, for messages."""
    return " or ".join(name for name, capabilities in BACKENDS.items() if able(capabilities))


def on_this_machine(backend: str) -> bool:
    """Whether jobs of a backend, as a record names it, are processes of the machine that submitted them."""
    return backend in BACKENDS and BACKENDS[backend].this_machine


def machine_size(cluster: Mapping[str, Any]) -> str:
    """The VM size that a recorded cluster's sections name, that of its own backend first; empty where none does."""
    own_first = sorted(BACKENDS.items(), key=lambda item: item[0] != cluster.get("backend"))
    named = ((cluster.get(name) or {}).get(one.size_setting) for name, one in own_first if one.size_setting)
    return next((str(size) for size in named if size), "")


def elastic_refusal(backend: str) -> str:
    """Why a backend takes no elastic jobs; empty when it does."""
    row = BACKENDS[backend].elasticity
    able = backends_with(lambda one: not one.elasticity.refused)
    return (
        f"backend {backend} takes no elastic jobs: {row.how}. Leave elastic empty, or use backend {able}"
        if row.refused
        else ""
    )


def elasticity_table() -> str:
    """What each backend can do when machines come and go, as Markdown; docs/elastic.md prints it."""
    lines = [
        "| backend | grows | shrinks | survives the loss of the first node | how, or why not |",
        "|---|---|---|---|---|",
    ]
    for name, row in ((name, one.elasticity) for name, one in BACKENDS.items()):
        flags = (row.grows, row.shrinks, row.survives_first)
        words = ["refused"] * 3 if row.refused else ["yes" if flag else "no" for flag in flags]
        lines.append(f"| {name} | {' | '.join(words)} | {row.how} |")
    return "\n".join(lines)


class ElasticConfig(Settings):
    """A job that may run on fewer machines than it wants, and takes more as they come."""

    min_nodes: Positive = 1
    """Machines without which it does not train."""
    max_nodes: Positive = 1
    """Machines that it takes at most."""
    address: str = ""
    """Name or address under which machines reach the one where they meet, which jobs are submitted from; empty: its host name.
    On Ray they meet on its head; empty: the address that Ray has of it."""

    @model_validator(mode="after")
    def _in_order(self) -> ElasticConfig:
        if self.min_nodes > self.max_nodes:
            raise ValueError(f"min_nodes {self.min_nodes} must not be above max_nodes {self.max_nodes}")
        return self


class ScratchConfig(Settings):
    """A fast disk of each machine, for a job's inputs."""

    path: str = "/mnt/resource_nvme"
    """Folder on the machine's own disk, such as local NVMe. The job makes a folder of its own in it, and deletes that again."""
    size_gib: float = Field(100.0, gt=0)
    """Room that the job needs there, in GiB; less is an error before anything is copied."""
    required: bool = Field(True, exclude_if=lambda wanted: wanted)
    """Whether a job ends where that folder or its room is missing; with `false` it continues without and logs a warning."""
    beeond: bool = False
    """Whether the machines' disks are joined into one BeeGFS on demand (BeeOND) for the job; of Slurm only."""


class MirrorConfig(Settings):
    """A job's folder in Azure Blob, and on the own disk of each machine: for machines that share no folder."""

    store: str = ""
    """Store of stores.yaml whose container the folders of jobs lie in; empty: the home's own. On azureml: azureml.store."""
    credential: Literal["managed_identity", "cli", "connection_string"] = "managed_identity"
    """How machines authenticate to it; `connection_string` is read there from the variable that the store's `secret` names."""
    client: str = ""
    """Client id of a managed identity that a user assigned; empty: the machine's only one."""
    max_lag_minutes: float = Field(30.0, gt=0)
    """Longest time from a checkpoint's snapshot until it is in the store; one that takes longer counts as a save that failed."""


class RetryConfig(Settings):
    """What happens when a job fails. Which class of failure is retried is a table: docs/compute.md."""

    attempts: Positive = 3
    """Submissions in a row without progress after which the job has failed."""
    back_off_seconds: float = Field(10.0, ge=0)
    """Wait before the second submission; it doubles with each further one."""
    max_back_off_seconds: float = Field(600.0, ge=0)
    """Longest wait between two submissions."""
    smaller_batch: bool = False
    """Whether a job that ran out of memory is tried again with half the micro batch; the global batch stays."""


class WatchConfig(Settings):
    """What is looked at while a job runs."""

    hang_seconds: float = Field(10.0, gt=0)
    """A job whose steps stop for this long, and for `hang_factor` usual steps, hangs."""
    hang_factor: float = Field(5.0, ge=1)
    """Usual steps (their median) that a step may take before the job hangs."""
    start_minutes: float = Field(30.0, gt=0)
    """Longest time from a job's start on its machines to its first step; nodes that boot are not counted."""
    probe_seconds: float = Field(120.0, gt=0)
    """Time between two light health checks of each machine: Xid, ECC, throttling, links."""
    silent_node_seconds: float = Field(60.0, gt=0)
    """Time without a sign of life after which a machine of a running job is gone; longer than a shared folder's caches."""
    join_node_seconds: float = Field(600.0, gt=0)
    """Longest time that the machines of a job wait for each other when it starts."""
    grace_seconds: float = Field(10.0, gt=0)
    """Time that ranks have to end by themselves, when others are gone or the job is stopped, before they are killed."""
    silent_minutes: float = Field(10.0, gt=0)
    """Time without any answer from the scheduler after which the run reports it and keeps waiting; the job is never given up."""


class DataConfig(Settings):
    """Machines of the jobs that read a corpus: validate, preprocess, drift. They compute on the CPU, one process a machine."""

    nodes: Positive = 1
    """Machines that share the corpus; the result is the same for any number."""
    threads: Positive | None = None
    """Threads on a machine; empty: as a training job's ranks have together."""
    pool: str = ""
    """Slurm partition or Azure ML compute of these machines, so that no GPU waits for them; empty: where training runs."""


class EvaluationMachinesConfig(Settings):
    """Machines of the jobs that measure a model: evaluate. They share its text and suites by batches."""

    nodes: Positive = 1
    """Machines that share the work; the figures are the same for any number."""
    ranks_per_node: Positive = 1
    """Processes a machine, one a GPU where it has GPUs; they share the threads that training has there."""
    shard: Literal["auto", "always", "never"] = "auto"
    """Whether all ranks together hold the model, each its share of every block. `auto`: where a GPU has no room for the whole."""

    @model_validator(mode="after")
    def _has_several(self) -> EvaluationMachinesConfig:
        if self.shard == "always" and self.nodes * self.ranks_per_node == 1:
            raise ValueError(
                "evaluation.shard is always, and one rank has nobody to share the model with: raise "
                "cluster.evaluation.ranks_per_node or cluster.evaluation.nodes, or leave it auto"
            )
        return self


class ClusterConfig(Settings):
    """Where jobs run."""

    name: Name = "local"
    """Name under which qualifications of this cluster are kept."""
    backend: BackendName = "local"
    """What jobs are submitted to."""
    nodes: Positive = 1
    """Machines of a training job; `data.nodes` are those of jobs that read a corpus, `evaluation.nodes` of those that measure a
    model, other jobs run on one.

    A range, as `1:8`, is short for `elastic`'s least and most.
    """
    ranks_per_node: Positive = 2
    """Processes a machine: one a GPU, or one a core."""
    threads_per_rank: Positive = 1
    """Threads that one rank may compute with."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs a machine; 0: ranks compute on the CPU."""
    cpus_per_node: Positive | None = None
    """Cores that a job may use on a machine, of the backends local and ssh; empty: all."""
    memory_gib: float | None = Field(None, gt=0)
    """Memory that a job may use on a machine, in GiB; empty: no limit but the machine's."""
    time_limit_minutes: float | None = Field(None, gt=0)
    """Longest time that one submission may run; empty: no limit but the scheduler's."""
    image: str = ""
    """Container image of jobs: pyxis' --container-image, Azure ML's environment. Empty: plain processes."""
    python: str = ""
    """Python on the machines that has Headway installed; empty: the one that runs here, or `python3` inside an image."""
    environment: dict[str, str] = Field(default={})
    """Further environment variables of jobs. No secrets: they are written into the job's folder."""
    exclusive: bool = False
    """Whether a job has its machines alone."""
    exclude: tuple[NodeName, ...] = ()
    """Machines that no job runs on."""
    preemptible: bool = False
    """Whether jobs run on machines that may be taken away: Azure ML's low priority tier, spot VMs."""
    launcher: Literal["torchrun", "mpi"] = "torchrun"
    """What starts the ranks: torchrun, or Open MPI's mpirun."""
    elastic: ElasticConfig | None = None
    """Range of machines that a training job may run on; empty: exactly `nodes`."""
    scratch: ScratchConfig | None = None
    """Fast disk of each machine that inputs are copied to; empty: they are read where they are."""
    mirror: MirrorConfig | None = Field(None, exclude_if=lambda mirror: mirror is None)
    """Store that job folders lie in, with a mirror on each machine's disk; empty: all machines share the folder."""
    data: DataConfig = Field(DataConfig(), exclude_if=lambda data: data == DataConfig())
    evaluation: EvaluationMachinesConfig = Field(
        EvaluationMachinesConfig(), exclude_if=lambda machines: machines == EvaluationMachinesConfig()
    )
    retry: RetryConfig = RetryConfig()
    watch: WatchConfig = WatchConfig()
    ssh: SshConfig = SshConfig()
    slurm: SlurmConfig = SlurmConfig()
    azureml: AzureMlConfig = AzureMlConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="before")
    @classmethod
    def _range_of_nodes(cls, given: Any) -> Any:
        match = RANGE.fullmatch(str(given.get("nodes"))) if isinstance(given, dict) else None
        if not match:
            return given
        least, most = (int(number) for number in match.groups())
        rest = {key: value for key, value in given.items() if key != "nodes"}
        return {**rest, "elastic": {**(rest.get("elastic") or {}), "min_nodes": least, "max_nodes": most}}

    @property
    def world_size(self) -> int:
        """Ranks of a training job; of an elastic one, at most."""
        return (self.elastic.max_nodes if self.elastic else self.nodes) * self.ranks_per_node

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Every number of ranks that a training job may have."""
        least, most = (self.elastic.min_nodes, self.elastic.max_nodes) if self.elastic else (self.nodes, self.nodes)
        return tuple(nodes * self.ranks_per_node for nodes in range(least, most + 1))

    @property
    def section(self) -> BackendSettings:
        """The settings of the backend that jobs are submitted to."""
        section: BackendSettings = getattr(self, self.backend, LocalConfig())
        return section

    @property
    def for_data(self) -> ClusterConfig:
        """The same for jobs that read a corpus: `data` in the place of training's machines, without GPUs."""
        can, own = self.capabilities, self.data
        section = self.section
        if own.pool:
            section = section.model_copy(
                update={can.pool_setting: own.pool, **({can.size_setting: ""} if can.size_setting else {})}
            )
        return self.model_copy(
            update={
                "nodes": own.nodes,
                "ranks_per_node": 1,
                "threads_per_rank": own.threads or self.ranks_per_node * self.threads_per_rank,
                "gpus_per_node": 0,
                "launcher": "torchrun",
                "elastic": None,
                self.backend: section,
            }
        )

    @property
    def for_evaluation(self) -> ClusterConfig:
        """The same for jobs that measure a model: `evaluation` in the place of training's machines and ranks."""
        own = self.evaluation
        return self.model_copy(
            update={
                "nodes": own.nodes,
                "ranks_per_node": own.ranks_per_node,
                "threads_per_rank": max(1, self.ranks_per_node * self.threads_per_rank // own.ranks_per_node),
                "launcher": "torchrun",
                "elastic": None,
            }
        )

    @property
    def capabilities(self) -> Capabilities:
        """What that backend can do."""
        return BACKENDS[self.backend]

    @property
    def jobs_see_home(self) -> bool:
        """Whether the machines reach Headway's home by the path that it has on this machine."""
        return self.mirror is None and self.section.jobs_see_home

    @property
    def shares_folder(self) -> bool:
        """Whether the machines of a job have its folder in common."""
        return self.capabilities.shared_folder and self.mirror is None

    @property
    def size(self) -> str:
        """VM size of the machines, where a section names it."""
        sections = {name: dict(section) for name, section in self if isinstance(section, BackendSettings)}
        return machine_size({**sections, "backend": self.backend})

    @property
    def placeholders(self) -> list[str]:
        """Settings that still have the placeholders of the shipped configuration, or one in angle brackets, as `NAME (VALUE)`."""
        shipped = self.capabilities.placeholders
        own = {name: value for name, value in self if isinstance(value, str)}
        texts = {**own, **{f"{self.backend}.{name}": value for name, value in self.section if isinstance(value, str)}}
        return [
            f"cluster.{name} ({value})"
            for name, value in texts.items()
            if shipped.get(name) == value or BRACKETS.search(value)
        ]

    def require_own(self) -> None:
        """Raise ValueError for settings that still have placeholders."""
        if kept := self.placeholders:
            raise ValueError(
                f"{', '.join(kept)} still {'has the placeholder' if len(kept) == 1 else 'have the placeholders'} of the shipped "
                "configuration: set your own, with --set or in a file of yours as the last -c of the command"
            )

    @model_validator(mode="after")
    def _backend_mirrors(self) -> ClusterConfig:
        can = self.capabilities
        if self.mirror and can.cannot_mirror:
            able = backends_with(lambda one: not one.cannot_mirror)
            raise ValueError(
                f"backend {self.backend} takes no cluster.mirror: {can.cannot_mirror}. Leave mirror empty, or use backend {able}"
            )
        if self.mirror and self.mirror.store and not can.shared_folder:
            raise ValueError(
                f"backend {self.backend} mirrors to the store of {self.backend}.store: name it there, leave mirror.store empty"
            )
        if self.mirror and can.shared_folder and self.launcher == "mpi":
            raise ValueError("launcher mpi needs a folder that machines share: use torchrun, or leave mirror empty")
        if self.mirror and self.elastic:
            raise ValueError(
                "the machines of an elastic job meet in a folder that they share: leave elastic or mirror empty"
            )
        if self.mirror and self.scratch and self.scratch.beeond:
            raise ValueError(
                "scratch.beeond is true, and with mirror each machine has the job's folder on its own disk: set it to false"
            )
        if self.mirror and can.shared_folder and not self.section.jobs_see_home:
            raise ValueError(
                f"{self.backend}.shared names a folder that nodes share, and with mirror they share none: leave one empty"
            )
        return self

    @model_validator(mode="after")
    def _backend_can(self) -> ClusterConfig:
        """What a section lacks is an error before anything is spent."""
        can = self.capabilities
        if self.elastic and (reason := elastic_refusal(self.backend)):
            raise ValueError(reason)
        if can.this_machine and self.nodes > 1:
            *others, last = (name for name, other in BACKENDS.items() if not other.this_machine)
            raise ValueError(
                f"backend {self.backend} has one machine, nodes is {self.nodes}: use ranks_per_node, or backend "
                f"{', '.join(others)} or {last}"
            )
        self._require_data_machines()
        self.section.require_complete()
        setting = can.environment_setting
        if setting and not (self.image or getattr(self.section, setting)):
            raise ValueError(
                f"backend {self.backend} needs to know what jobs run in: set cluster.image to an image that has Headway "
                f"(docs/containers.md), or cluster.{self.backend}.{setting} to an environment with Python 3.11 or later"
            )
        if self.launcher == "mpi" and self.elastic:
            raise ValueError("launcher mpi cannot be elastic: mpirun ends all ranks when one is lost; use torchrun")
        if self.launcher == "mpi" and self.scratch:
            raise ValueError(
                "launcher mpi gives all machines one environment, so inputs cannot be copied to scratch; use torchrun"
            )
        if self.launcher == "mpi" and can.cannot_mpi:
            raise ValueError(can.cannot_mpi)
        if self.scratch and self.scratch.beeond and not can.joins_disks:
            raise ValueError(f"scratch.beeond is Slurm's, backend is {self.backend}: set scratch.beeond to false")
        return self

    def _require_data_machines(self) -> None:
        can = self.capabilities
        if self.evaluation.nodes > 1 and can.this_machine:
            raise ValueError(
                f"backend {self.backend} has one machine, evaluation.nodes is {self.evaluation.nodes}: use "
                "cluster.evaluation.ranks_per_node, or another backend"
            )
        if self.data.nodes > 1 and can.this_machine:
            raise ValueError(
                f"backend {self.backend} has one machine, data.nodes is {self.data.nodes}: use data.threads, or another backend"
            )
        if self.data.pool and not can.pool_setting:
            able = backends_with(lambda one: bool(one.pool_setting))
            raise ValueError(
                f"data.pool is {self.data.pool!r}, and backend {self.backend} has no pools: leave it empty, or use {able}"
            )
