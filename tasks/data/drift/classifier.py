"""The domain classifier: can a document's words say whether it is new? Trained anew for every split, all at once.

Naive Bayes on the presence of words (McCallum and Nigam, AAAI workshop on text categorization, 1998), scored on documents that it
was not trained on (FOLDS-fold), a document's score being the mean of its words' log odds. Area under the curve 0.5: it cannot
tell. What words say most is told by tasks/data/drift/comparison.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.drift.splits import BLOCK, SMOOTHING, Splits, Values, area_under_curve

FOLDS = 4


def areas(presence: Any, splits: Splits, *, seed: int) -> Values:
    """The cross-validated area under the curve of each split, shape [splits + 1].

    `presence`: documents by words, scipy.sparse, 1 where a document has the word. Folds are drawn without looking at the sides.
    """
    order = np.random.default_rng(seed).permutation(presence.shape[0])
    folds = [np.sort(order[fold::FOLDS]) for fold in range(FOLDS)]
    parts = [presence[fold] for fold in folds]
    counts = [part.T @ np.ascontiguousarray(splits.new[:, fold].T) for part, fold in zip(parts, folds, strict=True)]
    new, every = sum(counts), np.asarray(presence.sum(axis=0), np.float32).reshape(-1, 1)
    scores = np.empty(splits.new.shape, np.float32)
    for part, fold, of_new in zip(parts, folds, counts, strict=True):
        left = every - np.asarray(part.sum(axis=0), np.float32).reshape(-1, 1)
        documents = np.delete(splits.new, fold, axis=1).sum(axis=1)
        weights = np.empty_like(new)
        for start in range(0, len(weights), BLOCK):
            block = slice(start, start + BLOCK)
            trained = new[block] - of_new[block]
            weights[block] = odds(trained, left[block] - trained, documents, presence.shape[0] - len(fold) - documents)
        present = np.maximum(np.asarray(part.sum(axis=1), np.float32), 1)
        scores[:, fold] = ((part @ weights) / present).T
    return area_under_curve(scores, splits)


def odds(new: Any, old: Any, of_new: Any, of_old: Any) -> NDArray[np.float32]:
    """Log odds of words by the documents that have them, on both sides."""
    sizes = np.log((of_old + 2 * SMOOTHING) / (of_new + 2 * SMOOTHING))
    return np.asarray(np.log((new + np.float32(SMOOTHING)) / (old + np.float32(SMOOTHING))) + sizes, np.float32)
