"""Which sample comes when: a permutation an epoch, and which of several corpora a sample is drawn from.

A place in the order is the number of samples before it, and all that is said here follows from it and the seed: no state, so a
run goes on anywhere, on any number of ranks. What a sample is, is samples.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

UNITS = 1 << 22
"""Shares are rounded to so many parts, so that 2^40 places count exactly in 64 bits."""
KEPT = 2
"""Epochs whose order is held: a step may reach into the next one."""


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """A permutation of `count` samples, shape [count].

    It sorts raw PCG64 draws, whose stream numpy keeps forever; `Generator.permutation` may change with numpy (NEP 19).
    """
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")


class Order:
    """The samples of one corpus over epochs. State: the permutations of the epochs that were asked for last."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample at each place, shape [places]."""
        epochs, inside = np.divmod(places, self.count)
        result = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs).tolist():
            exists = epochs == epoch
            result[exists] = self._epoch(epoch)[inside[exists]]
        return result

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epochs:
            while len(self._epochs) >= KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = epoch_order(self.seed, epoch, self.count)
        return self._epochs[epoch]


class Draws:
    """From which of several corpora each place draws, by shares: the first `n` places hold each its share, to within one or two.

    The first corpus takes floor(n x share) of the first n places, the next one its part of what is left, and so on: each count
    never falls and grows by at most one, so every place draws from exactly one.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` are positive; they count relative to their sum."""
        parts = [max(1, round(Fraction(share) / Fraction(sum(shares)) * UNITS)) for share in shares]
        self._of_the_rest = [(part, sum(parts[number:])) for number, part in enumerate(parts)]

    def before(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the first n places draw from each corpus, for each n: shape [places, corpora]."""
        left, counts = places, []
        for part, rest in self._of_the_rest:
            counts.append(left * part // rest)
            left = left - counts[-1]
        return np.stack(counts, axis=1)

    def at(self, first: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of `size` places from `first` on: the corpus, and how many samples were drawn from it before; shape [size] each."""
        counts = self.before(np.arange(first, first + size + 1, dtype=np.int64))
        corpus = np.diff(counts, axis=0).argmax(axis=1)
        return corpus, counts[np.arange(size), corpus]
