"""One sweep by itself: was it measured, is it correct, fast enough at the sizes that matter, even, and over the right transport.

Reasons have no machine yet: of a machine's own sweep it is that machine (judge.py), of pairs and parts it is found by votes
(pairs.py, judge.py), and what all did together stays the cluster's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tasks.config.qualification import COLLECTIVES, Collective, Verdict
from tasks.hardware.sku import BusBandwidth, Sku
from tasks.qualification.limits import (
    Judged,
    Tolerances,
    all_gpus,
    bandwidths,
    by_bandwidth,
    cited,
    cited_by,
    tolerances,
)
from tasks.qualification.measured import Row, Status, Sweep
from tasks.qualification.verdicts import Reason

# Rounds of one sweep as one: the best of each size counts, because other work comes and goes and a bad part stays.
#
# Wrong elements of any round count, and so does the transport of the best one.


SCOPES = ("node", "pair", "part", "all")
SHORT = {"measured": 0, "failed": 1, "timed out": 2, "missing": 3, "skipped": 4}


class Point(NamedTuple):
    """One size: bandwidths in GB/s, None where nothing was measured."""

    bytes: int
    busbw: float | None
    in_place: float | None

    @property
    def rate(self) -> float | None:
        """Mean of out of place and in place, as nccl-tests' average of a single size and AzNHC's thresholds have it."""
        results = [value for value in (self.busbw, self.in_place) if value is not None]
        return sum(results) / len(results) if results else None


class Merged(NamedTuple):
    """All rounds of one collective over the same machines."""

    collective: Collective
    scope: str
    nodes: tuple[str, ...]
    points: tuple[Point, ...]
    wrong: int
    transport: tuple[str, ...]
    status: Status
    """measured when any round was."""
    said: str
    backend: str
    ranks: int = 0
    """0: nobody said."""

    @property
    def rate(self) -> float | None:
        """Of the largest message, in GB/s."""
        return self.points[-1].rate if self.points else None

    @property
    def key(self) -> tuple[int, int, tuple[str, ...], int]:
        """An order that does not depend on who reported first."""
        return SCOPES.index(self.scope), COLLECTIVES.index(self.collective), self.nodes, self.ranks


def merged(sweeps: Iterable[Sweep]) -> tuple[Merged, ...]:
    """One of each collective, set of machines and number of ranks, in a fixed order. What nobody asked for is left out."""
    groups: dict[tuple[str, str, tuple[str, ...], int], list[Sweep]] = {}
    for sweep in sweeps:
        if sweep.status != "skipped":
            groups.setdefault((sweep.collective, sweep.scope, tuple(sorted(sweep.nodes)), sweep.ranks), []).append(
                sweep
            )
    return tuple(sorted((_merge(rounds, nodes) for (_, _, nodes, _), rounds in groups.items()), key=lambda m: m.key))


def _merge(rounds: list[Sweep], nodes: tuple[str, ...]) -> Merged:
    rounds = sorted(rounds, key=lambda sweep: (sweep.round, sweep.model_dump_json())) if len(rounds) > 1 else rounds
    good = [sweep for sweep in rounds if sweep.status == "measured" and sweep.rows]
    best = max(good, key=_rate, default=None)
    shown = best or min(rounds, key=lambda sweep: SHORT[sweep.status])
    status: Status = "measured" if best else "missing" if shown.status == "measured" else shown.status
    return Merged(
        collective=shown.collective,
        scope=shown.scope,
        nodes=nodes,
        points=_points([row for sweep in good for row in sweep.rows]),
        wrong=sum((row.wrong or 0) + (row.wrong_in_place or 0) for sweep in rounds for row in sweep.rows),
        transport=tuple(sorted(set(shown.transport))),
        status=status,
        said=shown.said or ("" if best else "it has no rows"),
        backend=shown.backend,
        ranks=shown.ranks,
    )


def _rate(sweep: Sweep) -> float:
    return _points(sweep.rows)[-1].rate or 0.0


def _points(rows: Iterable[Row]) -> tuple[Point, ...]:
    result: dict[int, list[Row]] = {}
    for row in rows:
        result.setdefault(row.bytes, []).append(row)
    return tuple(
        Point(size, _best(row.busbw for row in same), _best(row.busbw_in_place for row in same))
        for size, same in sorted(result.items())
    )


def _best(values: Iterable[float | None]) -> float | None:
    """What is no number, such as the rate of a run that took no time, was not measured."""
    return max((value for value in values if value is not None and math.isfinite(value)), default=None)


def size(number: int) -> str:
    """Bytes as nccl-tests' options have them, or in MB (10^6)."""
    if number % 1_000_000 == 0:
        return f"{number // 1_000_000} MB"
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= bytes_ and number % bytes_ == 0:
            return f"{number // bytes_} {unit}"
    return f"{number / 1e6:.4g} MB"


