"""From the statistics of all splits to p-values that hold for all columns together, and thresholds that say the same.

Row 0 is the question, the others its answers where nothing has changed (tasks/data/drift/splits.py). A row's score is its most
unusual column: Westfall and Young's single-step min-p (Resampling-Based Multiple Testing, 1993, ch. 2). Where nothing has
changed, all rows are alike, so row 0 is among the `false_alarm_rate` most unusual ones just that often, however columns hang
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.data.drift.splits import Values

STEPS = 25
"""Of the bisection: a threshold is right to 2^-25 of the range."""


@dataclass(frozen=True)
class Judged:
    """Corrected p-values, and the thresholds from which on a column says drift; both [columns]."""

    p_values: Values
    thresholds: Values


def judge(values: Values, rate: float) -> Judged:
    """Judge row 0 of values, shape [splits + 1, columns], larger being more unusual, at a rate over all columns together."""
    columns = range(values.shape[1])
    return Judged(corrected(values), np.array([_threshold(values, column, rate) for column in columns]))


def corrected(values: Values) -> Values:
    """Of each column, the share of rows whose most unusual column is at least as unusual as this one of row 0."""
    scores = np.stack([_scores(column) for column in values.T], axis=1)
    result: Values = (scores.max(axis=1)[:, None] >= scores[0]).mean(axis=0)
    return result


def _scores(values: Values) -> Values:
    """How unusual each value of a column is: by how few rows are larger or equal; ties of columns by excess.

    Ranks alone tie often: of ten columns of 400 splits, the largest values are ten rows of one rank.
    """
    rows, ranked = len(values), np.sort(values)
    larger = rows - np.searchsorted(ranked, values, "left")
    middle, spread = ranked[rows // 2], ranked[int(rows * 0.9)] - ranked[rows // 2]
    excess = (values - middle) / spread if spread > 0 else np.zeros(rows)
    return np.asarray(np.arctan(excess) / np.pi / 2 - larger, np.float64)


def _threshold(values: Values, column: int, rate: float) -> float:
    """The least value of row 0 that would be called drift, by bisection: what is unusual only becomes more so with its value."""
    tried = values[:, column].copy()
    others = [_scores(other) for place, other in enumerate(values.T) if place != column]
    rest = np.max(others, axis=0) if others else np.full(len(values), -np.inf)
    low, high = float(tried[1:].min()), 2 * float(tried.max()) + 1e-6
    for _ in range(STEPS):
        tried[0] = (low + high) / 2
        scores = _scores(tried)
        if (np.maximum(scores, rest) >= scores[0]).mean() <= rate:
            high = float(tried[0])
        else:
            low = float(tried[0])
    return high
