"""What every machine has: memory, processors, room on its scratch disk; local NVMe disks where its kind has them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.machine import Machine, Missing
from tasks.qualification.measured import Probe

REMOTE_DISK = "MSFT NVMe Accelerator"
"""Model of Azure's remote disks where they are NVMe; a local one is a `Microsoft NVMe Direct Disk`."""


def memory(bench: Bench, machine: Machine) -> Iterator[Probe]:
    """All of it, as the kernel counts it: without what the firmware took."""
    said = dict(line.split(":", 1) for line in machine.text("proc/meminfo").splitlines() if ":" in line)
    if "MemTotal" in said:
        bytes_ = int(said["MemTotal"].split()[0]) * 2**10
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
