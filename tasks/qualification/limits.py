"""The hardware's file beside a figure: which limit holds, what it says, and whether a probe keeps it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tasks.config.qualification import Verdict
from tasks.hardware.sku import BusBandwidth, Level, Limit, Sku
from tasks.qualification.measured import Probe
from tasks.qualification.remaining import RATES
from tasks.qualification.verdicts import Reason

# Tolerances for rules without a number in the hardware's file. GPU machines are lent whole, and their figures repeat
# within a few percent; ranks on CPUs share cores, caches and the kernel's TCP with other work, so only gross faults
# count there, and a curve alone never fails a machine.


class Tolerances(NamedTuple):
    """Shares are of what the neighbours, the peers or the machine's own past show."""

    curve_bytes: int = 1 << 20
    """Smaller messages measure latency; their bandwidth jumps where the library changes its algorithm."""
    hole_warn: float = 0.6
    """Of the best smaller and larger message, the lower one. Sound curves of public logs stay over 0.85 of it."""
    hole_fail: float = 0.35
    apart: float = 0.75
    """Slower of the in-place and out-of-place rows of one size, of the faster one."""
    apart_rows: int = 1
    """Rows that must disagree before anything is said."""
    step_back: float = 0.8
    """Of the size before."""
    steps_back: int = 2
    """So many steps back make a curve that does not rise."""
    curve_fails: bool = True
    """Whether a curve alone can fail a machine."""
    peers_warn: float | None = 0.05
    """Short of the peers by more than this, and far outside their spread, is degraded. None: not judged."""
    own_warn: float = 0.9
    """Of the machine's own earlier median."""
    pairs: float = 1.0
    """Of benchmark.min_of_peers: the share of sound pairs below which a pair is slow."""
    pairs_gap: float = 0.85
    """A pair below this share of the next faster one begins another group of pairs."""
    lone_pair: float = 0.6
    """A single fast pair is the measure of the others where they are below this share of it."""
    link: float = 1.0
    """A single slow pair is believed below this share of the others, too."""
    most: float = 0.5
    """More than this share of a machine's pairs must be bad before it is blamed."""
    peers_by_measured: bool = True
    """Whether plain measurements are compared; else only those that were freed of what other work took (Probe.peers)."""


GPU = Tolerances()
CPU = Tolerances(
    hole_warn=0.2,
    hole_fail=0.0,
    apart=0.2,
    apart_rows=2,
    step_back=0.3,
    steps_back=3,
    curve_fails=False,
    peers_warn=None,
    own_warn=0.2,
    pairs=0.5,
    pairs_gap=0.5,
    lone_pair=0.2,
    link=0.15,
    most=0.7,
    peers_by_measured=False,
)


def tolerances(sku: Sku) -> Tolerances:
    """Those of a kind of machine."""
    return CPU if sku.vendor == "cpu" else GPU


class Judged(NamedTuple):
    """What a limit says of a figure."""

    verdict: Verdict
    limit: str
    """With its direction."""


def cited(sku: Sku, key: str) -> str:
    """A source as sentences name it."""
    source = sku.sources[key]
    return f"{sku.name}: {source.what}, {source.date}"


def cited_by(sku: Sku, limit: Level, verdict: Verdict) -> str:
    """The source of what a limit said; its warning may have one of its own."""
    return cited(sku, (verdict == "degraded" and limit.warn_source) or limit.source)


def by_limit(measured: float | str | None, limit: Limit) -> Judged:
    """A figure under its limit. What is no number where one is needed is unknown."""
    if limit.better == "equal":
        # It must be `fail`; where only a norm is given, another value is degraded.
        wanted = limit.fail if limit.fail is not None else limit.warn if limit.warn is not None else limit.norm
        if measured is None or (as_number(wanted) is not None and as_number(measured) is None):
            return Judged("unknown", f"= {wanted}")
        if wanted is None or same(measured, wanted):
            return Judged("healthy", f"= {wanted}")
        return Judged("failed" if limit.fail is not None else "degraded", f"= {wanted}")
    number = as_number(measured)
    levels: tuple[tuple[Verdict, float | None], ...] = (("failed", as_number(limit.fail)), ("degraded", limit.warn))
    sign = ">=" if limit.better == "higher" else "<="
    shown = next((level for _, level in reversed(levels) if level is not None), limit.norm)
    if number is None or not math.isfinite(number):
        return Judged("unknown", f"{sign} {shown}")
    for verdict, level in levels:
        if level is not None and (number < level if limit.better == "higher" else number > level):
            return Judged(verdict, f"{sign} {level:.12g}")
    return Judged("healthy", f"{sign} {shown}")


