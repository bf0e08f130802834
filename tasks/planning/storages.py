"""Where bytes of a training can lie on Azure: bandwidth, sizes and what outlives a machine, as data with sources. Pure.

Which of them to take is storing.py; how long a checkpoint takes to each, checkpointing.py. Prices are in tasks/prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tasks.hardware.machine import Machine

GIB = 1 << 30
TIB = 1 << 40
MB = 1e6
MIB = 1 << 20


@dataclass(frozen=True)
class Storage:
    """One choice. Bandwidths in bytes a second; capacities in TiB."""

    name: str
    said: str
    """In words."""
    source: str
    date: str
    """When the source was written, else read."""
    durable: bool = True
    """Whether it outlives the machines of the training."""
    shared: bool = True
    """Whether every machine sees what another wrote."""
    local: bool = False
    """On the machines' own disks: capacity and bandwidth grow with their number."""
    per_tib: float = 0.0
    """Bandwidth that each TiB brings; 0: it does not depend on the size."""
    whole: float = math.inf
    """Most bandwidth that one of it has, however large."""
    per_machine: float = math.inf
    """Most that one machine can write to it, beside its network card."""
    smallest: float = 0.0
    step: float = 0.0
    """Capacities that can be had: `smallest`, then each `step` more."""
    largest: float = math.inf


LUSTRE = "MicrosoftDocs/azure-stack-docs @000750f azure-managed-lustre/create-file-system-portal.md, Throughput configurations"
NETAPP = "learn.microsoft.com azure-netapp-files-service-levels; large volumes: at most 12,800 MiB/s"
BLOB = "learn.microsoft.com scalability-targets-standard-account: 25 Gbit/s into an account (60 in some regions, more on request)"
FIO = "the size's file: fio, sequential, 1 MB, of Azure/AI-benchmarking-guide"
DISKS = "MicrosoftDocs/azure-compute-docs nd-h200-v5-series.md: remote disks of a machine, 612 MB/s (MI300X 1,200, A100 800)"
BEEOND = "BeeGFS on demand over the machines' NVMe; half of the disks' bandwidth is taken, for it crosses the network"


def _lustre(tier: int, smallest: float, largest: float) -> Storage:
    return Storage(
        f"lustre-{tier}",
        f"Azure Managed Lustre, {tier} MB/s a TiB",
        LUSTRE,
        "2024-11-11",
        per_tib=tier * MB,
        smallest=smallest,
        step=smallest,
        largest=largest,
    )


def _netapp(level: str, per_tib: float) -> Storage:
    return Storage(
        f"netapp-{level}",
        f"Azure NetApp Files, {level} ({per_tib:g} MiB/s a TiB)",
        NETAPP,
        "2026-11-22",
        per_tib=per_tib * MIB,
        whole=12_800 * MIB,
        smallest=1,
        step=1,
        largest=1024,
    )


CHOICES: tuple[Storage, ...] = (
    Storage("local-nvme", "the machines' own NVMe", FIO, "2026-11-21", durable=False, shared=False, local=True),
    Storage("beeond", "BeeOND over the machines' NVMe", BEEOND, "2026-11-22", durable=False, local=True),
    Storage("blob-hot", "Azure Blob Storage", BLOB, "2026-11-22", whole=25e9 / 8),
    _netapp("standard", 16),
    _netapp("premium", 64),
    _netapp("ultra", 128),
    _lustre(40, 48, 768),
    _lustre(125, 16, 128),
    _lustre(250, 8, 128),
    _lustre(500, 4, 128),
    Storage(
        "managed-disk", "each machine's managed disks", DISKS, "2025-09-02", shared=False, local=True, per_machine=612e6
    ),
)
STORAGES = {storage.name: storage for storage in CHOICES}
BEEOND_SHARE = 0.5
"""Of the disks' bandwidth that BeeOND gives: assumed, for each byte crosses the network; no figure on these sizes is public."""


def storage_named(name: str) -> Storage:
    """Raises ValueError that names those there are."""
    result = STORAGES.get(name.strip().lower())
    if result is None:
        raise ValueError(f"storage {name!r}: there is no such; give one of {', '.join(STORAGES)}")
    return result


def capacity_for(storage: Storage, tib: float, bandwidth: float = 0.0) -> float | None:
    """TiB to order, for a need of room and of bandwidth (bytes a second); None: it cannot be had, or not from one of them.

    Where bandwidth comes with size, more is ordered than is filled.
    """
    if bandwidth > storage.whole:
        return None
    wanted = max(tib, bandwidth / storage.per_tib if storage.per_tib else 0.0, storage.smallest)
    if storage.step:
        wanted = storage.step * math.ceil(wanted / storage.step - 1e-9)
    return wanted if wanted <= storage.largest else None


def bandwidth_of(storage: Storage, machine: Machine, machines: float, *, tib: float | None = None) -> float:
    """Bytes a second that `machines` machines write to it together; 0: they have no such disk.

    `tib` is the size of the file system; empty: its smallest.
    """
    network = machine.ethernet_bandwidth * machines
    if storage.name == "local-nvme":
        return machine.nvme_write_bandwidth * machines
    if storage.name == "beeond":
        return machine.nvme_write_bandwidth * machines * BEEOND_SHARE
    own = storage.per_tib * (storage.smallest if tib is None else tib) if storage.per_tib else math.inf
    return min(network, own, storage.whole, storage.per_machine * machines)
