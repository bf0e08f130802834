"""What a backend declares of itself, and the section of settings that declares it: one file a backend in this folder.

Everybody reads these attributes, and nobody asks for a backend's name: `ClusterConfig.capabilities` has those of the
configured one, `BACKENDS` of tasks/config/cluster.py those of each. They are plain values, so that the command line's help, the
planner and the reports read them without importing a scheduler. What a backend does is in its class below tasks/compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from tasks.config.base import Settings


@dataclass(frozen=True)
class Elasticity:
    """What a backend can do when machines of one submission come and go; docs/elastic.md prints the table."""

    how: str
    """How, or why an elastic job is refused."""
    grows: bool = False
    """Machines that come later join."""
    shrinks: bool = False
    """It continues with fewer when one is lost."""
    survives_first: bool = False
    """Also when that one is the first."""

    @property
    def refused(self) -> bool:
        return not (self.grows or self.shrinks)


@dataclass(frozen=True)
class Capabilities:
    """What is particular to a backend. A text that begins with `cannot_` is the reason, in words; empty: it can."""

    backend: str
    """Its class, as MODULE:CLASS; the module is imported when a job is submitted."""
    machines: str
    """The class that answers for its machines, a subclass of tasks.compute.nodes:Machines; imported when they are asked."""
    elasticity: Elasticity
    packages: tuple[str, ...] = ()
    """Modules that must be installed where jobs are submitted."""
    extra: str = "orchestrator"
    """The extra of docs/install.md that brings them."""
    this_machine: bool = False
    """Jobs are processes of the machine that submits them: no scheduler is asked for them, and they stop with the platform."""
    shared_folder: bool = True
    """Job folders lie where both sides reach them; without, in a store, and the class takes a function that opens it, too."""
    cannot_mirror: str = "its machines share the job's folder"
    """Why a job's folder cannot lie in a store and on each machine's own disk (`cluster.mirror`)."""
    cannot_move: str = ""
    """Why another host cannot take a job over whose folder lies in a store."""
    starts_again: bool = False
    """The scheduler itself starts a job again: the mark of an end in the folder may be of the start before."""
    cannot_choose: str = ""
    """Why jobs cannot be kept on some machines."""
    cannot_drain: str = ""
    """Why machines cannot be taken out of service."""
    cannot_mpi: str = ""
    """Why ranks cannot be started by Open MPI's mpirun."""
    arrays: bool = False
    """Runs one job many times, each with a number of its own."""
    drivers: bool = False
    """Runs a program that starts its own ranks."""
    joins_disks: bool = False
    """Joins the machines' disks into one file system for a job (BeeOND)."""
    environment_setting: str = ""
    """Setting of the section that names an environment where `cluster.image` is empty; a job needs one of them."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """What the shipped configuration has in place of one's own values, by the setting below `cluster`."""
    pool_setting: str = ""
    """Setting of the section that names a group of machines, of which `cluster.data.pool` may be another."""
    size_setting: str = ""
    """Setting of the section that has the VM size of the machines."""
    preemptible_price: Literal["spot", "low-priority"] = "spot"
    """Kind of price of machines that may be taken away."""
    within_quota: bool = False
    """Machines are started for a job, within the subscription's quota; of other backends they are there already."""


class BackendSettings(Settings):
    """Base of a backend's section of `cluster`."""

    capabilities: ClassVar[Capabilities]

    @property
    def jobs_see_home(self) -> bool:
        """Whether the machines reach Headway's home by the path that it has on this machine."""
        return self.capabilities.shared_folder

    def require_complete(self) -> None:
        """Raise ValueError for what the section lacks, before anything is spent."""
