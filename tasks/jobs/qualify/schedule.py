"""Who meets whom, and what is measured again: pure functions over numbers of machines.

The order of a whole search is plans.py; benchmarks/qualification.py runs both to say what a qualification costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

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
