"""Machines by the medians of their parts: how far one may be below the others before it is no noise.

The parts of a machine have noise of their own, and their median has less of it. How much is left is seen between the machines' own
medians, which also holds what their parts have in common. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FALSE_ALARMS = 0.01
"""Share of sound clusters in which some machine falls below the limit by chance, over all machines and checks together."""
FEWEST = 6
"""Machines before a limit is given."""
EFFICIENCY = 0.75
"""Degrees of freedom of the spread, as a share of those of a standard deviation. Asymptotically 0.82 (Rousseeuw and Croux, table
1); with this share 1 % of 20,000 sound clusters of 6 to 128 machines at most were below the limit."""
SMALL = {6: 0.611, 7: 0.857, 8: 0.669, 9: 0.872}
"""Corrections of the spread of few values: Croux and Rousseeuw, Time-efficient algorithms for two highly robust estimators of
scale, 1992."""


def lowest_sound(medians: Sequence[float], *, checks: int, least: float) -> float | None:
    """The least that a sound machine reaches, as a share of the median of these; None of too few, or of what is not positive.

    `checks`: how many comparisons share the false alarms; `least`: shortfalls that do not matter.
    """
    if len(medians) < FEWEST or min(medians) <= 0:
        return None
    from scipy import special  # 0.16 s, which every start of a flow would pay

    spread = _spread([math.log(value) for value in medians])
    chance = FALSE_ALARMS / (checks * len(medians))
    deviations = -float(special.stdtrit(EFFICIENCY * (len(medians) - 1), chance))
    return min(1 - least, math.exp(-deviations * spread))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation that half of the values may not disturb: Qn of Rousseeuw and Croux, Alternatives to the median absolute
    deviation, 1993."""
    count = len(values)
    ordered = np.array(values)
    apart = np.abs(ordered[:, None] - ordered[None, :])[np.triu_indices(count, 1)]
    half = count // 2 + 1
    place = half * (half - 1) // 2 - 1
    correction = SMALL.get(count) or count / (count + (1.4 if count % 2 else 3.8))
    return 2.2219 * correction * float(np.partition(apart, place)[place])
