"""Whether callers call fewer answers right than before: a permutation test of the means of two lists of labels, in blocks. Pure.

One-sided: more right answers are no anomaly. A label is 1, 0 or a score between, so a test of means serves all three (Good,
Permutation, Parametric and Bootstrap Tests of Hypotheses, 3rd ed. 2005, ch. 3). Labels come in bursts that are alike, so blocks
of them are permuted, as long as they hang together (blocks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.config.revalidation import ServiceConfig
from tasks.formats.answers import Label
from tasks.serving.monitor.blocks import Blocks, block_length, cut, orders

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
    """The column of accuracy, as those of tasks/serving/monitor/anomalies.py; None without a label on one side.

    `insufficient` with fewer than `min_labels` on either side, and where they come in too few bursts for a loss to be certain.
    Its p-value is corrected for standing beside the measures.
    """
    if not before or not now:
        return None
    sides = [sorted(side[-MOST_LABELS:], key=lambda label: label.asked) for side in (before, now)]
    old, new = (np.round([label.right for label in side], DIGITS) for side in sides)
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
    if min(len(old), len(new)) < config.min_labels:
        return column
    callers = [[label.caller for label in side] for side in sides]
    return column | _judged(old, new, callers, config)


def judged(column: dict[str, Any] | None) -> bool:
    return column is not None and column["verdict"] != "insufficient"


class _Null(NamedTuple):
    """What one order says of a loss: how often it comes by chance, and which losses do."""

    losses: NDArray[np.float64]
    p_value: float
    certain: float


def _judged(
    old: NDArray[np.float64], new: NDArray[np.float64], callers: Sequence[Sequence[str]], config: ServiceConfig
) -> dict[str, Any]:
    """Value is the loss of the mean. An anomaly is certain by every order, and large enough to matter."""
    loss, rate = float(old.mean() - new.mean()), config.false_alarm_rate * SHARE
    values = np.concatenate([old, new])
    nulls = []
    for runs in orders(*callers):
        blocks = cut(runs, block_length(values, runs, stretch=len(new)))
        if blocks.possible() < 1 / rate:
            return {}
        losses = _losses(values, blocks)
        p_value = (1 + int((losses >= loss - 1e-12).sum())) / (1 + len(losses))
        nulls.append(_Null(losses, p_value, float(np.quantile(losses, 1 - rate, method="higher"))))
    p_value = max(null.p_value for null in nulls)
    unusual = p_value <= rate and loss >= config.smallest_accuracy_loss
    return {
        "value": loss,
        "threshold": max(*(null.certain for null in nulls), config.smallest_accuracy_loss),
        "p_value": min(p_value / SHARE, 1.0),
        "verdict": "anomaly" if unusual else "none",
        "moved": [f"right {old.mean():.1%} -> {new.mean():.1%}"],
        "null": [round(float(value), 6) for value in nulls[0].losses[:NULL_SHOWN]],
    }


def _losses(values: NDArray[np.float64], blocks: Blocks) -> NDArray[np.float64]:
    """The losses of random splits: how often each kind of block, by its labels and their sum, falls to the new side."""
    chance = np.random.default_rng(SEED)
    kinds = np.stack([np.bincount(blocks.of), np.round(np.bincount(blocks.of, values), DIGITS)], axis=1)
    new = np.zeros((SPLITS, 2))
    for stratum in np.unique(blocks.stratum):
        chosen = blocks.stratum == stratum
        each, counts = np.unique(kinds[chosen], axis=0, return_counts=True)
        count = int(blocks.new[chosen].sum())
        new += chance.multivariate_hypergeometric(counts, count, size=SPLITS, method="marginals") @ each
    count, right = kinds.sum(axis=0)
    return np.asarray((right - new[:, 1]) / (count - new[:, 0]) - new[:, 1] / new[:, 0], np.float64)


def _shares(values: NDArray[np.float64]) -> list[float]:
    counts = np.bincount(np.searchsorted(BINS, values, "left"), minlength=len(BINS))
    return [float(count) / len(values) for count in counts]
