"""How often the loss since promotion closes its gate on unchanged data, and how large a loss it finds: the product's own
bootstrap and verdict on made-up documents whose truth is known.

Sizes and bits per byte scatter as those of the default run's held-out documents: lognormal, by 1.84 around 7,682 bytes and by
0.17.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from benchmarks.operating_characteristics import Line
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.revalidation import PerformanceConfig
from tasks.evaluation.performance import Measured, loss_since, loss_status

SEED = 20
CONFIG, LIMITS, DRAWN = PerformanceConfig(), ComparisonConfig(), EvaluationConfig()
MEDIAN_BYTES, SIZES, SCATTER, BITS = 7682, 1.84, 0.17, 1.7
DOCUMENTS = (50, 200, 1000)


def documents(chance: np.random.Generator, count: int, *, loss: float = 0.0) -> Measured:
    """So many documents of a model that needs more bits for them by a share."""
    sizes = np.maximum(1, MEDIAN_BYTES * np.exp(SIZES * chance.standard_normal(count))).round()
    return Measured(sizes * BITS * (1 + loss) * np.exp(SCATTER * chance.standard_normal(count)), sizes)


def judged(seed: int, count: int, loss: float) -> tuple[str, bool]:
    """The verdict of one window, and whether the bare estimate is over the limit, by which it was judged before."""
    chance = np.random.default_rng([SEED, seed, count])
    before, new = documents(chance, count), documents(chance, count, loss=loss)
    sampling = {"samples": DRAWN.bootstrap_samples, "confidence": DRAWN.confidence}
    found = loss_since(new, before, **sampling, seed=DRAWN.seed)
    told = {"estimate": found.estimate, "low": found.low, "high": found.high}
    return loss_status(told, CONFIG, LIMITS), found.estimate > LIMITS.max_loss_since_promotion


def rows(quick: bool) -> Iterator[Line]:
    """Unchanged data first, then a loss that is planted."""
    trials = 40 if quick else 1000
    for loss, stated in ((0.0, "failed in <= 2.5 %"), (0.2, "found in >= 80 % from 1,000 documents on")):
        for count in DOCUMENTS:
            found = [judged(seed, count, loss) for seed in range(trials)]
            verdicts, bare = Counter(verdict for verdict, _ in found), sum(over for _, over in found)
            said = f"failed {verdicts['failed'] / trials:.1%}, insufficient {verdicts['insufficient'] / trials:.1%}"
            truth = f"{f'{loss:.0%} more bits' if loss else 'unchanged data'}, {count} documents a side"
            yield Line(
                "loss since promotion", stated, f"{said}; before: failed {bare / trials:.1%}", truth, SEED, trials
            )
