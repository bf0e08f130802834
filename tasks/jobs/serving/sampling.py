"""The next token from a model's logits, and how unsure the model was. The model itself is decoder.py."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
SEEDS = 2**64
"""A seed may be negative; a generator's may not."""
NUCLEUS = 1024
"""Words among which the nucleus of top_p is looked for first: sorting 150,000 takes 10 ms."""


class Choice:
    """Draws one answer's tokens. State: its own generator of random numbers, so other requests change nothing."""

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._random = np.random.default_rng(None if seed is None else seed % SEEDS)

    def token(self, logits: Logits) -> int:
        """From logits [words]; the likeliest at temperature 0."""
        if not self._temperature:
            return int(logits.argmax())
        weights = np.exp((logits - logits.max()).astype(np.float64) / self._temperature)
        weights /= weights.sum()
        if self._top_p >= 1:
            return _drawn(weights, self._random.random())
        words = _nucleus(weights, self._top_p)
        return int(words[_drawn(weights[words], self._random.random())])


def entropy(logits: Logits) -> float:
    """Entropy, in nats, of the distribution that logits stand for; those of the last place of `logits` [1, places, words]."""
    last = logits.reshape(-1, logits.shape[-1])[-1].astype(np.float32)
    shifted = last - last.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    return float(np.log(total) - float((shifted * weights).sum()) / total)


def _drawn(weights: NDArray[np.float64], at: float) -> int:
    """The place where `at`, in [0, 1), falls in the cumulative weights."""
    sums = weights.cumsum()
    return int(min(np.searchsorted(sums, at * sums[-1], side="right"), len(weights) - 1))


def _nucleus(weights: NDArray[np.float64], share: float) -> NDArray[np.intp]:
    """The fewest likeliest words whose weights reach a share, the likeliest first (Holtzman et al., arXiv:1904.09751)."""
    count = min(NUCLEUS, len(weights))
    words = np.argpartition(weights, -count)[-count:]
    if weights[words].sum() < share:
        words = np.arange(len(weights))
    words = words[np.lexsort((words, -weights[words]))]
    reached = int(np.searchsorted(weights[words].cumsum(), share)) + 1
    return words[:reached]
