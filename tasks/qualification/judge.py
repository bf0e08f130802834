"""A measurement's verdict: every rule of this folder, once, and its reasons with the machine that they are about.

Pure: the same measurement, hardware, configuration and history give the same verdict, whatever the order of ranks and sweeps.
Here rules meet, and those about sizes, versions, halves and the past of machines are here; the others have files of their own:
limits (probes), peers (and training), sweeps, pairs. Which machines may be used after it is remaining.py.
"""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tasks.config.base import digest
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Image, Sku, plain_name
from tasks.qualification import pairs, remaining
from tasks.qualification.limits import all_gpus, cited, of_probe, same, tolerances
from tasks.qualification.measured import Measurement, RankReport
from tasks.qualification.peers import Rate, against_peers, of_training, rates_of, rates_of_training, standings
from tasks.qualification.sweeps import NETWORK, Merged, merged, of_sweep, size
from tasks.qualification.verdicts import WORST, ClusterVerdict, NodeVerdict, PairVerdict, Reason, Value, worst

# Where a fault of all machines together lies, by halves of them that were measured again (bisection).
#
# A machine of a sound part is cleared. Those of a bad part that no sound part clears are suspects; the smallest bad
# parts count.


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
        results.append(
            Reason(
                node="",
                check=f"{sweep.collective} busbw at {size(sweep.points[-1].bytes)} against other parts",
                measured=sweep.rate,
                unit="GB/s",
                limit=f">= {limit:.4g}",
                source="Headway: benchmark.min_of_peers of the fastest part of as many machines",
                verdict="failed",
                remedy=NETWORK,
            )
        )
    return results


def _comparable(one: Merged, other: Merged) -> bool:
    def kind(sweep: Merged) -> tuple[str, float, list[int]]:
        return sweep.collective, sweep.ranks / len(sweep.nodes), [point.bytes for point in sweep.points[-1:]]

    return kind(one) == kind(other)


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
            others = [node for node in sweep.nodes if node not in suspects]
            alone = len(suspects) == 1
            text = (
                f"parts without it are sound, and so are {', '.join(others)}"
                if alone
                else f"the fault is in one of {', '.join(suspects)}; nothing smaller was measured"
            )
            yield fault.model_copy(
                update={
                    "node": name,
                    "where": f"part of {len(sweep.nodes)}",
                    "verdict": fault.verdict if alone else "unknown",
                    "said": "; ".join(part for part in (fault.said, text) if part),
                }
            )


def _keeps_up(sweep: Merged, sound: Sequence[Merged], share: float) -> bool:
    rates = [other.rate or 0.0 for other in sound if _comparable(other, sweep)]
    return sweep.scope == "part" or (sweep.rate or 0.0) >= share * max(rates)


def _worst(faults: Sequence[Reason]) -> Reason | None:
    return min((f for f in faults if f.verdict in BAD), key=lambda f: (f.verdict != "failed", f.check), default=None)


# Whether machines are of the size as which they are judged: by the limits of another one a verdict says little.


ANY = ("local-cpu", "local-gpu")
"""Hardware of no size: any machine may be judged as it."""


def of_another_size(report: RankReport, sku: Sku) -> Iterator[Reason]:
    """A machine whose own name for its size is none of the hardware's. Limits for CPUs hold on machines of any size."""
    size = report.machine.get("vm_size", "")
    names = (sku.name, *sku.aliases, *sku.sizes)
    if not size or sku.vendor == "cpu" or sku.name in ANY or plain_name(size) in map(plain_name, names):
        return
    yield Reason(
        node=report.node,
        check="vm_size",
        measured=size,
        limit=f"= {sku.name}",
        source="Azure's metadata service, beside the hardware that it is judged as",
        verdict="degraded",
        said=f"a {size} is judged as {sku.name}",
        remedy=f"Set benchmark.sku to {plain_name(size)}; a file of your own that holds for it names it in `sizes`.",
    )


# Versions of drivers and libraries: equal on all machines, and those of the image that the hardware's file knows.


PREFIX = "version_"
NONE = "not reported"
RENEW = "Put the same image on all machines, or update this one, and qualify it again."


def by_node(measurement: Measurement) -> dict[str, dict[str, str]]:
    """Versions of each machine by name; of ranks that disagree all are named."""
    result: dict[str, dict[str, set[str]]] = {}
    for report in measurement.ranks:
        mine = result.setdefault(report.node, {})
        probes = {
            p.check.removeprefix(PREFIX): str(p.measured)
            for p in report.probes
            if (p.check.startswith(PREFIX) and p.measured is not None)
        }
        for name, value in (*report.versions.items(), *probes.items()):
            mine.setdefault(name, set()).add(value)
    return {
        node: {name: " and ".join(sorted(values)) for name, values in mine.items()} for node, mine in result.items()
    }


