"""A machine's rates against those of the other machines of its kind.

- The measure is the fastest group that at least two machines (and a tenth of all) confirm: half of the
  machines may be slow. Below benchmark.min_of_peers of it a part has failed; on GPUs, less but far outside the others' spread is
  degraded.
- A machine all of whose parts are a little slow is seen by the median of what its parts reached each time, which has less
  noise than a part: on GPUs it is degraded where that is far outside the others' medians.
- Two machines cannot outvote each other. Where the hardware's file says what sound hardware reaches, the file decides
  (limits.py), and the slower one of two that pass is degraded. Else both are unknown.
- Parts of one machine: the machine is the one at fault in any case, and the slower part is named.
- One machine far ahead of all others: its reading is odd, or all others are slow. The cluster is degraded, unless the file clears
  the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tasks.config.qualification import BenchmarkConfig, Verdict
from tasks.hardware.sku import Sku
from tasks.qualification.limits import by_limit, cited_by, knows_soundness, tolerances
from tasks.qualification.measured import Measurement, Probe, TrainingPoint
from tasks.qualification.verdicts import Reason

# What the others reach, when some of the others are slow too.
#
# A median of all is wrong as soon as half of the machines are slow, and the median absolute deviation is 0 when most
# figures are equal. So values are sorted and cut at each wide gap; the measure is the median of the fastest group that
# is large enough to be believed. Parts lose speed by faults and do not gain it, so fast ones that agree are sound ones.


SMALLEST_SHARE = 0.1
"""Of the owners that a group must have, so that one odd reading of many does not condemn the others."""
FAR_OUT = 6.0
"""Standard deviations of the logarithm by which one figure alone is outside; noise of other work is skewed, hence so many."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""


class Item(NamedTuple):
    """One figure, and whose it is: figures of one owner do not confirm each other."""

    owner: str
    value: float


class Reference(NamedTuple):
    """What sound ones reach."""

    center: float
    spread: float
    """Robust standard deviation of the group, as a share of its median."""
    owners: int
    """How many it is made of."""
    faster: tuple[str, ...] = ()
    """Owners beyond it, too few to be believed."""

    @property
    def outside(self) -> float:
        """Share of the center below which one figure is no noise of this group."""
        return math.exp(-FAR_OUT * self.spread)


def cut(items: Sequence[Item], share: float) -> list[list[Item]]:
    """Groups, the fastest first: a value below this share of the next faster one begins a new group."""
    groups: list[list[Item]] = []
    for item in sorted(items, key=lambda i: (-i.value, i.owner)):
        if groups and item.value >= share * groups[-1][-1].value:
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def reference(items: Sequence[Item], share: float, *, lone: float = 0.0) -> Reference | None:
    """Measure of the items, or None when nothing is confirmed by a second owner.

    `share`: width of the gaps that divide groups. `lone`: one item alone is believed where all others are below this share of it.
    """
    groups, passed = cut(items, share), list[Item]()
    owners = {item.owner for item in items}
    needed = max(2, SMALLEST_SHARE * len(owners))
    for number, group in enumerate(groups):
        mine = {item.owner for item in group}
        rest = groups[number + 1][0].value if number + 1 < len(groups) else 0.0
        believed = len(mine) >= SMALLEST_SHARE * len(owners) and rest < lone * group[-1].value
        if len(mine) >= needed or (believed and rest):
            center = statistics.median(item.value for item in group)
            deviation = statistics.median(abs(item.value - center) for item in group)
            spread = MAD_TO_SIGMA * deviation / center if center else 0.0
            return Reference(center, spread, len(mine), tuple(sorted({item.owner for item in passed} - mine)))
        passed += group
    return None


# Machines that are below the others by more than noise: the generalized extreme studentized deviate test, downwards.
# Pure.
#
# It wants one figure a machine, best the median of many, and no idea of how many are slow: up to a quarter of them are
# looked for. Slow ones do not hide each other, as the spread is that of the others.


FALSE_ALARMS = 0.005
"""Share of sound clusters in which some machine is called slow, over all machines and all comparisons of a qualification
together, by the normal distribution. Medians of few figures have longer tails: the share that is stated and measured is 1 %."""
FEWEST = 6
"""Machines; of fewer the spread is not known."""
MOST = 4
"""One of so many may be slow."""


class Outliers(NamedTuple):
    """Who is slow, and what the others show."""

    names: tuple[str, ...]
    center: float
    """Mean of the others."""
    lowest: float
    """Below which one more would be slow, too."""


