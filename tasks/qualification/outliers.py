"""Machines that are below the others by more than noise: the generalized extreme studentized deviate test, downwards. Pure.

It wants one figure a machine, best the median of many, and no idea of how many are slow: up to a quarter of them are looked
for. Slow ones do not hide each other, as the spread is that of the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

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
