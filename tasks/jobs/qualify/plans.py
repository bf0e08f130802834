"""What is measured in which order, and what is measured again because it was slow. Pure: the measuring is steps.py's.

A plan yields steps and is sent what each one found. All ranks run the same plan on the same findings, so they agree without
talking. benchmarks/qualification.py runs the same plans on invented findings.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from tasks.config.qualification import COLLECTIVES, BenchmarkConfig, Collective
from tasks.hardware.sku import Sku
from tasks.qualification.limits import tolerances
from tasks.qualification.measured import Status
from tasks.qualification.pairs import groups as connected
from tasks.qualification.peers import Item, reference

Group = tuple[int, ...]
"""Machines that measure together, by node rank, lowest first."""
Rounds = list[list[Group]]


def tournament(nodes: Sequence[int]) -> Rounds:
    """Every pair once, disjoint pairs at the same time: n - 1 rounds, n when n is odd. The circle method: one stays, all others
    move on by one place."""
    ring: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds: Rounds = []
    for _ in range(len(ring) - 1):
        opposite = zip(ring[: len(ring) // 2], reversed(ring), strict=False)
        rounds.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds


def quick_tournament(nodes: Sequence[int]) -> Rounds:
    """Every machine with its two neighbours, and with one that is far: three rounds, four for an odd number.

    Neighbours in the order of `nodes` are mostly under the same switch, and the far one is not: so a machine has a partner
    without the network between switches in it, and that network has pairs too.
    """
    ring = [_pair(one, other) for one, other in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)]
    return _once([ring[:-1:2] if len(nodes) % 2 else ring[::2], ring[1::2], ring[-1:], _at(nodes, len(nodes) // 2)])


def standard_tournament(nodes: Sequence[int]) -> Rounds:
    """The same, and one partner each at the distances 2, 4, 8 ...: within switches and across them."""
    distances = [1 << power for power in range(1, len(nodes).bit_length()) if 1 << power < len(nodes) // 2]
    return _once([*quick_tournament(nodes), *(_at(nodes, distance) for distance in distances)])


def _at(nodes: Sequence[int], distance: int) -> list[Group]:
    """Each machine with the one so many places on, where that one has no partner yet."""
    places = range(len(nodes) - distance)
    return [_pair(nodes[place], nodes[place + distance]) for place in places if not place // max(distance, 1) % 2]


def _pair(a: int, b: int) -> Group:
    return min(a, b), max(a, b)


def _once(rounds: Rounds) -> Rounds:
    """Without pairs that were there before, and pairs of one."""
    seen: set[Group] = set()
    result: Rounds = []
    for groups in rounds:
        fresh = [group for group in groups if group[0] != group[1] and group not in seen]
        seen.update(fresh)
        result.append(fresh)
    return [groups for groups in result if groups]


def disjoint(groups: Iterable[Group], most: int) -> Rounds:
    """Groups in at most so many rounds, in none of which a machine is twice; without those that find no place."""
    rounds: Rounds = [[] for _ in range(most)]
    busy: list[set[int]] = [set() for _ in range(most)]
    for group in groups:
        place = next((place for place, nodes in enumerate(busy) if nodes.isdisjoint(group)), None)
        if place is not None:
            rounds[place].append(group)
            busy[place].update(group)
    return [groups for groups in rounds if groups]


def halves(group: Group) -> list[Group]:
    """A group in two; a machine alone is none."""
    middle = len(group) // 2
    return [half for half in (group[:middle], group[middle:]) if len(half) > 1]


def sound_rate(rates: Mapping[Group, float]) -> float:
    """What a sound pair reaches: the median over machines of each one's best pair; 0 where there is none.

    A sound machine has a sound partner even when most pairs are slow, as when one of three machines is bad.
    """
    best: dict[int, float] = {}
    for group, rate in rates.items():
        for node in group:
            best[node] = max(best.get(node, 0.0), rate)
    return statistics.median(best.values()) if best else 0.0


def suspects(slow: Collection[Group], fast: Collection[Group]) -> set[int]:
    """Machines most of whose pairs are slow; the others' slow pairs are their partners' or the links' fault."""
    count: dict[int, list[int]] = {}
    for verdict, groups in ((1, slow), (0, fast)):
        for group in groups:
            for node in group:
                count.setdefault(node, []).append(verdict)
    return {node for node, votes in count.items() if 2 * sum(votes) > len(votes)}