def same(one: float | str, other: float | str) -> bool:
    """Whether two values are equal; 8, 8.0 and "8" are."""
    a, b = as_number(one), as_number(other)
    return a == b if a is not None and b is not None else str(one).strip() == str(other).strip()


def as_number(value: float | str | None) -> float | None:
    """A number, where it is one."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def knows_soundness(sku: Sku, check: str) -> bool:
    """Whether the file says what sound hardware reaches, and not just a floor that everything exceeds."""
    collective, _, scope = check.partition(" of ")
    if scope == "node":
        return any(level.norm is not None or level.warn is not None for level in bandwidths(sku, collective, scope, 1))
    limit = sku.limits.get(check)
    return limit is not None and (limit.norm is not None or limit.warn is not None)


def bandwidths(sku: Sku, collective: str, scope: str, nodes: int) -> tuple[BusBandwidth, ...]:
    """Limits of a collective by its scope and machines, the smallest message first; those of exactly so many machines win.

    All of one machine are a node; a part is an all of fewer machines; a pair without limits of its own is an all of two machines.
    """
    where = "node" if nodes == 1 else "all" if scope == "part" else scope
    mine = [limit for limit in sku.collectives if (limit.collective, limit.scope) == (collective, where)]
    exact = [limit for limit in mine if limit.nodes == nodes]
    results = exact or [limit for limit in mine if limit.nodes is None]
    if not results and where == "pair":
        return bandwidths(sku, collective, "all", nodes)
    return tuple(sorted(results, key=lambda limit: limit.bytes))


def all_gpus(sku: Sku, ranks: int, machines: int) -> bool:
    """Whether so many ranks are all GPUs of the machines, for which limits of bandwidths hold; true where one of them is not
    known."""
    gpus = sku.specs.get("gpus")
    return not ranks or gpus is None or ranks >= int(gpus.value) * machines


def by_bandwidth(busbw: float | None, limit: BusBandwidth) -> Judged:
    """A bus bandwidth under its limit."""
    return by_limit(busbw, Limit(norm=limit.norm, warn=limit.warn, fail=limit.fail, source=limit.source))


# A check without a limit is recorded and not judged by these functions; peers.py compares its rate with the other
# machines.


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
        verdict: Verdict = "failed" if probe.finding == "fail" else "degraded"
        yield Reason(
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
    limit = sku.limits.get(probe.check)
    number = as_number(probe.measured)
    is_number = number is not None and math.isfinite(number)
    if limit is None and not probe.finding and probe.check in NUMBERS and not is_number:
        # A rate that the file has no limit for: without a number nobody would miss it among its peers.
        text = probe.said or f"it gave {'no value' if probe.measured is None else f'no number: {probe.measured}'}"
        unseen = {"said": text, "remedy": probe.remedy or _act("unknown")}
        yield _not_seen(node, probe, sku).model_copy(update=unseen)
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


def _not_seen(node: str, probe: Probe, sku: Sku) -> Reason:
    limit = sku.limits.get(probe.check)
    return Reason(
        node=node,
        check=probe.check,
        where=probe.where,
        measured=None,
        unit=probe.unit,
        limit=(by_limit(None, limit).limit if limit else "a measurement"),
        source=probe.source or "Headway: what was not seen is unknown",
        verdict="unknown",
        said=f"{probe.status}: {probe.said}" if probe.said else probe.status,
        remedy=probe.remedy or _install(probe),
    )


def _install(probe: Probe) -> str:
    if probe.status != "missing":
        return f"Run {probe.check} on the machine by hand; give it more time with benchmark.check_seconds where it ran out of it."
    needed = next((what for begin, what in NEEDS.items() if probe.check.startswith(begin)), "")
    if not needed and probe.check.startswith(GPU_CHECKS):
        needed = NEEDS["gpu"]
    return f"Install {needed or 'what ' + probe.check + ' looks with'} on the machine, and qualify it again."


def _act(verdict: Verdict) -> str:
    return {
        "failed": "Take the machine out and have it repaired or replaced.",
        "degraded": "Use it with care: watch it, or leave it out with benchmark.act.degraded=exclude.",
        "unknown": "Run the check by hand and see why it gives no number.",
    }[verdict]
