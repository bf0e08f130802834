"""Where a fault of all machines together lies, by halves of them that were measured again (bisection).

A machine of a sound part is cleared. Those of a bad part that no sound part clears are suspects; the smallest bad parts count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.qualification.limits import tolerances
from tasks.qualification.merged import Merged, size
from tasks.qualification.sweeps import NETWORK, of_sweep
from tasks.qualification.verdicts import Reason

BAD = ("failed", "unknown")


def faults_of(
    sweep: Merged, sweeps: Sequence[Merged], sku: Sku, config: BenchmarkConfig, *, ours: bool
) -> list[Reason]:
    """What is wrong with a sweep over many machines: by itself, and against the fastest one of as many machines and bytes."""
    results = [*of_sweep(sweep, sku, ours=ours)]
    alike = [
        other.rate or 0.0 for other in sweeps if _comparable(other, sweep) and len(other.nodes) == len(sweep.nodes)
    ]
    limit = tolerances(sku).pairs * config.min_of_peers * max(alike, default=0.0)
    if sweep.rate is not None and sweep.rate < limit:
        results.append(_slow(sweep, sweep.rate, limit))
    return results


def _comparable(one: Merged, other: Merged) -> bool:
    def kind(sweep: Merged) -> tuple[str, float, list[int]]:
        return sweep.collective, sweep.ranks / len(sweep.nodes), [point.bytes for point in sweep.points[-1:]]

    return kind(one) == kind(other)


def _slow(sweep: Merged, rate: float, limit: float) -> Reason:
    return Reason(
        node="",
        check=f"{sweep.collective} busbw at {size(sweep.points[-1].bytes)} against other parts",
        measured=rate,
        unit="GB/s",
        limit=f">= {limit:.4g}",
        source="Headway: benchmark.min_of_peers of the fastest part of as many machines",
        verdict="failed",
        remedy=NETWORK,
    )


def located(judged: Sequence[tuple[Merged, Sequence[Reason]]], config: BenchmarkConfig) -> Iterator[Reason]:
    """Reasons of the machines to which parts point. One alone has its fault; several are suspects, which is unknown.

    A sweep clears its machines when nothing is wrong with it and it is not slow beside a smaller part.
    """
    if not any(sweep.scope == "part" for sweep, _ in judged):
        return
    bad = [(sweep, fault) for sweep, faults in judged if (fault := _worst(faults)) is not None]
    sound = [sweep for sweep, faults in judged if _worst(faults) is None]
    cleared = {node for sweep in sound if _keeps_up(sweep, sound, config.min_of_peers) for node in sweep.nodes}
    for sweep, fault in bad:
        inside = set(sweep.nodes)
        if any(set(other.nodes) < inside for other, _ in bad):
            continue
        suspects = sorted(inside - cleared)
        for name in suspects if len(suspects) < len(inside) or sweep.scope == "part" else ():
            yield _suspected(name, suspects, sweep, fault)


def _keeps_up(sweep: Merged, sound: Sequence[Merged], share: float) -> bool:
    rates = [other.rate or 0.0 for other in sound if _comparable(other, sweep)]
    return sweep.scope == "part" or (sweep.rate or 0.0) >= share * max(rates)


def _worst(faults: Sequence[Reason]) -> Reason | None:
    return min((f for f in faults if f.verdict in BAD), key=lambda f: (f.verdict != "failed", f.check), default=None)


def _suspected(name: str, suspects: list[str], sweep: Merged, fault: Reason) -> Reason:
    others = [node for node in sweep.nodes if node not in suspects]
    alone = len(suspects) == 1
    text = (
        f"parts without it are sound, and so are {', '.join(others)}"
        if alone
        else f"the fault is in one of {', '.join(suspects)}; nothing smaller was measured"
    )
    return fault.model_copy(
        update={
            "node": name,
            "where": f"part of {len(sweep.nodes)}",
            "verdict": fault.verdict if alone else "unknown",
            "said": "; ".join(part for part in (fault.said, text) if part),
        }
    )