def slow_ones(figures: Mapping[str, float], *, comparisons: float) -> Outliers | None:
    """Rosner, Percentage points for a generalized ESD many-outlier procedure, Technometrics 25, 1983, one-sided. None of too few.

    `comparisons` share the false alarms.
    """
    if len(figures) < FEWEST:
        return None
    chance = FALSE_ALARMS / comparisons
    names = sorted(figures, key=lambda name: (figures[name], name))
    count = 0
    for number in range(1, len(names) // MOST + 1):
        if figures[names[number - 1]] < _lowest(figures, names[number:], chance)[1]:
            count = number
    center, lowest = _lowest(figures, names[count:], chance)
    return Outliers(tuple(names[:count]), center, lowest)


def _lowest(figures: Mapping[str, float], others: list[str], chance: float) -> tuple[float, float]:
    """Mean of the others, and what one more machine of their kind is above, each of all with this chance together."""
    from scipy import special  # 0.16 s, which every start of a flow would pay

    values = [figures[name] for name in others]
    center, deviation = statistics.fmean(values), statistics.stdev(values)
    times = -float(special.stdtrit(len(values) - 1, chance / (len(values) + 1)))
    return center, center - times * deviation * math.sqrt(1 + 1 / len(values))


RATES = (
    "matmul_", "memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer", "scratch_write", "scratch_read",
)  # fmt: skip
"""Beginnings of the names of rates, of which more is better, and that a machine has by itself."""
SOURCE = "Headway: benchmark.min_of_peers of the fastest group of machines"
SLOW = "Throttled, shared with other work, or a bad part: take the machine out, or look at its clocks, power and temperature."
ENOUGH = 4
"""So many machines before a spread is a spread."""
SPREADS, SPREADS_OF_FEW, FEW = 6.0, 12.0, 8
"""Standard deviations below the others; of fewer than FEW machines the deviation itself is uncertain."""


class Rate(NamedTuple):
    """One figure of one part."""

    node: str
    where: str
    check: str
    value: float
    unit: str
    each: tuple[float, ...] = ()
    """Every measurement, where there were several; `value` is the best of them."""


def rates_of(measurement: Measurement, sku: Sku) -> tuple[Rate, ...]:
    """What machines are compared by."""
    result = (
        Rate(report.node, probe.where, probe.check, value, probe.unit, tuple(filter(math.isfinite, probe.each)))
        for report in measurement.ranks
        for probe in report.probes
        if (value := _compared(probe, plain=tolerances(sku).peers_by_measured)) is not None
    )
    return tuple(sorted(result))


def _compared(probe: Probe, *, plain: bool) -> float | None:
    if probe.status != "measured":
        return None
    plainly = probe.measured if plain and isinstance(probe.measured, float) and probe.check.startswith(RATES) else None
    result = plainly if probe.peers is None else probe.peers
    return result if result is not None and math.isfinite(result) else None


def against_peers(rates: Sequence[Rate], sku: Sku, config: BenchmarkConfig) -> tuple[Reason, ...]:
    """What is wrong with any of them, machines and cluster."""
    checks = sorted({rate.check for rate in rates})
    if not config.min_of_peers:
        return ()
    results: list[Reason] = []
    for check in checks:
        mine = [rate for rate in rates if rate.check == check]
        parts = [*_one(mine, sku, config)]
        named = {reason.node for reason in parts}
        results += [*parts, *(r for r in _by_medians(mine, sku, config, checks=len(checks)) if r.node not in named)]
    return tuple(results)


def standings(rates: Sequence[Rate], config: BenchmarkConfig) -> dict[str, float]:
    """Lowest share of the measure that each machine reached, at most 1."""
    result: dict[str, float] = {}
    for check in sorted({rate.check for rate in rates}):
        mine = [rate for rate in rates if rate.check == check]
        fast = _reference(mine, config)
        center = fast.center if fast else max(rate.value for rate in mine)
        for rate in mine:
            result[rate.node] = min(result.get(rate.node, 1.0), rate.value / center if center else 0.0)
    return result


def _reference(rates: Sequence[Rate], config: BenchmarkConfig) -> Reference | None:
    """Machines confirm each other; parts do where there is only one machine."""
    single = len({rate.node for rate in rates}) == 1
    items = [Item(f"{rate.node} {rate.where}" if single else rate.node, rate.value) for rate in rates]
    return reference(items, (1 + config.min_of_peers) / 2)


def _one(rates: Sequence[Rate], sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    fast = _reference(rates, config)
    if fast is None:
        yield from _unconfirmed(rates, sku, config)
        return
    least = tolerances(sku).peers_warn
    if least is None or fast.owners < ENOUGH:
        warn = None
    else:
        few = fast.owners < FEW
        warn = 1 - max(2 * least if few else least, (SPREADS_OF_FEW if few else SPREADS) * fast.spread)
    noisy = tolerances(sku).peers_warn is None and fast.owners >= FEW
    fail = min(config.min_of_peers, fast.outside if noisy else 1.0) * fast.center
    for rate in rates:
        share = rate.value / fast.center if fast.center else 1.0
        if rate.value < fail:
            yield _slow(rate, fail, "failed", f"{share:.0%} of what {_others(fast)} reach")
        elif warn and share < warn:
            text = f"{share:.1%} of what {_others(fast)} reach, which lie within {fast.spread:.1%} of each other"
            yield _slow(rate, warn * fast.center, "degraded", text)
    yield from _far_ahead(rates, fast, sku, config)


def _by_medians(rates: Sequence[Rate], sku: Sku, config: BenchmarkConfig, *, checks: int) -> Iterator[Reason]:
    """Machines the median of whose parts is no noise of the others' medians. Those that failed are not measured by."""
    least, fast = tolerances(sku).peers_warn, _reference(rates, config)
    if least is None or fast is None:
        return
    parts: dict[str, list[float]] = {}
    for rate in rates:
        parts.setdefault(rate.node, []).extend(rate.each or [rate.value])
    medians = {node: statistics.median(values) for node, values in parts.items()}
    slowest = config.min_of_peers * fast.center
    result = slow_ones({node: value for node, value in medians.items() if value >= slowest}, comparisons=checks)
    if result is None:
        return
    limit = min(result.lowest, (1 - least) * result.center)
    for node in result.names:
        if medians[node] < limit:
            where = f"median of {len(parts[node])} measurements" if len(parts[node]) > 1 else ""
            share = f"{medians[node] / result.center:.1%} of the mean of the others"
            rate = Rate(node, where, rates[0].check, medians[node], rates[0].unit)
            yield _slow(rate, limit, "degraded", f"{share}; a sound machine is above {limit / result.center:.1%}")


def _others(fast: Reference) -> str:
    return f"{fast.owners} machines or parts"


def _unconfirmed(rates: Sequence[Rate], sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    """No two agree. Of three and more machines the median is the measure, of two none."""
    nodes = sorted({rate.node for rate in rates})
    if len(rates) < 2:
        return
    limit = config.min_of_peers * (max if len(nodes) < 3 else statistics.median)([rate.value for rate in rates])
    slow = [rate for rate in rates if rate.value < limit]
    if len(nodes) != 2:
        yield from (_slow(rate, limit, "failed", "slower than the others, of which no two agree") for rate in slow)
        return
    check, known = rates[0].check, knows_soundness(sku, rates[0].check)
    for rate in slow if known else [min(r for r in rates if r.node == node) for node in nodes if slow]:
        text = (
            "the slower one of two that the hardware's file passes, or judges by itself"
            if known
            else f"{nodes[0]} and {nodes[1]} disagree, and two cannot outvote each other: {_both(rates, nodes)}"
        )
        verdict: Verdict = "degraded" if known else "unknown"
        norm = f"give {check} a norm in the hardware's file (--record)"
        remedy = f"Qualify with a third machine (benchmark.spare_nodes: 1), or {norm}."
        yield _slow(rate, limit, verdict, text).model_copy(update={"remedy": remedy})


def _both(rates: Sequence[Rate], nodes: list[str]) -> str:
    return ", ".join(f"{node} {min(r.value for r in rates if r.node == node):.4g}" for node in nodes)


def _far_ahead(rates: Sequence[Rate], fast: Reference, sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    ahead = [r for r in rates if r.node in fast.faster and config.min_of_peers * r.value > fast.center]
    if not ahead or knows_soundness(sku, rates[0].check):
        return
    first = max(ahead, key=lambda rate: rate.value)
    yield Reason(
        node="",
        check=f"{first.check} against its peers",
        where=f"{first.node} {first.where}".strip(),
        measured=first.value,
        unit=first.unit,
        limit=f"<= {fast.center / config.min_of_peers:.4g}",
        source=SOURCE,
        verdict="degraded",
        said="far ahead of all others: an odd reading, or all others are slow",
        remedy=f"Give {first.check} a norm in the hardware's file (--record), and qualify again.",
        nodes=tuple(sorted({rate.node for rate in rates})),
    )


def _slow(rate: Rate, limit: float, verdict: Verdict, text: str) -> Reason:
    return Reason(
        node=rate.node,
        check=f"{rate.check} against its peers",
        where=rate.where,
        measured=rate.value,
        unit=rate.unit,
        limit=f">= {limit:.4g}",
        source=SOURCE,
        verdict=verdict,
        said=text,
        remedy=SLOW,
    )


# The training probe: what a rank reaches, and how much of it is left when more machines train together.


SLOW_TRAINING = (
    "See the probe's shares of data, communication and compute; compare with the plan (`headway retrain --to plan`)."
)


def of_training(measurement: Measurement, sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    """Probes that gave nothing, are slow by the hardware's file, or scale badly by it."""
    points = sorted(measurement.training, key=lambda p: (p.ranks, p.engine, p.nodes, p.model_dump_json()))
    points = [point for point in points if point.status != "skipped"]
    if not points and "training" in config.groups and measurement.expected_nodes:
        yield _reason(
            None, measured=None, check="training", unit="", limit="a measurement", text="no training probe ran"
        )
    for point in points:
        if point.status != "measured" or throughput(point) is None:
            status = point.status if point.status != "measured" else "no throughput"
            text = f"{status}: {point.said}" if point.said else status
            yield _reason(
                point, measured=None, check="training_tflops", unit="TFLOP/s", limit="a measurement", text=text
            )
            continue
        if point.tflops_per_rank is not None:
            yield from _by_file(point, "training_tflops", point.tflops_per_rank, "TFLOP/s", sku)
        share = efficiency(point, points)
        if share is not None:
            yield from _by_file(point, "scaling_efficiency", share, "", sku)


def throughput(point: TrainingPoint) -> float | None:
    """Of a rank: TFLOP/s, else tokens a second."""
    if point.status != "measured":
        return None
    if point.tflops_per_rank is not None:
        return point.tflops_per_rank if math.isfinite(point.tflops_per_rank) else None
    return (
        point.tokens_per_step / point.step_seconds / point.ranks
        if point.step_seconds and point.tokens_per_step
        else None
    )


def efficiency(point: TrainingPoint, points: list[TrainingPoint]) -> float | None:
    """A rank's throughput as a share of the best one on the fewest ranks, same engine; None for those themselves."""
    alike = [p for p in points if p.engine == point.engine and throughput(p) is not None]
    fewest = min((p.ranks for p in alike), default=point.ranks)
    base = max((throughput(p) or 0.0 for p in alike if p.ranks == fewest), default=0.0)
    mine = throughput(point)
    return mine / base if base and mine is not None and point.ranks > fewest else None


def rates_of_training(measurement: Measurement, sku: Sku) -> tuple[Rate, ...]:
    """Probes on single machines, to be compared with each other."""
    if not tolerances(sku).peers_by_measured:
        return ()
    return tuple(
        Rate(p.nodes[0], "", f"training on {p.ranks} ranks", p.tflops_per_rank, "TFLOP/s")
        for p in measurement.training
        if len(p.nodes) == 1 and p.tflops_per_rank is not None and throughput(p) is not None
    )


def _by_file(point: TrainingPoint, check: str, measured: float, unit: str, sku: Sku) -> Iterator[Reason]:
    limit = sku.limits.get(check)
    if limit is None:
        return
    judged = by_limit(measured, limit)
    if judged.verdict != "healthy":
        result = _reason(point, measured=measured, check=check, unit=unit, limit=judged.limit, text=point.said)
        yield result.model_copy(
            update={"verdict": judged.verdict, "source": cited_by(sku, limit, judged.verdict), "remedy": SLOW_TRAINING}
        )


def _reason(
    point: TrainingPoint | None, *, measured: float | None, check: str, unit: str, limit: str, text: str
) -> Reason:
    """Of the machine where it ran on one, else of the cluster; unknown unless the file says otherwise."""
    nodes = tuple(sorted(point.nodes)) if point else ()
    return Reason(
        node=nodes[0] if len(nodes) == 1 else "",
        check=check,
        where=f"{point.engine} on {point.ranks} ranks" if point else "",
        measured=measured,
        unit=unit,
        limit=limit,
        source="Headway: what was not measured is unknown",
        verdict="unknown",
        said=text,
        remedy="See the job's logs; give it more time with benchmark.check_seconds where it ran out of it.",
        nodes=nodes if len(nodes) > 1 else (),
    )
