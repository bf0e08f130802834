"""Pairs of machines: which are bad by the hardware's file or by the other pairs, and whose fault that is."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from tasks.config.qualification import BenchmarkConfig, Verdict
from tasks.hardware.sku import Sku
from tasks.qualification.limits import tolerances
from tasks.qualification.peers import Item, reference
from tasks.qualification.sweeps import NETWORK, Merged, of_sweep, size
from tasks.qualification.verdicts import PairVerdict, Reason, worst

# Whose fault are bad pairs: a machine's, a link's, or the network's. Pure graph work, over names.
#
# Sound pairs connect machines to groups. A machine is blamed only by partners that are measured sound: most of their
# own pairs are not bad, and they are of its group where it has one. Most of its pairs with them must be bad, and the
# worst machine goes first. Bad pairs between two groups, each sound by itself, are the network's, whatever the sizes of
# the groups, and so are all machines of one switch when nothing under another one is bad. A bad pair that is left
# between machines that are sound with others is the link's. While the network between groups is bad, a machine without
# any sound pair may be alone behind its switch: it is blamed only where a partner under the same switch is sound, else
# nobody can tell.


Pair = tuple[str, str]
Near = dict[str, set[str]]
Name = TypeVar("Name", int, str)
MOST = 0.5
"""More than this share of a machine's pairs must be bad, and two at least; callers may want more of noisy pairs."""
OF_A_SWITCH = 3
"""So many machines under one switch, all bad, are the switch's fault and not theirs."""


class Blame(NamedTuple):
    """What the votes say."""

    nodes: tuple[str, ...] = ()
    """At fault: most of their pairs with sound partners are bad."""
    groups: tuple[tuple[str, ...], ...] = ()
    """The network between them is at fault: each is sound inside, and bad with another one. The largest first."""
    switches: tuple[str, ...] = ()
    """At fault: all that is under them is bad, and nothing else is."""
    links: tuple[Pair, ...] = ()
    """At fault between two machines that are sound with others."""
    either: tuple[Pair, ...] = ()
    """Nothing tells which of the two machines, or whether the link."""
    unclear: tuple[str, ...] = ()
    """Without a sound pair while the network is bad: the machine, or the network."""
    noise: tuple[Pair, ...] = ()
    """Doubtful pairs that no vote confirms."""
    all: bool = False
    """Not one pair is sound."""


def blame(
    good: Iterable[Pair],
    bad: Iterable[Pair],
    *,
    most: float = MOST,
    doubtful: Collection[Pair] = (),
    switches: Mapping[str, str] | None = None,
) -> Blame:
    """Attribute the bad pairs. Pairs are of sorted names, each once; `doubtful` ones count in votes, and not alone.

    `switches`: the switch that a machine is under, where that is known.
    """
    sound, slow, switches = set(good), set(bad), switches or {}
    names = {name for pair in (*sound, *slow) for name in pair}
    if not slow:
        return Blame()
    if not sound:
        return Blame(all=True) if len(names) > 2 else Blame(either=tuple(sorted(slow)))
    results = [group for group in groups(names, sound) if len(group) > 1]
    group_of = {name: number for number, group in enumerate(results) for name in group}
    between = {pair for pair in slow if len({group_of.get(name, -1) for name in pair} - {-1}) == 2}
    if len(between) < 2:  # one pair alone is a link
        between = set()
    apart = tuple(group for group in results if any({*pair} & {*group} for pair in between))
    inside = slow - between
    nodes = _outvoted(names, _near(sound), _near(inside), most)
    noise = {pair for pair in inside if pair in doubtful and not {*pair} & nodes}
    proven = {name for pair in (*sound, *noise) for name in pair}
    nodes |= {name for pair in inside - noise if not {*pair} & nodes for name in _unproven(pair, proven)}
    unclear = {name for name in nodes - set(group_of) if apart and not _vouched(name, slow, group_of, switches)}
    # Switches of which every machine is blamed, while some machine elsewhere is not
    blamed = nodes - unclear
    under: dict[str, set[str]] = {}
    for name in names & set(switches):
        under.setdefault(switches[name], set()).add(name)
    whole = sorted(switch for switch, mine in under.items() if len(mine) >= OF_A_SWITCH and mine <= blamed)
    bad_switches = tuple(whole) if len(under) > 1 else ()
    left = [pair for pair in sorted(inside - noise) if not {*pair} & nodes]
    return Blame(
        nodes=tuple(sorted(name for name in nodes - unclear if switches.get(name) not in bad_switches)),
        groups=apart,
        switches=bad_switches,
        links=tuple(pair for pair in left if {*pair} <= proven),
        either=tuple(pair for pair in left if not {*pair} <= proven),
        unclear=tuple(sorted(unclear)),
        noise=tuple(sorted(noise)),
    )


