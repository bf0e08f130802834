"""Whose fault are bad pairs: a machine's, a link's, a switch's, or the whole network's. Pure graph work, over names.

A machine most of whose pairs are bad is blamed, the worst first, and its pairs say nothing about the others any more. A bad pair
that is left between machines that are sound with others is the link's. Machines that are sound among themselves and bad with
all others share a switch: the smaller group is blamed. Nothing is blamed where the votes are even.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

Pair = tuple[str, str]
Near = dict[str, set[str]]
MOST = 0.5
"""More than this share of a machine's pairs must be bad, and two at least; callers may want more of noisy pairs."""


class Blame(NamedTuple):
    """What the votes say."""

    nodes: tuple[str, ...] = ()
    """At fault: most of their pairs are bad."""
    cut_off: tuple[str, ...] = ()
    """At fault as a group: sound among themselves, bad with a larger group."""
    links: tuple[Pair, ...] = ()
    """At fault between two machines that are sound with others."""
    either: tuple[Pair, ...] = ()
    """Nothing tells which of the two machines, or whether the link."""
    halves: tuple[tuple[str, ...], ...] = ()
    """Groups of equal size that are sound inside and bad between."""
    noise: tuple[Pair, ...] = ()
    """Doubtful pairs that no vote confirms."""
    all: bool = False
    """Not one pair is sound."""


def blame(good: Iterable[Pair], bad: Iterable[Pair], *, most: float = MOST, doubtful: Collection[Pair] = ()) -> Blame:
    """Attribute the bad pairs. Pairs are of sorted names, each once; `doubtful` ones count in votes, and not alone."""
    sound, slow = set(good), set(bad)
    names = {name for pair in (*sound, *slow) for name in pair}
    if not slow:
        return Blame()
    if not sound:
        return Blame(all=True) if len(names) > 2 else Blame(either=tuple(sorted(slow)))
    good_of, bad_of = _near(sound), _near(slow)
    groups = [group for group in _groups(names, good_of) if len(group) > 1]
    apart = [group for group in groups[1:] if _separated(group, groups[0], bad_of)]
    if apart and len(groups[0]) == len(apart[0]) and _separated(groups[0], apart[0], bad_of):
        return Blame(halves=(groups[0], *apart))
    cut_off = {name for group in apart for name in group}
    nodes = _outvoted(names - cut_off, good_of, bad_of, most) | _outvoted(cut_off, good_of, bad_of, most)
    left = [pair for pair in sorted(slow) if not {*pair} & (nodes | cut_off)]
    noise = tuple(pair for pair in left if pair in doubtful)
    found = Blame(tuple(sorted(nodes)), tuple(sorted(cut_off - nodes)), noise=noise)
    return _of_links(found, [pair for pair in left if pair not in noise], sound | set(noise))


def _near(pairs: set[Pair]) -> Near:
    """Of each machine, those with which it has one of the pairs."""
    near: Near = {}
    for a, b in pairs:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    return near


def _groups(names: set[str], sound: Near) -> list[tuple[str, ...]]:
    """Machines that sound pairs connect, the largest group first."""
    groups, left = list[tuple[str, ...]](), set(names)
    while left:
        group, front = set[str](), {min(left)}
        while front:
            group |= front
            front = {other for name in front for other in sound.get(name, ())} - group
        groups.append(tuple(sorted(group)))
        left -= group
    return sorted(groups, key=lambda group: (-len(group), group))


def _separated(group: tuple[str, ...], other: tuple[str, ...], slow: Near) -> bool:
    """Whether each machine of the group has a bad pair with the other group: one slow link alone cuts nobody off."""
    return all(slow.get(name, set()) & set(other) for name in group)


def _outvoted(names: set[str], sound: Near, slow: Near, most: float) -> set[str]:
    """The worst by its share of bad pairs goes first, with all that are as bad, until none is mostly bad."""
    blamed, inside = set[str](), set(names)
    while True:
        shares = {name: _share(name, inside, sound, slow) for name in inside}
        worst = max(shares.values(), default=0.0)
        now = {name for name, share in shares.items() if share == worst}
        if worst <= most or now == inside:
            return blamed
        blamed |= now
        inside -= now


def _share(name: str, inside: set[str], sound: Near, slow: Near) -> float:
    bad = len(slow.get(name, set()) & inside)
    return bad / (bad + len(sound.get(name, set()) & inside)) if bad > 1 else 0.0


def _of_links(found: Blame, left: list[Pair], sound: set[Pair]) -> Blame:
    """Of a bad pair that is left: the link where both are sound with others, the one that is not where one is, else either."""
    proven = {name for pair in sound for name in pair}
    nodes, links, either = set(found.nodes), list[Pair](), list[Pair]()
    for pair in left:
        doubtful = [name for name in pair if name not in proven]
        if not doubtful:
            links.append(pair)
        elif len(doubtful) == 1:
            nodes.add(doubtful[0])
        else:
            either.append(pair)
    return found._replace(nodes=tuple(sorted(nodes)), links=tuple(links), either=tuple(either))