def unequal(versions: Mapping[str, Mapping[str, str]]) -> Iterator[Reason]:
    """The machines that are fewer; all where no version has more machines than every other."""
    for name in sorted({name for mine in versions.values() for name in mine}):
        counts = Counter(mine.get(name, NONE) for mine in versions.values())
        if len(counts) == 1:
            continue
        (usual, most), (_, second) = counts.most_common(2)
        decided = most > second and usual != NONE
        for node, mine in sorted(versions.items()):
            if not decided or mine.get(name, NONE) != usual:
                yield _unequal(node, name, mine.get(name, NONE), usual if decided else "", counts)


def _unequal(node: str, name: str, mine: str, usual: str, counts: Counter[str]) -> Reason:
    shown = ", ".join(f"{value} on {number}" for value, number in sorted(counts.items()))
    return Reason(
        node=node,
        check=f"{PREFIX}{name}",
        measured=mine,
        limit=f"= {usual}" if usual else "the same on all machines",
        source="most machines" if usual else "the machines, none of which are most",
        verdict="degraded",
        said=f"machines have {shown}",
        remedy=RENEW,
    )


def unlike_image(node: str, mine: Mapping[str, str], sku: Sku) -> Iterator[Reason]:
    """What differs from the image that the machine says it has, else from the nearest one that the file knows."""
    named = [image for image in sku.images if image.urn == mine.get("image")]
    known = named or ([] if "image" in mine else list(sku.images))
    if not known:
        return
    nearest = min(known, key=lambda image: (len(_differing(mine, image)), image.urn))
    for name in _differing(mine, nearest):
        yield Reason(
            node=node,
            check=f"{PREFIX}{name}",
            measured=mine[name],
            limit=f"= {nearest.versions[name]}",
            source=f"{nearest.urn}: {cited(sku, nearest.source)}",
            verdict="degraded",
            said=f"not as in {nearest.urn}",
            remedy=RENEW,
        )


def _differing(mine: Mapping[str, str], image: Image) -> list[str]:
    return [name for name, value in sorted(image.versions.items()) if name in mine and not same(mine[name], value)]


class Case(NamedTuple):
    """What is judged, by what, and what rules need of it again and again."""

    measurement: Measurement
    sku: Sku
    config: BenchmarkConfig
    names: tuple[str, ...]
    sweeps: tuple[Merged, ...]
    rates: tuple[Rate, ...]

    @property
    def ours(self) -> bool:
        """Whether a job of ours measured, so that what is missing is known to be missing; else logs are judged."""
        return self.measurement.expected_nodes > 0

    @property
    def reported(self) -> tuple[str, ...]:
        """Machines of which any rank reported."""
        return tuple(sorted({report.node for report in self.measurement.ranks}))


class Found(NamedTuple):
    """What rules about several machines say."""

    reasons: tuple[Reason, ...]
    pairs: tuple[PairVerdict, ...]
    together: tuple[tuple[str, ...], ...]
    groups: tuple[tuple[str, ...], ...]


def judge(measurement: Measurement, sku: Sku, config: BenchmarkConfig, history: Sequence[Past] = ()) -> ClusterVerdict:
    """The verdict on every machine, on every pair, and on what they did together. What is missing is unknown."""
    names = remaining.known_nodes(measurement, config)
    sweeps = merged(measurement.sweeps)
    rates = (*rates_of(measurement, sku), *rates_of_training(measurement, sku), *_rates_of_nodes(sweeps, sku))
    case = Case(measurement, sku, config, names, sweeps, rates)
    network = _network(case)
    reasons = [*_of_machines(case), *network.reasons, *of_training(measurement, sku, config)]
    reasons += against_peers(rates, sku, config)
    nodes = (*_nodes(case, reasons, history), *remaining.absent(measurement, len(names)))
    unfinished = tuple(node.name for node in nodes if node.verdict in ("unknown", "failed"))
    reasons += remaining.of_cluster(measurement, unfinished)
    of_cluster = _in_order(reason for reason in reasons if not reason.node)
    return ClusterVerdict(
        verdict=worst(*(node.verdict for node in nodes), *(reason.verdict for reason in of_cluster)),
        sku=sku.name,
        sku_digest=digest(sku.model_dump(mode="json")),
        nodes=nodes,
        pairs=network.pairs,
        reasons=of_cluster,
        together=network.together,
        groups=network.groups,
    )


