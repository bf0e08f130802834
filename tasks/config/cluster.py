"""Where jobs run, as settings: the machines of a job, what is retried, and one section a backend.

What does not live here: the other stages' sections (tasks/config/flows.py), and what a backend makes of its section
(tasks/compute). A field's docstring is its help text, in docs/configuration.md and in Prefect's form.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from tasks.config.base import Name, NodeName, Positive, Settings
from tasks.config.elasticity import refusal

RANGE = re.compile(r"(\d+):(\d+)")
BackendName = Literal["local", "ssh", "slurm", "azureml", "ray"]


class ElasticConfig(Settings):
    """A job that may run on fewer machines than it wants, and takes more as they come."""

    min_nodes: Positive = 1
    """Machines without which it does not train."""
    max_nodes: Positive = 1
    """Machines that it takes at most."""
    address: str = ""
    """Name or address under which machines reach the one that jobs are submitted from, where they meet; empty: its host name."""

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
    beeond: bool = False
    """Whether the machines' disks are joined into one BeeGFS on demand (BeeOND) for the job; of Slurm only."""


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
    """Time without any answer from the scheduler after which the run says so and waits on; the job is never given up."""


class SshConfig(Settings):
    """Plain machines that are reached through SSH: VMs, or a VM scale set."""

    hosts: tuple[str, ...] = ()
    """Machines as NAME, USER@NAME or USER@NAME:PORT, in the order in which jobs take them."""
    hosts_file: str = ""
    """A file with one such machine a line, instead of `hosts`; `#` begins a comment."""
    user: str = ""
    """User on machines that name none; empty: who runs Headway."""
    key: str = ""
    """Private key file; empty: the keys of ~/.ssh and of a running agent."""
    known_hosts: str = ""
    """File with the machines' host keys; empty: ~/.ssh/known_hosts. An unknown machine is refused."""
    config: str = ""
    """OpenSSH client configuration file, for jump hosts and the like; empty: ~/.ssh/config where there is one."""
    connect_seconds: float = Field(10.0, gt=0)
    """Longest time to connect to a machine."""


class SlurmConfig(Settings):
    """A Slurm cluster, such as one of CycleCloud's Slurm workspace."""

    partition: str = ""
    """Partition; empty: the cluster's default."""
    account: str = ""
    """Account that the time is charged to."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that nodes must have, as of sbatch."""
    reservation: str = ""
    """Reservation to run in."""
    login: str = ""
    """Login node, as USER@NAME:PORT, that is reached through SSH; empty: this machine is one."""
    ssh: SshConfig = SshConfig()
    """How the login node is reached; `hosts` are not used here."""
    shared: str = ""
    """Folder that login and compute nodes share, for a Headway that runs elsewhere; empty: Headway's home is shared."""
    mounts: tuple[str, ...] = ()
    """Folders that a container sees, as pyxis takes them: FROM:TO[:FLAGS]. The job folder and the inputs are added."""
    signal_seconds: Positive = 120
    """Time before the time limit at which the job is told to save and end."""
    requeue: bool = True
    """Whether Slurm starts a job again by itself when a node fails."""
    sku: str = ""
    """VM size of the nodes, such as Standard_ND96isr_H100_v5, for NCCL's environment and topology; empty: none is set."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, each as it is written on the command line."""


class AzureMlConfig(Settings):
    """A workspace of Azure Machine Learning."""

    subscription_id: str = ""
    """Subscription of the workspace."""
    resource_group: str = ""
    """Resource group of the workspace."""
    workspace: str = ""
    """Name of the workspace."""
    compute: str = ""
    """Compute cluster that jobs run on."""
    size: str = ""
    """VM size of that cluster, such as Standard_ND96isr_H100_v5; then a job's render has a file that creates it."""
    idle_minutes: float = Field(15.0, gt=0)
    """Time after which an idle node of that cluster is given back; there in the same file."""
    environment: str = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"
    """Environment when `cluster.image` is empty: a curated one (ACPT) by default."""
    experiment: str = "headway"
    """Experiment in the workspace's studio."""
    shm_size: str = "64g"
    """Shared memory of a node's container, as Docker takes it."""
    identity: Literal["managed", "user"] = "managed"
    """Who the job is when it reads and writes the store: the cluster's managed identity, or whoever submitted it."""
    store: str = ""
    """Store of stores.yaml (docs/storage.md), on Azure Blob, that job folders and inputs lie in. Empty: the home's own."""
    tags: dict[str, str] = Field(default={})
    """Tags of every job."""
    endpoint: str = "https://management.azure.com"
    """Azure Resource Manager of the cloud."""
    ray: bool = False
    """Whether the job starts a Ray head and workers on its nodes, and runs its program on them."""


class RayConfig(Settings):
    """A Ray cluster that takes jobs."""

    address: str = ""
    """Address of the cluster's dashboard, such as http://127.0.0.1:8265; empty: one is started on this machine."""
    resources: dict[str, float] = Field(default={})
    """Custom resources that each node of a job needs."""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK"] = "STRICT_SPREAD"
    """How the nodes of a job are placed: each on a machine of its own, or not."""
    autoscales: bool = False
    """Whether the cluster adds machines by itself: then a job that no machine of it could hold waits, and is no error."""


class ClusterConfig(Settings):
    """Where jobs run."""

    name: Name = "local"
    """Name under which qualifications of this cluster are kept."""
    backend: BackendName = "local"
    """What jobs are submitted to."""
    nodes: Positive = 1
    """Machines of a training job; other jobs run on one. A range, as `1:8`, is short for `elastic`'s least and most."""
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

    @model_validator(mode="after")
    def _backend_can(self) -> ClusterConfig:
        """What a section lacks is an error before anything is spent."""
        if self.elastic and (reason := refusal(self.backend)):
            raise ValueError(reason)
        if self.backend == "local" and self.nodes > 1:
            raise ValueError(
                f"backend local has one machine, nodes is {self.nodes}: use ranks_per_node, or backend ssh, slurm, azureml or ray"
            )
        if self.backend == "ssh" and not (self.ssh.hosts or self.ssh.hosts_file):
            raise ValueError("backend ssh needs machines: set ssh.hosts or ssh.hosts_file")
        missing = [
            key
            for key in ("subscription_id", "resource_group", "workspace", "compute")
            if not getattr(self.azureml, key)
        ]
        if self.backend == "azureml" and missing:
            raise ValueError(f"backend azureml needs {', '.join(f'azureml.{key}' for key in missing)}")
        if self.launcher == "mpi" and self.elastic:
            raise ValueError("launcher mpi cannot be elastic: mpirun ends all ranks when one is lost; use torchrun")
        if self.launcher == "mpi" and self.scratch:
            raise ValueError(
                "launcher mpi gives all machines one environment, so inputs cannot be copied to scratch; use torchrun"
            )
        if self.launcher == "mpi" and self.backend == "ray":
            raise ValueError(
                "Ray starts one agent a machine, and mpirun has no way to the others there: use launcher torchrun"
            )
        if self.scratch and self.scratch.beeond and self.backend != "slurm":
            raise ValueError(f"scratch.beeond is Slurm's, backend is {self.backend}: set scratch.beeond to false")
        return self
