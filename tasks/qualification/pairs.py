"""Pairs of machines: which are bad by the hardware's file or by the other pairs, and whose fault that is (votes.py)."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tasks.hardware.sku import Sku
from tasks.qualification.humps import Item, reference
from tasks.qualification.merged import Merged, size
from tasks.qualification.sweeps import NETWORK, of_sweep
from tasks.qualification.tolerances import tolerances
from tasks.qualification.verdicts import PairVerdict, Reason, worst
from tasks.qualification.votes import Blame, Pair, blame
from tasks.qualification_config import BenchmarkConfig
from tasks.qualification_names import Verdict

EITHER = "pair with "
"""How the place of a fault begins that may be the other machine's, or the link's."""
NAMED = 4
"""Most pairs that a sentence names."""
Key = tuple[int, int, tuple[str, ...]]
BAD: tuple[Verdict, ...] = ("failed", "unknown")


class Bad(NamedTuple):
    """What is wrong with a pair, worst first, and what it reached."""

    faults: tuple[Reason, ...]
    rate: float | None
    doubtful: bool = False
    """Slow beside the others, and not by so much that it would be believed alone: it counts in votes only."""

    @property
    def verdict(self) -> Verdict:
        """A pair that was seen to be bad has failed, whatever else is unknown of it."""
        found = [fault.verdict for fault in self.faults]
        return "failed" if "failed" in found else worst(*found)

    @property
    def without_doubt(self) -> Bad:
        """The same without what no vote confirmed."""
        return self._replace(faults=tuple(fault for fault in self.faults if fault.verdict not in BAD))


class Attributed(NamedTuple):
    """Reasons of machines and of the cluster, and every pair's verdict."""

    of_nodes: tuple[Reason, ...] = ()
    of_cluster: tuple[Reason, ...] = ()
    pairs: tuple[PairVerdict, ...] = ()


def of_pairs(
    sweeps: Sequence[Merged], sku: Sku, config: BenchmarkConfig, *, ours: bool, missing: Iterable[Pair] = ()
) -> Attributed:
    """Judge and attribute all pairs. `missing`: pairs that were to be measured and were not."""
    sweeps = [sweep for sweep in sweeps if len(sweep.nodes) == 2]
    slow, alone = _slower_than_others(sweeps, sku, config)
    found: dict[Pair, Bad] = {}
    for sweep in sweeps:
        pair = (sweep.nodes[0], sweep.nodes[1])
        before, mine = found.get(pair, Bad((), sweep.rate, doubtful=True)), of_sweep(sweep, sku, ours=ours)
        faults = (*before.faults, *mine, *slow.get(sweep.key, ()))
        sure = sweep.key in alone or any(fault.verdict in BAD for fault in mine)
        doubtful = before.doubtful and not sure
        found[pair] = Bad(faults, before.rate if before.rate is not None else sweep.rate, doubtful)
    for pair in missing:
        found.setdefault(pair, Bad((_unmeasured(),), None))
    return _attribute({pair: found[pair] for pair in sorted(found)}, tolerances(sku).most)


def unmeasured(sweeps: Sequence[Merged], names: Sequence[str], *, every: bool) -> tuple[Pair, ...]:
    """Pairs of machines that were not measured; where not every pair was to be: only those of machines that have none at all."""
    there = {sweep.nodes for sweep in sweeps}
    lonely = set(names) - {name for nodes in there for name in nodes}
    pairs = itertools.combinations(sorted(names), 2)
    return tuple(pair for pair in pairs if pair not in there and (every or {*pair} & lonely))


def _slower_than_others(
    sweeps: Sequence[Merged], sku: Sku, config: BenchmarkConfig
) -> tuple[dict[Key, tuple[Reason, ...]], set[Key]]:
    """Reasons of the slow ones, and which of them are so far outside the others' spread that one alone is believed."""
    groups: dict[tuple[str, int], list[tuple[Merged, float]]] = {}
    for sweep in sweeps:
        if sweep.rate is not None:
            groups.setdefault((sweep.collective, sweep.points[-1].bytes), []).append((sweep, sweep.rate))
    found, alone, allowed = dict[Key, tuple[Reason, ...]](), set[Key](), tolerances(sku)
    for (_, largest), members in sorted(groups.items()):
        items = [Item(" ".join(sweep.nodes), rate) for sweep, rate in members]
        fast = reference(items, allowed.pairs_gap, lone=allowed.lone_pair)
        center = fast.center if fast else statistics.median(item.value for item in items)
        limit = allowed.pairs * config.min_of_peers * center
        believed = min(allowed.link, fast.outside if fast else 1.0) * center
        for sweep, rate in members:
            if rate < limit:
                found[sweep.key] = (_slow(sweep, rate, limit, largest),)
                alone |= {sweep.key} if rate < believed else set()
    return found, alone


def _slow(sweep: Merged, rate: float, limit: float, largest: int) -> Reason:
    return Reason(
        node="",
        check=f"{sweep.collective} busbw at {size(largest)} against other pairs",
        measured=rate,
        unit="GB/s",
        limit=f">= {limit:.4g}",
        source="Headway: benchmark.min_of_peers of the fastest group of pairs",
        verdict="failed",
        remedy=NETWORK,
    )


def _unmeasured() -> Reason:
    return Reason(
        node="",
        check="pair",
        measured=None,
        limit="a measurement",
        source="Headway: what was not measured is unknown",
        verdict="unknown",
        said="it was not measured",
        remedy="See the job's logs; give pairs more time with benchmark.check_seconds.",
    )