Scope = Literal["node", "all", "pair", "part"]
QUICK_COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "alltoall")
"""A ring or tree through all ranks, and every rank with every other."""
PAIRS: tuple[Collective, ...] = ("all_reduce",)
JUDGED_BYTES = 1_000_000
"""Smaller messages tell of latency, which other work on the machine blurs; nothing is measured again for them."""
STRIKES = 2
"""A machine whose pairs failed so often in the tournament meets nobody more: each costs the others its whole time limit."""
PARTNERS = 2
"""Sound partners that a suspect machine meets in each round of confirmation."""
CONFIRMATIONS = 8
"""Runs one after another in a round of confirmation, at most; what is left stays as it was measured."""
MEETINGS = 24
"""Rounds in which groups of machines meet that no sound pair connects yet, at most: with one leaf switch in eight of a random
order one meeting of seven is under the same switch."""
ALL_SHARE = 0.5
"""Of min_of_peers: the all-nodes run below that share of the pairs' rate is searched, where the hardware's file has no limit.
Machines of a test share their cores, so a share near 1 would say nothing."""


@dataclass(frozen=True)
class Step:
    """Disjoint groups of machines that measure at the same time."""

    name: str
    """Used once in a job."""
    scope: Scope
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    round: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one group's sweep came to: bus bandwidth in GB/s by size in bytes."""

    status: Status
    busbw: Mapping[int, float] = field(default_factory=dict)

    @property
    def judged(self) -> dict[int, float]:
        """Without small messages, unless there are no others."""
        large = {size: rate for size, rate in self.busbw.items() if size >= JUDGED_BYTES}
        return large or dict([max(self.busbw.items())] if self.busbw else [])


Found = dict[Group, Outcome]


@dataclass(frozen=True)
class Answer:
    """What a step found, the same on every rank, and the machines that still answer."""

    outcomes: Mapping[Collective, Found]
    living: tuple[int, ...]


T = TypeVar("T")
Plan = Generator[Step, Answer, T]


@dataclass(frozen=True)
class Standard:
    """What is slow: below the hardware's limit, or below a share of the peers."""

    config: BenchmarkConfig
    sku: Sku

    @property
    def full(self) -> bool:
        return self.config.depth == "full"

    @property
    def share(self) -> float:
        return self.config.min_of_peers

    @property
    def share_of_pairs(self) -> float:
        """Below which the verdict calls a pair bad (tasks/qualification/pairs.py)."""
        return tolerances(self.sku).pairs * self.config.min_of_peers

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return COLLECTIVES if self.full else QUICK_COLLECTIVES

    def below_limit(self, outcome: Outcome, collective: Collective, scope: Scope, nodes: int) -> bool:
        """Whether some size is under what the hardware's file wants of it."""
        return any(
            rate < (limit.warn or limit.fail or 0.0)
            for limit in self.sku.collectives
            if (limit.collective, limit.scope) == (collective, scope) and limit.nodes in (None, nodes)
            for size, rate in outcome.busbw.items()
            if size >= limit.bytes
        )

    def has_limit(self, collective: Collective, scope: Scope) -> bool:
        return any((limit.collective, limit.scope) == (collective, scope) for limit in self.sku.collectives)


def collectives_plan(nodes: Sequence[int], standard: Standard, *, ranks_per_node: int) -> Plan[None]:
    """Every machine by itself, all at the same time; then all machines together."""
    living = tuple(nodes)
    if ranks_per_node > 1:
        alone = Step("node", "node", tuple((node,) for node in living), standard.collectives)
        living = yield from _until_sound(alone, standard)
    if len(living) > 1:
        yield from _until_sound(Step("all", "all", (living,), standard.collectives), standard)


def _until_sound(first: Step, standard: Standard) -> Plan[tuple[int, ...]]:
    """A step, and what was slow in it again, at most config.rounds times; who still answers. What failed is not tried again."""
    answer = yield replace(first, name=f"{first.name}/0")
    best = {collective: dict(item) for collective, item in answer.outcomes.items()}
    for number in range(1, standard.config.rounds):
        slow = {collective: _slow_groups(item, collective, first.scope, standard) for collective, item in best.items()}
        groups = tuple(
            sorted({group for groups in slow.values() for group in groups if set(group) <= set(answer.living)})
        )
        if not groups:
            break
        collectives = tuple(collective for collective, slow_groups in slow.items() if slow_groups)
        answer = yield Step(f"{first.name}/{number}", first.scope, groups, collectives, round=number)
        for collective, item in answer.outcomes.items():
            for group, outcome in item.items():
                best[collective][group] = better(best[collective].get(group), outcome)
    return answer.living