# What a library really sent its messages over. A silent fall back to TCP passes many a bandwidth check and ruins a
# training.


BETWEEN_MACHINES = ("NET", "tcp")
BETWEEN = {
    "node": (*BETWEEN_MACHINES, "SHM"),
    "pair": BETWEEN_MACHINES,
    "all": BETWEEN_MACHINES,
    "part": BETWEEN_MACHINES,
}
"""What stands in for the right transport when it is not there. Within a machine shared memory does, and slower."""


FALL_BACK = (
    "See why NCCL did not take it: NCCL_DEBUG=INFO, InfiniBand's driver, NCCL_IB_DISABLE, NCCL_NET, the topology file."
)
UNSAID = "Run it with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH, so that the log says it."


def of_transport(sweep: Merged, sku: Sku) -> Iterator[Reason]:
    """A transport that is not the hardware's, or that nobody knows."""
    scope = "node" if len(sweep.nodes) == 1 else "all" if sweep.scope == "part" else sweep.scope
    wanted = next((allowed for name, allowed in sku.transports.items() if name == scope), ())
    if not wanted or sweep.status != "measured":
        return
    if not sweep.transport:
        yield _reason(sweep, sku, wanted, "")
        return
    others = [used for used in sweep.transport if not _is_one(used, wanted) and _is_one(used, BETWEEN[scope])]
    if others or not any(_is_one(used, wanted) for used in sweep.transport):
        yield _reason(sweep, sku, wanted, ", ".join(others or sweep.transport))


def _is_one(used: str, names: tuple[str, ...]) -> bool:
    """NET/IB/GDR is a NET/IB; NET/IB is no NET/IB/GDR."""
    return any(used == name or used.startswith(f"{name}/") for name in names)


def _reason(sweep: Merged, sku: Sku, wanted: tuple[str, ...], used: str) -> Reason:
    key = sku.section_sources.get("transports", "")
    return Reason(
        node="",
        check=f"{sweep.collective} transport",
        measured=used or None,
        limit=f"one of {', '.join(wanted)}",
        source=cited(sku, key) if key else f"{sku.name}: its transports",
        verdict="failed" if used else "unknown",
        said=f"it fell back to {used}" if used else "the library did not say what it used",
        remedy=FALL_BACK if used else UNSAID,
    )


# A bandwidth curve over the sizes of messages, and not only its last row.
#
# Rates of large messages rise and level off. A size far below what smaller and larger ones reach, rows of one size that
# disagree, and a curve that steps back again and again are faults of a link or of settings, though average and last row
# may look fine.


SOURCE = "the other sizes of the same curve"
FABRIC = "Look for a link at reduced width, congestion or a wrong NCCL setting; run `headway qualify --full`."
MANY_APART = 3
"""So many rows that disagree, and at least half of them all, fail."""


