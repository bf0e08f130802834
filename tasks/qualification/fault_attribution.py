"""Whose fault are bad pairs: a machine's, a link's, or the network's. Pure graph work, over names.

Sound pairs connect machines to groups. A machine is blamed only by partners that are measured sound: most of their own
pairs are not bad, and they are of its group where it has one. Most of its pairs with them must be bad, and the worst machine goes
first. Bad pairs between two groups, each sound by itself, are the network's, whatever the sizes of the groups, and so
are all machines of one switch when nothing under another one is bad. A bad pair that is left between machines that are sound
with others is the link's. While the network between groups is bad, a machine without any sound pair may be alone behind its
switch: it is blamed only where a partner under the same switch is sound, else nobody can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

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
    bad_switches = _switches(nodes - unclear, names, switches)
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


def _switches(blamed: set[str], names: set[str], switches: Mapping[str, str]) -> tuple[str, ...]:
    """Switches of which every machine is blamed, while some machine elsewhere is not."""
    under: dict[str, set[str]] = {}
    for name in names & set(switches):
        under.setdefault(switches[name], set()).add(name)
    bad = (switch for switch, machines in under.items() if len(machines) >= OF_A_SWITCH and machines <= blamed)
    return tuple(sorted(bad)) if len(under) > 1 else ()


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
