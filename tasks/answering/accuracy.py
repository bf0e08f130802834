"""Whether callers call fewer answers right than before: a permutation test of the means of two lists of labels. Pure.

One-sided: more right answers are no anomaly. A label is 1, 0 or a score between, so a test of means serves all three (Good,
Permutation, Parametric and Bootstrap Tests of Hypotheses, 3rd ed. 2005, ch. 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.formats.answers import Label
from tasks.revalidation_config import ServiceConfig

NAME, TITLE = "accuracy", "share of answers that callers call right"
SPLITS = 10_000
MOST_LABELS = 20_000
"""Of each side that the test looks at, the newest."""
DIGITS = 2
"""Of a score."""
SHARE = 0.5
"""Of the false-alarm rate, where labels are judged beside the measures: the other half is theirs."""
NULL_SHOWN = 200
BINS = (0.0, 0.25, 0.5, 0.75, 1.0)
LABELS = ("0", "up to 0.25", "up to 0.5", "up to 0.75", "up to 1")
SEED = 4321


def accuracy_column(before: Sequence[Label], now: Sequence[Label], config: ServiceConfig) -> dict[str, Any] | None:
    """The column of accuracy, as those of tasks/service_outputs.py; None without a label on one side.

    `insufficient` with fewer than `min_labels` on either side. Its p-value is corrected for standing beside the measures.
    """
    if not before or not now:
        return None
    old, new = (np.round([label.right for label in side[-MOST_LABELS:]], DIGITS) for side in (before, now))
    column: dict[str, Any] = {
        "name": NAME,
        "title": TITLE,
        "unit": "",
        "value": None,
        "threshold": None,
        "p_value": None,
        "verdict": "insufficient",
        "reference": float(old.mean()),
        "new": float(new.mean()),
        "moved": [],
        "histogram": {"labels": list(LABELS), "reference": _shares(old), "new": _shares(new)},
        "null": [],
    }
    return column if min(len(old), len(new)) < config.min_labels else column | _judged(old, new, config)


def judged(column: dict[str, Any] | None) -> bool:
    return column is not None and column["verdict"] != "insufficient"


def _judged(old: NDArray[np.float64], new: NDArray[np.float64], config: ServiceConfig) -> dict[str, Any]:
    """Value is the loss of the mean. An anomaly is both certain and large enough to matter."""
    loss, null = float(old.mean() - new.mean()), _null(old, new)
    p_value = (1 + int((null >= loss - 1e-12).sum())) / (1 + len(null))
    certain = float(np.quantile(null, 1 - config.false_alarm_rate * SHARE, method="higher"))
    threshold = max(certain, config.smallest_accuracy_loss)
    unusual = p_value <= config.false_alarm_rate * SHARE and loss >= config.smallest_accuracy_loss
    return {
        "value": loss,
        "threshold": threshold,
        "p_value": min(p_value / SHARE, 1.0),
        "verdict": "anomaly" if unusual else "none",
        "moved": [f"right {old.mean():.1%} -> {new.mean():.1%}"],
        "null": [round(float(value), 6) for value in null[:NULL_SHOWN]],
    }


def _null(old: NDArray[np.float64], new: NDArray[np.float64]) -> NDArray[np.float64]:
    """The losses of random splits of all labels into as many: how often each value falls to the new side."""
    values, counts = np.unique(np.concatenate([old, new]), return_counts=True)
    drawn = np.random.default_rng(SEED).multivariate_hypergeometric(counts, len(new), size=SPLITS, method="marginals")
    sums = drawn @ values
    return np.asarray((counts @ values - sums) / len(old) - sums / len(new), np.float64)


def _shares(values: NDArray[np.float64]) -> list[float]:
    counts = np.bincount(np.searchsorted(BINS, values, "left"), minlength=len(BINS))
    return [float(count) / len(values) for count in counts]