def _slow_groups(result: Found, collective: Collective, scope: Scope, standard: Standard) -> list[Group]:
    measured = {group: outcome for group, outcome in result.items() if outcome.status == "measured"}
    return [
        group
        for group, outcome in measured.items()
        if standard.below_limit(outcome, collective, scope, len(group))
        or _behind(outcome, [other for key, other in measured.items() if key != group], standard.share)
    ]


def _behind(outcome: Outcome, others: list[Outcome], share: float) -> bool:
    """Whether some size is slower than the share of the others' median."""
    for size, rate in outcome.judged.items():
        peers = [other.busbw[size] for other in others if size in other.busbw]
        if peers and rate < share * statistics.median(peers):
            return True
    return False


def better(old: Outcome | None, new: Outcome) -> Outcome:
    """Of two measurements of the same: each size's best. Other work comes and goes, a bad part stays."""
    if old is None or new.status != "measured" or old.status != "measured":
        return new if old is None or new.status == "measured" else old
    sizes = {**old.busbw, **new.busbw}
    return Outcome("measured", {size: max(old.busbw.get(size, 0.0), new.busbw.get(size, 0.0)) for size in sizes})


TOURNAMENTS: dict[str, Callable[[Sequence[int]], Rounds]] = {
    "quick": quick_tournament,
    "standard": standard_tournament,
    "full": tournament,
}
"""By depth: who meets whom."""


class Pairs:
    """State of the search for bad machines and links: the best of each pair so far, and how often it was measured."""

    def __init__(self, standard: Standard) -> None:
        self.standard = standard
        self.best: Found = {}
        self.fresh: dict[Group, int] = {}
        self.strikes: dict[int, int] = {}
        self.met: dict[int, int] = {}

    def take(self, answer: Answer, *, fresh: bool) -> None:
        for pair, outcome in answer.outcomes[PAIRS[0]].items():
            self.best[pair] = better(self.best.get(pair), outcome)
            for node in pair:
                self.met[node] = self.met.get(node, 0) + 1
            if fresh:
                self.fresh[pair] = self.fresh.get(pair, 0) + 1
            elif outcome.status != "measured":
                for node in pair:
                    self.strikes[node] = self.strikes.get(node, 0) + 1

    def playing(self, pairs: Sequence[Group], living: Sequence[int]) -> tuple[Group, ...]:
        """Without those of whom one does not answer, or failed too often."""
        able = {node for node in living if self.strikes.get(node, 0) < STRIKES}
        return tuple(pair for pair in pairs if set(pair) <= able)

    @property
    def sound(self) -> dict[int, float]:
        """Rate of a sound pair, by size: of the fastest group of pairs, as the verdict has it, else of each machine's best
        pair."""
        rates: dict[int, dict[Group, float]] = {}
        for pair, outcome in self.best.items():
            for size, rate in outcome.judged.items():
                rates.setdefault(size, {})[pair] = rate
        allowed, result = tolerances(self.standard.sku), {}
        for size, item in rates.items():
            items = [Item(str(pair), rate) for pair, rate in item.items()]
            fast = reference(items, allowed.pairs_gap, lone=allowed.lone_pair)
            result[size] = max(fast.center if fast else 0.0, sound_rate(item))
        return result

    def slow(self, share: float | None = None) -> set[Group]:
        """Pairs that failed, or are below the limit or the share (of the configuration, where none is given) of a sound one."""
        sound, least = self.sound, self.standard.share if share is None else share
        return {
            pair
            for pair, outcome in self.best.items()
            if (
                outcome.status != "measured"
                or self.standard.below_limit(outcome, PAIRS[0], "pair", 2)
                or any(rate < least * sound[size] for size, rate in outcome.judged.items())
            )
        }

    def groups(self, living: Sequence[int]) -> list[Group]:
        """Machines that sound pairs connect."""
        slow = self.slow(self.standard.share_of_pairs)
        return connected(living, [pair for pair in self.best if pair not in slow and set(pair) <= set(living)])

    def to_meet(self, living: Sequence[int]) -> list[Group]:
        """Pairs of machines from groups that have no pair between them yet, no machine twice: are they one group, is the
        network bad between them, or is a machine bad with all? Large groups first. Where no pair is sound there is nothing to
        find."""
        result = self.groups(living)
        if all(len(group) == 1 for group in result):
            return []
        group_of = {node: number for number, group in enumerate(result) for node in group}
        met = {frozenset(group_of[node] for node in pair) for pair in self.best if set(pair) <= set(living)}
        free = [[node for node in group if self.strikes.get(node, 0) < STRIKES] for group in result]
        free = [sorted(nodes, key=lambda node: (self.met.get(node, 0), node)) for nodes in free]
        chosen: list[Group] = []
        for one, other in itertools.combinations(range(len(result)), 2):
            if free[one] and free[other] and frozenset((one, other)) not in met:
                a, b = free[one].pop(0), free[other].pop(0)
                chosen.append((min(a, b), max(a, b)))
        return chosen

    def to_confirm(self, living: Sequence[int]) -> list[Group]:
        """Pairs for fresh runs: each suspect machine with sound partners, and slow pairs of two that are not suspect."""
        slow = self.slow()
        # By a vote over all pairs but those between two groups, which are the network's; of a machine that was
        # measured afresh, over its fresh pairs alone.
        sound = [pair for pair in self.best if pair not in slow]
        results = [group for group in connected({node for pair in self.best for node in pair}, sound) if len(group) > 1]
        group_of = {node: number for number, group in enumerate(results) for node in group}
        inside = {pair for pair in slow if len({group_of.get(node, -1) for node in pair} - {-1}) < 2}
        everywhere = suspects(inside, sound)
        cleared = {node for node in everywhere if self._votes(node, inside) <= 0}
        bad = everywhere - cleared
        links = sorted((pair for pair in slow if not set(pair) & bad), key=lambda pair: (self.fresh.get(pair, 0), pair))
        chosen = [pair for node in sorted(bad) for pair in self._partners(node, slow, bad, living)]
        return [pair for pair in dict.fromkeys((*chosen, *links)) if set(pair) <= set(living)]

    def _votes(self, node: int, slow: Set[Group]) -> int:
        fresh = [pair for pair in self.fresh if node in pair]
        return sum(1 if pair in slow else -1 for pair in fresh) if fresh else 1

    def _partners(self, node: int, slow: Set[Group], bad: set[int], living: Sequence[int]) -> Iterator[Group]:
        """Pairs that were slow come first, those that were not measured afresh before others; all bad: anybody."""
        others = [other for other in living if other != node]
        partners = [other for other in others if other not in bad] or others
        pairs = [(min(node, other), max(node, other)) for other in partners]
        pairs.sort(key=lambda pair: (self.fresh.get(pair, 0), pair not in slow, pair))
        yield from pairs[:PARTNERS]