def _in_order(reasons: Iterator[Reason]) -> tuple[Reason, ...]:
    """The worst first, each once."""
    result = {reason.model_dump_json(): reason for reason in reasons}
    return tuple(
        reason for _, reason in sorted(result.items(), key=lambda item: (WORST.index(item[1].verdict), item[0]))
    )


def _nodes(case: Case, reasons: Sequence[Reason], history: Sequence[Past]) -> Iterator[NodeVerdict]:
    standing, rates = standings(case.rates, case.config), _own_rates(case)
    for name in case.names:
        mine = [reason for reason in reasons if reason.node == name]
        now = NodeVerdict(
            name=name,
            verdict=worst(*(reason.verdict for reason in mine)),
            reasons=tuple(mine),
            rates=rates.get(name, {}),
            standing=standing.get(name, 1.0),
        )
        mine += of_past(now, history, case.sku)
        verdict = worst(*(reason.verdict for reason in mine))
        yield now.model_copy(update={"verdict": verdict, "reasons": _in_order(iter(mine))})


def _of_machines(case: Case) -> Iterator[Reason]:
    """What is said of each machine by itself."""
    installed = by_node(case.measurement)
    yield from unequal(installed)
    for node, mine in sorted(installed.items()):
        yield from unlike_image(node, mine, case.sku)
    for name in case.names:
        yield from remaining.of_node(name, case.measurement, case.sku, case.config)
    for report in case.measurement.ranks:
        yield from of_another_size(report, case.sku)
        for probe in report.probes:
            yield from of_probe(report.node, probe, case.sku)
    for sweep in case.sweeps:
        if len(sweep.nodes) == 1:
            result = of_sweep(sweep, case.sku, ours=case.ours)
            yield from (reason.model_copy(update={"node": sweep.nodes[0]}) for reason in result)


def _network(case: Case) -> Found:
    """What is said of machines together."""
    several = [sweep for sweep in case.sweeps if len(sweep.nodes) > 1]
    twos = [sweep for sweep in several if sweep.scope == "pair"]
    larger = [sweep for sweep in several if sweep.scope != "pair"]
    wanted = case.ours and "pairs" in case.config.groups
    missing = pairs.unmeasured(twos, case.reported, every=case.config.depth == "full") if wanted else ()
    switches = remaining.switches(case.measurement)
    by_pairs = pairs.of_pairs(twos, case.sku, case.config, ours=case.ours, missing=missing, switches=switches)
    judged = [(s, faults_of(s, larger, case.sku, case.config, ours=case.ours)) for s in larger]
    whole = [
        reason.model_copy(update={"nodes": sweep.nodes, "where": f"{sweep.scope}, {len(sweep.nodes)} machines"})
        for sweep, faults in judged
        for reason in faults
    ]
    suspects = located(judged, case.config)
    sound = {s.nodes for s, _ in judged} - {
        s.nodes for s, faults in judged if worst(*(f.verdict for f in faults)) in BAD
    }
    reasons = (*by_pairs.of_nodes, *by_pairs.of_cluster, *whole, *suspects, *_untried(case, several))
    return Found(reasons, by_pairs.pairs, tuple(sorted(sound)), by_pairs.groups)


def _untried(case: Case, several: Sequence[Merged]) -> Iterator[Reason]:
    """Machines that did nothing together with others though they were to."""
    if not case.ours or "collectives" not in case.config.groups:
        return
    if len(case.reported) > 1:
        tried = {node for sweep in several if sweep.scope != "pair" for node in sweep.nodes}
        yield from (_in_no_sweep(name, "of all machines") for name in case.reported if name not in tried)
    if case.measurement.ranks_per_node > 1:
        alone = {sweep.nodes[0] for sweep in case.sweeps if len(sweep.nodes) == 1}
        yield from (_in_no_sweep(name, "within the machine") for name in case.reported if name not in alone)


def _in_no_sweep(name: str, which: str) -> Reason:
    return Reason(
        node=name,
        check="collectives",
        measured="in no sweep",
        limit=f"a sweep {which}",
        source=remaining.SOURCE,
        verdict="unknown",
        said=f"no sweep {which} has it",
        remedy=remaining.LOGS,
    )


