"""What the others reach, when some of the others are slow too.

A median of all is wrong as soon as half of the machines are slow, and the median absolute deviation is 0 when most figures are
equal. So values are sorted and cut at each wide gap; the measure is the median of the fastest group that is large enough to
be believed. Parts lose speed by faults and do not gain it, so fast ones that agree are sound ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

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
            return _of(group, len(mine), tuple(sorted({item.owner for item in passed} - mine)))
        passed += group
    return None


def _of(group: list[Item], owners: int, faster: tuple[str, ...]) -> Reference:
    center = statistics.median(item.value for item in group)
    deviation = statistics.median(abs(item.value - center) for item in group)
    return Reference(center, MAD_TO_SIGMA * deviation / center if center else 0.0, owners, faster)