def of_curve(sweep: Merged, allowed: Tolerances) -> Iterator[Reason]:
    """What is odd about it."""
    points = [point for point in sweep.points if point.bytes >= allowed.curve_bytes and point.rate is not None]
    yield from _collapse(sweep, points, allowed)
    yield from _apart(sweep, points, allowed)
    yield from _steps(sweep, points, allowed)


def _collapse(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    """The worst size, against the best smaller and the best larger one, the lower of the two; the last against smaller ones."""
    rates = [point.rate or 0.0 for point in points]
    results: list[tuple[float, Point, float]] = []
    for number in range(1, len(points)):
        expected = min(max(rates[:number]), max(rates[number + 1 :], default=max(rates[:number])))
        if expected > 0 and rates[number] < allowed.hole_warn * expected:
            results.append((rates[number] / expected, points[number], expected))
    if results:
        share, point, expected = min(results)
        level = allowed.hole_fail if allowed.curve_fails and share < allowed.hole_fail else allowed.hole_warn
        yield _odd(
            sweep,
            f"busbw at {size(point.bytes)}",
            measured=point.rate,
            unit="GB/s",
            limit=f">= {level * expected:.4g}",
            verdict="failed" if level == allowed.hole_fail else "degraded",
            text=f"it collapses: smaller and larger messages reach {expected:.4g} GB/s",
        )


def _apart(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    both = [(p, min(p.busbw, p.in_place) / max(p.busbw, p.in_place)) for p in points if p.busbw and p.in_place]
    far = [(share, point) for point, share in both if share < allowed.apart]
    if len(far) < allowed.apart_rows:
        return
    many = allowed.curve_fails and len(far) >= max(MANY_APART, len(both) / 2)
    share, point = min(far)
    yield _odd(
        sweep,
        f"in place against out of place at {size(point.bytes)}",
        measured=share,
        unit="",
        limit=f">= {allowed.apart}",
        verdict="failed" if many else "degraded",
        text=f"erratic: {len(far)} of {len(both)} sizes disagree",
    )


def _steps(sweep: Merged, points: list[Point], allowed: Tolerances) -> Iterator[Reason]:
    rates = [point.rate or 0.0 for point in points]
    back = [
        b.bytes
        for a, b, before, now in zip(points, points[1:], rates, rates[1:], strict=False)
        if a.bytes < b.bytes and now < allowed.step_back * before
    ]
    if len(back) >= allowed.steps_back:
        yield _odd(
            sweep,
            "busbw over sizes",
            measured=float(len(back)),
            unit="steps back",
            limit=f"<= {allowed.steps_back - 1}",
            verdict="degraded",
            text=f"it falls at {', '.join(map(size, back))}",
        )


def _odd(
    sweep: Merged, what: str, *, measured: float | None, unit: str, limit: str, verdict: Verdict, text: str
) -> Reason:
    return Reason(
        node="",
        check=f"{sweep.collective} {what}",
        measured=measured,
        unit=unit,
        limit=limit,
        source=SOURCE,
        verdict=verdict,
        said=text,
        remedy=FABRIC,
    )


ORDER = ("healthy", "degraded", "failed")
NEAR, FAR = 1 / 16, 0.8
"""Of the message that a limit is for, and of the limit: from a sixteenth on, public curves are level within a few percent."""
CORRUPT = "Silent data corruption: take the machines out, and find the part with the pairs and the ECC counters."
NETWORK = "Look at the links between the machines, NCCL's environment and its topology file (`headway hardware`)."
AGAIN = "See the job's logs; give it more time with benchmark.collective_seconds where it ran out of it."


def of_sweep(sweep: Merged, sku: Sku, *, ours: bool) -> tuple[Reason, ...]:
    """All that is wrong with it, without a machine. `ours`: our job asked for the transport; a log need not say it, and may be of
    fewer GPUs than the limits hold for."""
    results = []
    if sweep.wrong:
        results.append(
            Reason(
                node="",
                check=f"{sweep.collective} wrong elements",
                measured=float(sweep.wrong),
                limit="= 0",
                source="Headway: sums are exact or wrong",
                verdict="failed",
                said="results were not what the ranks sent",
                remedy=CORRUPT,
            )
        )
    if sweep.status != "measured" or sweep.rate is None:
        status = sweep.status if sweep.status != "measured" else "no bandwidth"
        return (
            *results,
            Reason(
                node="",
                check=f"{sweep.collective} busbw",
                measured=None,
                unit="GB/s",
                limit="a measurement",
                source="Headway: what was not measured is unknown",
                verdict="unknown",
                said=f"{status}: {sweep.said}" if sweep.said else status,
                remedy=AGAIN,
            ),
        )
    transport = [*of_transport(sweep, sku)] if ours or sweep.transport else []
    slow = [*_slow(sweep, sku)] if ours or all_gpus(sku, sweep.ranks, len(sweep.nodes)) else []
    return (*results, *slow, *of_curve(sweep, tolerances(sku)), *transport)


def _slow(sweep: Merged, sku: Sku) -> Iterator[Reason]:
    """The size that is furthest under its limit. Smaller messages than its own prove it too where they reach it already."""
    every = bandwidths(sku, sweep.collective, sweep.scope, len(sweep.nodes))
    limits = tuple(
        limit for limit in every if limit.warn is not None or limit.fail is not None
    )  # a norm judges nothing
    if not limits:
        return
    judged = [
        (point, limit, by_bandwidth(point.rate, limit))
        for point in sweep.points
        if point.rate is not None
        and (limit := next((limit for limit in reversed(limits) if limit.bytes <= point.bytes), None)) is not None
    ]
    if not judged:
        yield from _by_smaller(sweep, limits[0], sku)
        return
    bad = [item for item in judged if item[2].verdict != "healthy"]
    if bad:
        yield _slowest(sweep, min(bad, key=_severity), sku)


def _by_smaller(sweep: Merged, limit: BusBandwidth, sku: Sku) -> Iterator[Reason]:
    """Messages that are all smaller than the limit's: they may reach it already, or be so far below that none would.

    Where the limit is of another scope, as the one of all machines for a pair, it was not asked for.
    """
    last, judged = sweep.points[-1], by_bandwidth(sweep.rate or 0.0, limit)
    near = last.bytes >= NEAR * limit.bytes and limit.fail is not None
    if near and (sweep.rate or 0.0) < FAR * (limit.fail or 0.0):
        yield _slowest(sweep, (last, limit, judged), sku)
    elif judged.verdict != "healthy" and (limit.scope != "all" or sweep.scope == "all"):
        yield Reason(
            node="",
            check=f"{sweep.collective} busbw",
            measured=sweep.rate,
            unit=f"GB/s at {size(sweep.points[-1].bytes)}",
            limit=f"{by_bandwidth(None, limit).limit} from {size(limit.bytes)} on",
            source=cited(sku, limit.source),
            verdict="unknown",
            said="its limit holds for larger messages than were measured",
            remedy="Measure larger messages: benchmark.largest_megabytes on CPUs, -e of nccl-tests.",
        )


def _severity(results: tuple[Point, BusBandwidth, Judged]) -> tuple[int, float, int]:
    point, limit, judged = results
    level = limit.fail or limit.warn or limit.norm or 1.0
    return -ORDER.index(judged.verdict), (point.rate or 0.0) / level, point.bytes


def _slowest(sweep: Merged, results: tuple[Point, BusBandwidth, Judged], sku: Sku) -> Reason:
    point, limit, judged = results
    return Reason(
        node="",
        check=f"{sweep.collective} busbw at {size(point.bytes)}",
        measured=point.rate,
        unit="GB/s",
        limit=judged.limit,
        source=cited_by(sku, limit, judged.verdict),
        verdict=judged.verdict,
        said=f"already at {size(point.bytes)}" if point.bytes < limit.bytes else "",
        remedy=NETWORK,
    )