def _rates_of_nodes(sweeps: Sequence[Merged], sku: Sku) -> Iterator[Rate]:
    """Sweeps within machines are compared like any rate of theirs."""
    for sweep in sweeps if tolerances(sku).peers_by_measured else ():
        if len(sweep.nodes) == 1 and sweep.rate is not None:
            part = "node" if all_gpus(sku, sweep.ranks, 1) else f"{sweep.ranks} GPUs"
            yield Rate(sweep.nodes[0], "", f"{sweep.collective} of {part}", sweep.rate, "GB/s")


def _own_rates(case: Case) -> dict[str, dict[str, float]]:
    """A machine's figures for its own history: of each check its slowest part, of pairs their median."""
    result: dict[str, dict[str, float]] = {name: {} for name in case.names}
    for rate in case.rates:
        mine = result[rate.node]
        mine[rate.check] = min(mine.get(rate.check, rate.value), rate.value)
    of_pairs: dict[tuple[str, str], list[float]] = {}
    for sweep in case.sweeps:
        for name in sweep.nodes if sweep.scope == "pair" and sweep.rate is not None else ():
            of_pairs.setdefault((name, f"{sweep.collective} of pair"), []).append(sweep.rate or 0.0)
    for (name, check), values in sorted(of_pairs.items()):
        result[name][check] = statistics.median(values)
    return result


WARNINGS = 3
"""The same warning so many times in a row, this time included, has failed."""
WINDOW, RELAPSES = 5, 2
"""Failures among the last verdicts that leave a doubt."""
EARLIER = 2
"""Fewest earlier figures to compare with."""
PAST = "its past"
SETTINGS = ("vm_size", "version_", "sm_clock", "memory_clock", "persistence", "sriov", "time_skew", "scratch_free")
"""Beginnings of checks of how a machine was set up: a warning stays until somebody changes that, and nothing wears out."""
SOURCE = "Headway: the machine's earlier qualifications"


class Past(Value):
    """An earlier verdict on a machine."""

    time: datetime.datetime
    verdict: NodeVerdict


def of_past(now: NodeVerdict, history: Sequence[Past], sku: Sku) -> Iterator[Reason]:
    """What the past says of a machine as it is now."""
    mine = sorted(
        (p for p in history if p.verdict.name == now.name), key=lambda p: (p.time, p.verdict.model_dump_json())
    )
    earlier = [past.verdict for past in mine]
    yield from _again(now, earlier)
    failed = sum(verdict.verdict == "failed" for verdict in earlier[-WINDOW:])
    if failed >= RELAPSES and now.verdict in ("healthy", "degraded"):
        yield Reason(
            node=now.name,
            check=f"failures in {PAST}",
            measured=float(failed),
            unit=f"of the last {len(earlier[-WINDOW:])}",
            limit=f"<= {RELAPSES - 1}",
            source=SOURCE,
            verdict="degraded",
            said="it comes and goes",
            remedy="Do not give it a long run before its parts were looked at (`headway qualify --history NODE`).",
        )
    yield from _slower(now, [past.rates for past in earlier], tolerances(sku).own_warn)


def _warned(verdict: NodeVerdict) -> set[str]:
    return {
        r.check
        for r in verdict.reasons
        if r.verdict == "degraded" and r.source != SOURCE and not r.check.startswith(SETTINGS)
    }


def _again(now: NodeVerdict, earlier: Sequence[NodeVerdict]) -> Iterator[Reason]:
    last = earlier[1 - WARNINGS :]
    if len(last) < WARNINGS - 1:
        return
    for check in sorted(_warned(now).intersection(*map(_warned, last))):
        yield Reason(
            node=now.name,
            check=f"{check} in {PAST}",
            measured=float(WARNINGS),
            unit="warnings in a row",
            limit=f"<= {WARNINGS - 1}",
            source=SOURCE,
            verdict="failed",
            said="a warning that stays is a fault",
            remedy="Take the machine out and have it repaired or replaced.",
        )


def _slower(now: NodeVerdict, earlier: Sequence[Mapping[str, float]], least: float) -> Iterator[Reason]:
    for check, rate in sorted(now.rates.items()):
        before = [rates[check] for rates in earlier if check in rates]
        usual = statistics.median(before) if len(before) >= EARLIER else 0.0
        if usual > 0 and rate < least * usual:
            yield Reason(
                node=now.name,
                check=f"{check} against {PAST}",
                measured=rate,
                limit=f">= {least * usual:.4g}",
                source=SOURCE,
                verdict="degraded",
                said=f"{rate / usual:.0%} of its median of {len(before)} earlier qualifications, {usual:.4g}",
                remedy="See what changed: driver, clocks, power cap, temperature, other work on the machine.",
            )