def pairs_plan(nodes: Sequence[int], standard: Standard, *, together: Outcome | None) -> Plan[None]:
    """The tournament; groups that did not meet; what was slow again; halves of the machines when all together (`together`)
    were slow and no pair was. `nodes` in an order in which neighbours are near, such as by their switches."""
    state, living = Pairs(standard), tuple(nodes)
    for number, pairs in enumerate(TOURNAMENTS[standard.config.depth](nodes)):
        if playing := state.playing(pairs, living):
            answer = yield Step(f"pairs/{number}", "pair", playing, PAIRS)
            living = answer.living
            state.take(answer, fresh=False)
    for number in range(MEETINGS):
        meeting = state.playing(state.to_meet(living), living)
        if not meeting:
            break
        answer = yield Step(f"meet/{number}", "pair", meeting, PAIRS)
        living = answer.living
        state.take(answer, fresh=False)
    for number in range(1, standard.config.rounds):
        for place, pairs in enumerate(disjoint(state.to_confirm(living), CONFIRMATIONS)):
            if playing := tuple(pair for pair in pairs if set(pair) <= set(living)):
                answer = yield Step(f"confirm/{number}/{place}", "pair", playing, PAIRS, round=number)
                living = answer.living
                state.take(answer, fresh=True)
    if (
        together
        and len(living) > 2
        and not state.slow()
        and _slow_together(together, len(nodes), state.sound, standard)
    ):
        # Halves of what is slow, until they are pairs or none of them is slow: then it stays unexplained.
        parts, number, sound = [living], 0, state.sound
        while smaller := tuple(half for part in parts for half in halves(part)):
            answer = yield Step(f"part/{number}", "part", smaller, PAIRS, round=number)
            result = answer.outcomes[PAIRS[0]]
            parts = [half for half in smaller if _slow_together(result[half], len(half), sound, standard)]
            parts = [part for part in parts if set(part) <= set(answer.living)]
            number += 1


def _slow_together(outcome: Outcome, nodes: int, sound: Mapping[int, float], standard: Standard) -> bool:
    if outcome.status != "measured":
        return True
    if standard.has_limit(PAIRS[0], "all"):
        return standard.below_limit(outcome, PAIRS[0], "all", nodes)
    lowest = ALL_SHARE * standard.share
    return any(rate < lowest * sound[size] for size, rate in outcome.judged.items() if size in sound)