def _unproven(pair: Pair, proven: set[str]) -> list[str]:
    """The one that has no sound pair, where the other one has."""
    doubtful = [name for name in pair if name not in proven]
    return doubtful if len(doubtful) == 1 else []


def _vouched(name: str, slow: set[Pair], group_of: Mapping[str, int], switches: Mapping[str, str]) -> bool:
    """Whether it is bad with a sound machine under its own switch: then the way between switches has no part in it."""
    partners = {other for pair in slow if name in pair for other in pair} - {name}
    return name in switches and any(other in group_of and switches.get(other) == switches[name] for other in partners)


def _near(pairs: set[Pair]) -> Near:
    """Of each machine, those with which it has one of the pairs."""
    near: Near = {}
    for a, b in pairs:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    return near


def groups(names: Iterable[Name], sound: Iterable[tuple[Name, ...]]) -> list[tuple[Name, ...]]:
    """Machines that sound pairs connect, the largest group first; who has none is a group alone."""
    near: dict[Name, set[Name]] = {name: set() for name in names}
    for a, b in sound:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    result, left = list[tuple[Name, ...]](), set(near)
    while left:
        group, front = set[Name](), {min(left)}
        while front:
            group |= front
            front = {other for name in front for other in near[name]} - group
        result.append(tuple(sorted(group)))
        left -= group
    return sorted(result, key=lambda group: (-len(group), group))


def _outvoted(names: set[str], sound: Near, slow: Near, most: float) -> set[str]:
    """The worst by its share of bad pairs goes first, with all that are as bad, until none is mostly bad."""
    blamed, inside = set[str](), set(names)
    while True:
        with_a_pair = {name for name in inside if sound.get(name, set()) & inside}
        first = {name: _share(name, with_a_pair, sound, slow) for name in inside}
        partners = {name for name in with_a_pair if first[name] <= most}
        shares = {name: _share(name, partners, sound, slow) for name in inside}
        worst = max(shares.values(), default=0.0)
        if worst <= most:
            return blamed
        now = {name for name, share in shares.items() if share == worst}
        blamed |= now
        inside -= now


def _share(name: str, partners: set[str], sound: Near, slow: Near) -> float:
    """Of its pairs with these partners, the bad ones."""
    bad = len(slow.get(name, set()) & partners)
    return bad / (bad + len(sound.get(name, set()) & partners)) if bad > 1 else 0.0


EITHER = "pair with "
"""How the place of a fault begins that may be the other machine's, or the link's."""
NAMED = 4
"""Most pairs, or groups, that a sentence names; more links than this at once are the network's."""
Key = tuple[int, int, tuple[str, ...], int]
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
        results = [fault.verdict for fault in self.faults]
        return "failed" if "failed" in results else worst(*results)

    @property
    def without_doubt(self) -> Bad:
        """The same without what no vote confirmed."""
        return self._replace(faults=tuple(fault for fault in self.faults if fault.verdict not in BAD))


