"""What was looked at on one machine, by the hardware's file and by what the machine says of itself.

A check without a limit is recorded and not judged here; its rate is compared with the other machines in peers.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from tasks.common.names import Verdict
from tasks.hardware.sku import Sku
from tasks.qualification.limits import as_number, by_limit, cited_by
from tasks.qualification.measured import Probe
from tasks.qualification.remaining import RATES
from tasks.qualification.verdicts import Reason

NEEDS = {
    "aznhc": "Azure's node health checks (mcr.microsoft.com/aznhc/aznhc-nv) and docker",
    "gpu": "the GPU's driver with nvidia-smi, or rocm-smi",
    "xid": "leave to read the kernel's log (dmesg)",
    "link_flaps": "leave to read the kernel's log (dmesg)",
    "ib": "the InfiniBand driver (MLNX_OFED)",
    "nvme": "the NVMe driver, and /sys",
    "matmul": "PyTorch for this machine's GPUs",
    "version_nccl": "NCCL",
    "version_mpi": "MPI",
    "version_ofed": "MLNX_OFED",
    "version_cuda": "CUDA",
    "version_driver": "the GPU's driver",
    "store": "a way to the store",
}
"""What must be on the machine before a check can look, by the beginning of its name."""
NUMBERS = frozenset(itertools.chain.from_iterable(RATES.values()))
"""Checks that say nothing without a number."""
GPU_CHECKS = ("ecc", "rows", "throttle", "sm_clock", "memory_clock", "persistence", "nvlink", "temperature")


def of_probe(node: str, probe: Probe, sku: Sku) -> Iterator[Reason]:
    """What is wrong with it: at most one reason of its own finding and one of the limit."""
    if probe.status == "skipped":
        return
    if probe.status != "measured":
        yield _not_seen(node, probe, sku)
        return
    if probe.finding:
        yield _found(node, probe)
    yield from _by_file(node, probe, sku)


def _not_seen(node: str, probe: Probe, sku: Sku) -> Reason:
    return Reason(
        node=node,
        check=probe.check,
        where=probe.where,
        measured=None,
        unit=probe.unit,
        limit=_wanted(probe, sku),
        source=probe.source or "Headway: what was not seen is unknown",
        verdict="unknown",
        said=f"{probe.status}: {probe.said}" if probe.said else probe.status,
        remedy=probe.remedy or _install(probe),
    )


def _wanted(probe: Probe, sku: Sku) -> str:
    limit = sku.limits.get(probe.check)
    return by_limit(None, limit).limit if limit else "a measurement"


def _install(probe: Probe) -> str:
    if probe.status != "missing":
        return f"Run {probe.check} on the machine by hand; give it more time with benchmark.check_seconds where it ran out of it."
    needed = next((what for begin, what in NEEDS.items() if probe.check.startswith(begin)), "")
    if not needed and probe.check.startswith(GPU_CHECKS):
        needed = NEEDS["gpu"]
    return f"Install {needed or 'what ' + probe.check + ' looks with'} on the machine, and qualify it again."


def _found(node: str, probe: Probe) -> Reason:
    verdict: Verdict = "failed" if probe.finding == "fail" else "degraded"
    return Reason(
        node=node,
        check=probe.check,
        where=probe.where,
        measured=probe.measured,
        unit=probe.unit,
        limit=probe.limit or "no such finding",
        source=probe.source or f"the machine's own {probe.check}",
        verdict=verdict,
        said=probe.said,
        remedy=probe.remedy or _act(verdict),
    )


def _by_file(node: str, probe: Probe, sku: Sku) -> Iterator[Reason]:
    limit = sku.limits.get(probe.check)
    if limit is None:
        yield from _no_number(node, probe, sku)
    if limit is None or (probe.measured is None and probe.finding):
        return
    judged = by_limit(probe.measured, limit)
    if judged.verdict != "healthy":
        yield Reason(
            node=node,
            check=probe.check,
            where=probe.where,
            measured=probe.measured,
            unit=probe.unit or limit.unit,
            limit=judged.limit,
            source=cited_by(sku, limit, judged.verdict),
            verdict=judged.verdict,
            said=probe.said or ("" if probe.measured is not None else "it gave no value"),
            remedy=probe.remedy or _act(judged.verdict),
        )


def _no_number(node: str, probe: Probe, sku: Sku) -> Iterator[Reason]:
    """Of a rate that the file has no limit for: without a number nobody would miss it among its peers."""
    number = as_number(probe.measured)
    if probe.finding or probe.check not in NUMBERS or (number is not None and math.isfinite(number)):
        return
    text = probe.said or f"it gave {'no value' if probe.measured is None else f'no number: {probe.measured}'}"
    yield _not_seen(node, probe, sku).model_copy(update={"said": text, "remedy": probe.remedy or _act("unknown")})


def _act(verdict: Verdict) -> str:
    return {
        "failed": "Take the machine out and have it repaired or replaced.",
        "degraded": "Use it with care: watch it, or leave it out with benchmark.act.degraded=exclude.",
        "unknown": "Run the check by hand and see why it gives no number.",
    }[verdict]
