"""Splits of documents in two, and the statistics that tell one side from the other, for all splits at once.

Row 0 is what is asked about: the reference against the new data. The other rows are the same documents, split at random into as
many. Every statistic here depends on documents and split only, so where nothing has changed, row 0 is one of many like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
SMOOTHING = 0.5
"""Added to the count of every label (Krichevsky and Trofimov, IEEE Trans. Inf. Theory 27, 1981)."""


@dataclass(frozen=True)
class Splits:
    """Which documents are on the new side, shape [splits + 1, documents], of 0 and 1."""

    new: NDArray[np.float32]

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Documents of the reference and of the new side."""
        new = int(self.new[0].sum())
        return self.new.shape[1] - new, new

    @cached_property
    def _by_document(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self.new.T)

    def new_sums(self, counts: Any) -> NDArray[np.float32]:
        """Sums over the documents of the new side, shape [columns, splits + 1], of a matrix with a row a document."""
        from scipy.sparse import csr_matrix

        return np.asarray(csr_matrix(counts).T @ self._by_document, np.float32)

    def means(self, values: Any) -> tuple[Values, Values]:
        """Means over the reference and over the new side, each [columns, splits + 1]."""
        old, new = self.sizes
        sums = self.new_sums(values).astype(np.float64)
        return (np.asarray(values.sum(axis=0), np.float64).reshape(-1, 1) - sums) / old, sums / new


def split(reference: int, new: int, *, splits: int, seed: int) -> Splits:
    """`reference` documents and then `new` ones, and `splits` random splits of all of them into as many."""
    total = reference + new
    rows = np.zeros((splits + 1, total), np.float32)
    rows[0, reference:] = 1
    drawn = np.random.default_rng(seed).random((splits, total), np.float32)
    np.put_along_axis(rows[1:], np.argpartition(drawn, new - 1, axis=1)[:, :new], 1, axis=1)
    return Splits(rows)


def divergence(old: NDArray[np.floating], new: NDArray[np.floating]) -> Values:
    """Jensen-Shannon divergence in bits of the histograms of both sides, with SMOOTHING added to every count; from 0 to 1.

    Lin, IEEE Trans. Inf. Theory 37 (1991). Shapes [labels, splits + 1]; returns [splits + 1]. SciPy gives its square root.
    """
    from scipy.spatial.distance import jensenshannon

    counts = (side.astype(np.float64) + SMOOTHING for side in (old, new))
    return np.asarray(jensenshannon(*counts, base=2, axis=0), np.float64) ** 2


def greatest_step(values: NDArray[Any], splits: Splits) -> Values:
    """The Kolmogorov-Smirnov statistic of each split: the greatest distance of the two cumulative distributions, from 0 to 1."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    ends = np.append(ranked[1:] != ranked[:-1], True)
    new = np.cumsum(splits.new[:, order], axis=1, dtype=np.float64)[:, ends]
    old = np.flatnonzero(ends) + 1 - new
    return np.asarray(np.abs(new / new[:, -1:] - old / old[:, -1:]).max(axis=1), np.float64)


def deviations(values: NDArray[Any], splits: Splits) -> Values:
    """How many standard errors the means of the two sides lie apart, shape [columns, splits + 1].

    The error is that of a random split: the standard deviation over all documents times sqrt(1/n + 1/m). A column that is the
    same in all documents is 0 apart.
    """
    old, new = splits.means(values)
    of_old, of_new = splits.sizes
    error = values.std(axis=0, ddof=1, dtype=np.float64).reshape(-1, 1) * np.sqrt(1 / of_old + 1 / of_new)
    apart: Values = np.divide(new - old, error, out=np.zeros_like(new), where=np.broadcast_to(error > 1e-12, new.shape))
    return apart


def area_under_curve(scores: NDArray[np.float32], splits: Splits) -> Values:
    """The area under the ROC curve by which scores tell the new side from the reference; ties count half.

    Scores have the shape of the splits: [splits + 1, documents]. Mann and Whitney's U over n m.
    """
    from scipy.stats import rankdata

    old, new = splits.sizes
    ranks = np.array([rankdata(score)[side > 0].sum() for score, side in zip(scores, splits.new, strict=True)])
    return np.asarray((ranks - new * (new + 1) / 2) / (old * new), np.float64)


# From the statistics of all splits to p-values that hold for all columns together, and thresholds that say the same.
#
# Row 0 is the question, the others its answers where nothing has changed (tasks/data/drift/splits.py). A row's score is
# its most unusual column: Westfall and Young's single-step min-p (Resampling-Based Multiple Testing, 1993, ch. 2).
# Where nothing has changed, all rows are alike, so row 0 is among the `false_alarm_rate` most unusual ones just that
# often, however columns hang together.


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