class Attributed(NamedTuple):
    """Reasons of machines and of the cluster, and every pair's verdict."""

    of_nodes: tuple[Reason, ...] = ()
    of_cluster: tuple[Reason, ...] = ()
    pairs: tuple[PairVerdict, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    """Machines that are sound among themselves, while the network between such groups is bad; the largest first."""


def of_pairs(
    sweeps: Sequence[Merged],
    sku: Sku,
    config: BenchmarkConfig,
    *,
    ours: bool,
    missing: Iterable[Pair] = (),
    switches: Mapping[str, str] | None = None,
) -> Attributed:
    """Judge and attribute all pairs. `missing`: pairs that were to be measured and were not; `switches`: of machines, where
    known."""
    sweeps = [sweep for sweep in sweeps if len(sweep.nodes) == 2]
    slow, alone = _slower_than_others(sweeps, sku, config)
    result: dict[Pair, Bad] = {}
    for sweep in sweeps:
        pair = (sweep.nodes[0], sweep.nodes[1])
        before, mine = result.get(pair, Bad((), sweep.rate, doubtful=True)), of_sweep(sweep, sku, ours=ours)
        faults = (*before.faults, *mine, *slow.get(sweep.key, ()))
        sure = sweep.key in alone or any(fault.verdict in BAD for fault in mine)
        doubtful = before.doubtful and not sure
        result[pair] = Bad(faults, before.rate if before.rate is not None else sweep.rate, doubtful)
    unmeasured = Reason(
        node="",
        check="pair",
        measured=None,
        limit="a measurement",
        source="Headway: what was not measured is unknown",
        verdict="unknown",
        said="it was not measured",
        remedy="See the job's logs; give pairs more time with benchmark.check_seconds.",
    )
    for pair in missing:
        result.setdefault(pair, Bad((unmeasured,), None))
    return _attribute({pair: result[pair] for pair in sorted(result)}, tolerances(sku).most, switches or {})


def unmeasured(sweeps: Sequence[Merged], names: Sequence[str], *, every: bool) -> tuple[Pair, ...]:
    """Pairs of machines that were not measured; where not every pair was to be: only those of machines that have none at all."""
    existing = {sweep.nodes for sweep in sweeps}
    lonely = set(names) - {name for nodes in existing for name in nodes}
    pairs = itertools.combinations(sorted(names), 2)
    return tuple(pair for pair in pairs if pair not in existing and (every or {*pair} & lonely))


def _slower_than_others(
    sweeps: Sequence[Merged], sku: Sku, config: BenchmarkConfig
) -> tuple[dict[Key, tuple[Reason, ...]], set[Key]]:
    """Reasons of the slow ones, and which of them are so far outside the others' spread that one alone is believed."""
    groups: dict[tuple[str, int, int], list[tuple[Merged, float]]] = {}
    for sweep in sweeps:
        if sweep.rate is not None:
            groups.setdefault((sweep.collective, sweep.points[-1].bytes, sweep.ranks), []).append((sweep, sweep.rate))
    result, alone, allowed = dict[Key, tuple[Reason, ...]](), set[Key](), tolerances(sku)
    for (_, largest, _), members in sorted(groups.items()):
        items = [Item(" ".join(sweep.nodes), rate) for sweep, rate in members]
        fast = reference(items, allowed.pairs_gap, lone=allowed.lone_pair)
        center = fast.center if fast else statistics.median(item.value for item in items)
        limit = allowed.pairs * config.min_of_peers * center
        believed = min(allowed.link, fast.outside if fast else 1.0) * center
        for sweep, rate in members:
            if rate < limit:
                slow = Reason(
                    node="",
                    check=f"{sweep.collective} busbw at {size(largest)} against other pairs",
                    measured=rate,
                    unit="GB/s",
                    limit=f">= {limit:.4g}",
                    source="Headway: benchmark.min_of_peers of the fastest group of pairs",
                    verdict="failed",
                    remedy=NETWORK,
                )
                result[sweep.key] = (slow,)
                alone |= {sweep.key} if rate < believed else set()
    return result, alone


def _attribute(result: dict[Pair, Bad], most: float, switches: Mapping[str, str]) -> Attributed:
    """Those that failed or are unknown first, then what is merely degraded among the machines that are left."""
    bad = [pair for pair, what in result.items() if what.verdict in BAD]
    doubtful = {pair for pair in bad if result[pair].doubtful}
    good = [pair for pair, what in result.items() if what.verdict not in BAD]
    first = blame(good, bad, most=most, doubtful=doubtful, switches=switches)
    result = {pair: what.without_doubt if pair in first.noise else what for pair, what in result.items()}
    bad = [pair for pair in bad if pair not in first.noise]
    out = {*first.nodes, *first.unclear, *(name for pair in first.either for name in pair)}
    out |= {name for name, switch in switches.items() if switch in first.switches}
    rest = {pair: what.verdict for pair, what in result.items() if what.verdict not in BAD and not {*pair} & out}
    warned = [pair for pair, verdict in rest.items() if verdict == "degraded"]
    healthy = [pair for pair, verdict in rest.items() if verdict == "healthy"]
    second = blame(healthy, warned, most=most, switches=switches)
    guilty = {*first.nodes, *second.nodes}
    links = {*first.links, *second.links}
    apart = {
        pair
        for votes, pairs in ((first, bad), (second, warned))
        for pair in pairs
        if _of_network(pair, votes, switches)
    }
    return Attributed(
        (*_of_nodes(first, result, bad), *_of_nodes(second, result, warned)),
        (*_of_cluster(first, result, bad, switches), *_of_cluster(second, result, warned, switches)),
        tuple(_verdict(pair, what, guilty, links, apart) for pair, what in result.items()),
        first.groups,
    )


def _of_network(pair: Pair, votes: Blame, switches: Mapping[str, str]) -> bool:
    """Whether the network is blamed for a bad pair: it is between two groups, or under a switch that is bad."""
    between = sum(bool({*pair} & {*group}) for group in votes.groups) == 2
    return votes.all or between or any(switches.get(name) in votes.switches for name in pair)


def _of_nodes(votes: Blame, result: dict[Pair, Bad], bad: list[Pair]) -> list[Reason]:
    reasons = []
    for name in votes.nodes:
        mine = [pair for pair in bad if name in pair]
        count = sum(name in pair for pair in result)
        parts = [f"{b if a == name else a}{_rate(result[a, b].rate)}" for a, b in mine[:NAMED]]
        shown = ", ".join(parts) + (", ..." if len(mine) > NAMED else "")
        pairs = f"{len(mine)} of its {count} pairs are bad ({shown})"
        text = f"{pairs}; its partners are sound with each other"
        reasons.append(_lead(mine, result, node=name, text=text))
    for name in votes.unclear:
        mine = [pair for pair in bad if name in pair]
        text = "it has no sound pair, and the network between the others is bad: the machine, or the way to it"
        where = EITHER + next(other for other in mine[0] if other != name)
        reasons.append(_lead(mine, result, node=name, text=text, where=where).model_copy(update={"verdict": "unknown"}))
    for a, b in votes.either:
        for name, other in ((a, b), (b, a)):
            text = f"one of {a} and {b} or the link between them: neither has a sound pair with another machine"
            reasons.append(_lead([(a, b)], result, node=name, text=text, where=f"{EITHER}{other}"))
    return reasons


def _of_cluster(votes: Blame, result: dict[Pair, Bad], bad: list[Pair], switches: Mapping[str, str]) -> list[Reason]:
    reasons = [
        _lead(
            [pair], result, nodes=pair, where=f"link {pair[0]} - {pair[1]}", text="both machines are sound with others"
        )
        for pair in (votes.links if len(votes.links) <= NAMED else ())
    ]
    if len(votes.links) > NAMED:
        shown = ", ".join(f"{a} - {b}" for a, b in votes.links[:NAMED])
        text = f"{len(votes.links)} pairs of machines that are sound with others are bad ({shown}, ...): the ways between them"
        ends = tuple(sorted({name for pair in votes.links for name in pair}))
        reasons.append(_lead(list(votes.links), result, nodes=ends, where="network, some of its ways", text=text))
    names = tuple(sorted({name for pair in bad for name in pair}))
    if votes.all:
        text = f"all {len(bad)} pairs are bad: the network or its settings, and not a machine"
        reasons.append(_lead(bad, result, nodes=names, where="all pairs", text=text))
    if votes.groups:
        of_groups = [pair for pair in bad if sum(bool({*pair} & {*group}) for group in votes.groups) == 2]
        shown = " and ".join(_group(group, switches) for group in votes.groups[:NAMED])
        more = f" and {len(votes.groups) - NAMED} more" if len(votes.groups) > NAMED else ""
        # Of the network: what lies between groups
        part = (
            "the spine or the uplinks of the switches"
            if len(votes.groups) > 2
            else "a switch, its uplinks or a cable between racks"
        )
        text = f"machines are sound within {shown}{more}, and bad between them: {part}, and not a machine"
        names = tuple(sorted({name for group in votes.groups for name in group}))
        reasons.append(_lead(of_groups, result, nodes=names, where="network between groups", text=text))
    for switch in votes.switches:
        under = tuple(sorted(name for name in names if switches.get(name) == switch))
        mine = [pair for pair in bad if {*pair} & {*under}]
        text = f"all {len(under)} machines under it are bad and no other one is: the switch, and not a machine"
        reasons.append(_lead(mine, result, nodes=under, where=f"network at switch {switch}", text=text))
    return reasons


def _group(group: Sequence[str], switches: Mapping[str, str]) -> str:
    """By the switch where it is one, else by its machines."""
    under = {switches.get(name, "") for name in group}
    some = ", ".join(group[:NAMED]) + (f", ... {len(group)} machines" if len(group) > NAMED else "")
    return f"switch {min(under)} ({some})" if len(under) == 1 and "" not in under else f"({some})"


def _lead(
    pairs: Sequence[Pair],
    result: dict[Pair, Bad],
    *,
    text: str,
    node: str = "",
    where: str = "pairs",
    nodes: tuple[str, ...] = (),
) -> Reason:
    """The worst fault of some pairs, said of whom it is attributed to; of slow ones the median is shown."""
    verdict = "failed" if any(result[pair].verdict == "failed" for pair in pairs) else result[pairs[0]].verdict
    faults = [fault for pair in pairs for fault in result[pair].faults if fault.verdict == verdict]
    lead = min(faults, key=lambda fault: (_severity(fault), fault.check))
    alike = [fault.measured for fault in faults if fault.check == lead.check and isinstance(fault.measured, float)]
    measured = statistics.median(alike) if alike else lead.measured
    text = "; ".join(part for part in (lead.said, text) if part)
    return lead.model_copy(update={"node": node, "where": where, "measured": measured, "said": text, "nodes": nodes})


def _severity(fault: Reason) -> int:
    """Wrong results first, then the wrong transport, then rates."""
    return next((n for n, word in enumerate(("wrong", "transport", "busbw")) if word in fault.check), 3)


def _rate(rate: float | None) -> str:
    return " no result" if rate is None else f" {rate:.4g} GB/s"


def _verdict(pair: Pair, what: Bad, guilty: set[str], links: set[Pair], apart: set[Pair]) -> PairVerdict:
    a, b = pair
    if what.verdict == "healthy":
        return PairVerdict(a=a, b=b, busbw_gb_s=what.rate, verdict="healthy")
    blamed: Literal["a", "b", "link", "network", ""] = "link" if pair in links else "network" if pair in apart else ""
    if (a in guilty) != (b in guilty):
        blamed = "a" if a in guilty else "b"
    output = next(
        f"{fault.check}: {fault.said or fault.limit}" for fault in what.faults if fault.verdict == what.verdict
    )
    return PairVerdict(a=a, b=b, busbw_gb_s=what.rate, verdict=what.verdict, blamed=blamed, said=output)
