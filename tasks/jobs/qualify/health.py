"""The health of each machine, before anything is measured on it: what its vendor's tools, /sys, its logs and Azure's checks say.

Local rank 0 looks, the others wait. Each look is a function of a room health_*.py that gives probes; what it cannot look at
becomes `missing`, `timed out` or `failed`, for each of its checks. What a value means is judged elsewhere; what a machine says
of itself (an Xid, a throttled GPU) is a finding already, by the rules of tasks/hardware/health.json and AzNHC.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tasks.formats import gpu_health, links
from tasks.formats.gpu_health import Port
from tasks.formats.links import DAY, Interface
from tasks.jobs.node.probes import ports
from tasks.jobs.node.vendor_commands import Hangs
from tasks.jobs.qualify import health_amd, health_aznhc, health_nvidia, skew, versions
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing, of_file, of_kernel
from tasks.qualification.measured import Probe, Status

# What every machine has: memory, processors, room on its scratch disk; local NVMe disks where its kind has them.


REMOTE_DISK = "MSFT NVMe Accelerator"
"""Model of Azure's remote disks where they are NVMe; a local one is a `Microsoft NVMe Direct Disk`."""


def memory(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """All of it, as the kernel counts it: without what the firmware took."""
    output = dict(line.split(":", 1) for line in machine.text("proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in output:
        bytes_ = int(output["MemTotal"].split()[0]) * 2**10
    elif machine.is_this:  # no Linux
        bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        raise Missing("/proc/meminfo does not say MemTotal")
    yield Probe(check="memory_gib", measured=bytes_ / 2**30, unit="GiB")


def cpus(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Processors that are online."""
    ranges = machine.text("sys/devices/system/cpu/online")
    if not ranges and not machine.is_this:
        raise Missing("/sys/devices/system/cpu/online says nothing")
    ranges = ranges or f"1-{os.cpu_count()}"  # no Linux
    pairs = (part.partition("-") for part in ranges.split(","))
    count = sum(int(last or first) - int(first) + 1 for first, _, last in pairs)
    yield Probe(check="cpu_count", measured=float(count))


def scratch(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Room where jobs keep what is theirs for a while: cluster.scratch, or else the job's folder."""
    folder = os.environ.get("HEADWAY_SCRATCH") or str(bench.rank.folder)
    free = shutil.disk_usage(folder).free / 2**30
    yield Probe(check="scratch_free", measured=free, unit="GiB", where=folder)


def nvme(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Local NVMe disks; not said where there is none and none is asked for."""
    models = [machine.text(place / "model") for place in machine.places("sys/class/nvme/nvme*")]
    local = [model for model in models if REMOTE_DISK not in model]
    if local or "nvme_count" in bench.sku.limits:
        yield Probe(check="nvme_count", measured=float(len(local)), said=", ".join(sorted(set(local))))


# The network of a machine, by /sys and its logs: InfiniBand ports and their rate, links that flap, accelerated
# networking.


def infiniband(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Active ports, and the rate of each; not said where there is none and none is asked for."""
    result = ports(machine.root / "sys/class/infiniband")
    if not result and "ib_ports_active" not in bench.sku.limits:
        return
    active = sum(port.active for port in result.values())
    down = ", ".join(f"{name} is {port.state}" for name, port in result.items() if not port.active)
    yield Probe(
        check="ib_ports_active",
        measured=float(active),
        said=down or ("" if result else "/sys/class/infiniband has no port"),
        remedy="Check cable and switch port." if down else "",
    )
    for name, port in result.items():
        yield _rate(name, port)
    if not result:
        yield Probe(check="ib_rate", measured=0.0, unit="Gbit/s", said="there is no port")


def _rate(name: str, port: Port) -> Probe:
    """A port that is not active carries nothing."""
    rate = links.rate(port.rate) if port.active else 0.0
    return Probe(
        check="ib_rate",
        status="measured" if rate is not None else "failed",
        measured=rate,
        unit="Gbit/s",
        where=name,
        said=f"it is {port.state}, its rate reads {port.rate!r}",
    )


def link_flaps(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """How often links went down in 24 hours: the most of what the kernel, the machine's log and the ports' counters say.

    A counter has no times: what all ports of the machine had together is its start, or that of a switch.
    """
    result = ports(machine.root / "sys/class/infiniband")
    if not result and "link_flaps" not in bench.sku.limits:
        return
    uptime = machine.uptime
    times: Counter[str] = Counter()
    logs, unread = _logs(machine)
    if not (logs or result):
        raise Missing(unread)
    for log in logs:
        times |= gpu_health.flaps(log, since=max(0.0, uptime - DAY))
    at_once = min((port.downed for port in result.values()), default=0)
    for name, port in result.items():
        times[name] = max(times[name], round(links.per_day(port.downed - at_once, uptime)))
    text = f"of the last {min(uptime, DAY) / 3600:.1f} h" + (
        f", by the ports' counters alone: {unread}" if unread else ""
    )
    flapped = {name: count for name, count in sorted(times.items()) if count}
    for name, count in (flapped or {"": 0}).items():
        yield Probe(check="link_flaps", measured=float(count), unit="per 24 h", where=name, said=text)


def virtual_functions(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """Accelerated networking: behind each interface of Hyper-V a virtual function of the network card, and it is up."""
    for interface, function in links.behind(_interfaces(machine)):
        up = function is not None and function.state == "up"
        yield Probe(
            check="sriov",
            measured=float(up),
            where=interface.name,
            finding=None if up else "warn",
            said=f"{function.driver} {function.name} is {function.state}" if function else "no virtual function",
            remedy=""
            if up
            else "Switch accelerated networking on; after a host's maintenance it comes back by itself.",
            source="" if up else "Azure, accelerated networking",
        )


def _logs(machine: Machine) -> tuple[list[str], str]:
    """That of the kernel and that of the machine, where networkd writes too; and why, where none can be read."""
    try:
        return [of_kernel(machine), of_file(machine, speaker="") or ""], ""
    except Missing as error:
        return [], str(error)


def _interfaces(machine: Machine) -> list[Interface]:
    return [
        Interface(
            place.name,
            (place / "device/driver").resolve().name if (place / "device/driver").exists() else "",
            machine.text(place / "address"),
            machine.text(place / "operstate"),
        )
        for place in machine.places("sys/class/net/*")
    ]


class Look(NamedTuple):
    """One look at a machine."""

    checks: tuple[str, ...]
    """What it says something of, as far as this hardware has it."""
    look: Callable[[Bench, Machine], Iterable[Probe]]
    vendors: tuple[str, ...] = ("nvidia", "amd", "cpu")


LOOKS = (
    Look(("memory_gib",), memory),
    Look(("cpu_count",), cpus),
    Look(("scratch_free",), scratch),
    Look(("nvme_count",), nvme),
    Look(("ib_ports_active", "ib_rate"), infiniband),
    Look(("link_flaps",), link_flaps),
    Look(("sriov",), virtual_functions),
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