def _attribute(found: dict[Pair, Bad], most: float) -> Attributed:
    """Those that failed or are unknown first, then what is merely degraded among the machines that are left."""
    bad = [pair for pair, what in found.items() if what.verdict in BAD]
    doubtful = {pair for pair in bad if found[pair].doubtful}
    first = blame([pair for pair, what in found.items() if what.verdict not in BAD], bad, most=most, doubtful=doubtful)
    found = {pair: what.without_doubt if pair in first.noise else what for pair, what in found.items()}
    bad = [pair for pair in bad if pair not in first.noise]
    out = {*first.nodes, *first.cut_off, *(name for pair in first.either for name in pair)}
    rest = {pair: what.verdict for pair, what in found.items() if what.verdict not in BAD and not {*pair} & out}
    warned = [pair for pair, verdict in rest.items() if verdict == "degraded"]
    second = blame([pair for pair, verdict in rest.items() if verdict == "healthy"], warned, most=most)
    guilty = {name for votes in (first, second) for name in (*votes.nodes, *votes.cut_off)}
    links = {*first.links, *second.links}
    return Attributed(
        (*_of_nodes(first, found, bad), *_of_nodes(second, found, warned)),
        (*_of_cluster(first, found, bad), *_of_cluster(second, found, warned)),
        tuple(_verdict(pair, what, guilty, links) for pair, what in found.items()),
    )


def _of_nodes(votes: Blame, found: dict[Pair, Bad], bad: list[Pair]) -> list[Reason]:
    reasons = []
    for name in (*votes.nodes, *votes.cut_off):
        mine = [pair for pair in bad if name in pair]
        count = sum(name in pair for pair in found)
        alone = (
            "the machines are sound with each other"
            if name in votes.nodes
            else "a group is cut off: a switch or a rack?"
        )
        said = f"{len(mine)} of its {count} pairs are bad ({_shown(name, mine, found)}); {alone}"
        reasons.append(_lead(mine, found, node=name, said=said))
    for a, b in votes.either:
        for name, other in ((a, b), (b, a)):
            said = f"one of {a} and {b} or the link between them: neither has a sound pair with another machine"
            reasons.append(_lead([(a, b)], found, node=name, said=said, where=f"{EITHER}{other}"))
    return reasons


def _of_cluster(votes: Blame, found: dict[Pair, Bad], bad: list[Pair]) -> list[Reason]:
    reasons = [
        _lead(
            [pair], found, nodes=pair, where=f"link {pair[0]} - {pair[1]}", said="both machines are sound with others"
        )
        for pair in votes.links
    ]
    names = tuple(sorted({name for pair in bad for name in pair}))
    if votes.all:
        said = f"all {len(bad)} pairs are bad: the network or its settings, and not a machine"
        reasons.append(_lead(bad, found, nodes=names, where="all pairs", said=said))
    if votes.halves:
        groups = " and ".join("(" + ", ".join(group) + ")" for group in votes.halves)
        said = f"machines are sound within {groups} and bad between them: a switch or a cable between racks"
        reasons.append(_lead(bad, found, nodes=names, where="between groups", said=said))
    return reasons


def _lead(
    pairs: Sequence[Pair],
    found: dict[Pair, Bad],
    *,
    said: str,
    node: str = "",
    where: str = "pairs",
    nodes: tuple[str, ...] = (),
) -> Reason:
    """The worst fault of some pairs, said of whom it is attributed to; of slow ones the median is shown."""
    verdict = "failed" if any(found[pair].verdict == "failed" for pair in pairs) else found[pairs[0]].verdict
    faults = [fault for pair in pairs for fault in found[pair].faults if fault.verdict == verdict]
    lead = min(faults, key=lambda fault: (_severity(fault), fault.check))
    alike = [fault.measured for fault in faults if fault.check == lead.check and isinstance(fault.measured, float)]
    measured = statistics.median(alike) if alike else lead.measured
    said = "; ".join(part for part in (lead.said, said) if part)
    return lead.model_copy(update={"node": node, "where": where, "measured": measured, "said": said, "nodes": nodes})


def _severity(fault: Reason) -> int:
    """Wrong results first, then the wrong transport, then rates."""
    return next((n for n, word in enumerate(("wrong", "transport", "busbw")) if word in fault.check), 3)


def _shown(name: str, pairs: list[Pair], found: dict[Pair, Bad]) -> str:
    parts = [f"{b if a == name else a}{_rate(found[a, b].rate)}" for a, b in pairs[:NAMED]]
    return ", ".join(parts) + (", ..." if len(pairs) > NAMED else "")


def _rate(rate: float | None) -> str:
    return " no result" if rate is None else f" {rate:.4g} GB/s"


def _verdict(pair: Pair, what: Bad, guilty: set[str], links: set[Pair]) -> PairVerdict:
    a, b = pair
    if what.verdict == "healthy":
        return PairVerdict(a=a, b=b, busbw_gb_s=what.rate, verdict="healthy")
    blamed: Literal["a", "b", "link", ""] = "link" if pair in links else ""
    if (a in guilty) != (b in guilty):
        blamed = "a" if a in guilty else "b"
    said = next(f"{fault.check}: {fault.said or fault.limit}" for fault in what.faults if fault.verdict == what.verdict)
    return PairVerdict(a=a, b=b, busbw_gb_s=what.rate, verdict=what.verdict, blamed=blamed, said=said)
