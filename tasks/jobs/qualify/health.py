"""The health of each machine, before anything is measured on it: what its vendor's tools, /sys, its logs and Azure's checks say.

Local rank 0 looks, the others wait. Each look is a function of a room health_*.py that gives probes; what it cannot look at
becomes `missing`, `timed out` or `failed`, for each of its checks. What a value means is judged elsewhere; what a machine says
of itself (an Xid, a throttled GPU) is a finding already, by the rules of tasks/hardware/health.json and AzNHC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tasks.jobs.node.vendor_commands import Hangs
from tasks.jobs.qualify import (
    health_amd,
    health_aznhc,
    health_links,
    health_machine,
    health_nvidia,
    skew,
    versions,
)
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.qualification.measured import Probe, Status


class Look(NamedTuple):
    """One look at a machine."""

    checks: tuple[str, ...]
    """What it says something of, as far as this hardware has it."""
    look: Callable[[Bench, Machine], Iterable[Probe]]
    vendors: tuple[str, ...] = ("nvidia", "amd", "cpu")


LOOKS = (
    Look(("memory_gib",), health_machine.memory),
    Look(("cpu_count",), health_machine.cpus),
    Look(("scratch_free",), health_machine.scratch),
    Look(("nvme_count",), health_machine.nvme),
    Look(("ib_ports_active", "ib_rate"), health_links.infiniband),
    Look(("link_flaps",), health_links.link_flaps),
    Look(("sriov",), health_links.virtual_functions),
    Look(("gpu_count",), health_nvidia.count, ("nvidia",)),
    Look(("xid",), health_nvidia.errors, ("nvidia",)),
    Look(("gpu_smi",), health_nvidia.gpus, ("nvidia",)),
    Look(("rows",), health_nvidia.remapped_rows, ("nvidia",)),
    Look(("nvlink_down",), health_nvidia.nvlinks, ("nvidia",)),
    Look(("gpu_count", "gpu_smi"), health_amd.count, ("amd",)),
    Look(("ecc",), health_amd.errors, ("amd",)),
    Look(("throttle",), health_amd.throttled, ("amd",)),
    Look(("sm_clock", "memory_clock"), health_amd.clocks, ("amd",)),
    Look(("aznhc",), health_aznhc.checks, ("nvidia", "amd")),
)
"""In this order; Azure's checks last, for they take minutes."""


def measure(bench: Bench, machine: Machine | None = None) -> None:
    """Note the machine's versions and everything that its looks say."""
    if bench.local_rank == 0:
        look(bench, machine or Machine())
    if bench.sku.vendor != "cpu":  # Azure's checks use the GPUs: nobody measures meanwhile
        bench.share("health/end", True, seconds=bench.config.check_seconds + health_aznhc.limit(bench))


def look(bench: Bench, machine: Machine) -> None:
    """Everything that one machine says."""
    versions.note(bench, machine)
    skew.note(bench)
    for one in LOOKS:
        if bench.sku.vendor in one.vendors:
            bench.note(*guarded(one, bench, machine))


def guarded(one: Look, bench: Bench, machine: Machine) -> Iterator[Probe]:
    """The probes of a look, and what it could not look at."""
    try:
        yield from one.look(bench, machine)
    except Missing as error:
        yield from _unseen(one, "missing", error, remedy=error.remedy)
    except Hangs as error:
        yield from _unseen(one, "timed out", error)
    except (OSError, ValueError) as error:
        yield from _unseen(one, "failed", error)


def _unseen(one: Look, status: Status, error: Exception, *, remedy: str = "") -> Iterator[Probe]:
    return (Probe(check=check, status=status, said=str(error), remedy=remedy) for check in one.checks)
