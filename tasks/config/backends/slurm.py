"""The backend slurm, as a configuration sees it: partitions, accounts, and how the login node is reached."""

from __future__ import annotations

from tasks.config.backends import BackendSettings, Capabilities, Elasticity
from tasks.config.backends.ssh import SshConfig
from tasks.config.base import Positive


class SlurmConfig(BackendSettings):
    """A Slurm cluster, such as one of CycleCloud's Slurm workspace."""

    capabilities = Capabilities(
        backend="tasks.compute.slurm.backend:SlurmBackend",
        cannot_mirror="",
        machines="tasks.compute.slurm.machines:SlurmMachines",
        elasticity=Elasticity(
            "one job of one node for each machine; a lost one is queued again and joins",
            grows=True,
            shrinks=True,
            survives_first=True,
        ),
        starts_again=True,
        arrays=True,
        joins_disks=True,
        pool_setting="partition",
        size_setting="sku",
    )

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

    @property
    def jobs_see_home(self) -> bool:
        return not self.shared
