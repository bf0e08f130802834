"""The share by which a frozen model needs more bits for new documents than it needed at its promotion, with its interval.

A document that stands in both splits is the same for the same model, so it is drawn for both at once: only what differs between
the two splits makes the interval wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.evaluation.scores import BLOCK_DRAWS, Estimate


@dataclass(frozen=True)
class Measured:
    """Documents as one evaluation measured them, in its order."""

    bits: NDArray[np.float64]
    """Under the model, shape [documents]."""
    sizes: NDArray[np.float64]
    """UTF-8 bytes, shape [documents]."""
    hashes: tuple[str, ...] = ()
    """sha256 of each document; empty for an evaluation of a release that did not write them."""
    kinds: tuple[str, ...] = ()
    """Of each document, as performance_kinds.py says; empty as `hashes` is."""

    def part(self, chosen: NDArray[np.bool_]) -> Measured:
        """The chosen documents alone, `chosen` of shape [documents]."""
        rows = np.flatnonzero(chosen).tolist()
        hashes = tuple(self.hashes[row] for row in rows) if self.hashes else ()
        kinds = tuple(self.kinds[row] for row in rows) if self.kinds else ()
        return Measured(self.bits[chosen], self.sizes[chosen], hashes, kinds)

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.sum() / self.sizes.sum())


def measured(documents: Mapping[str, Any]) -> Measured:
    """The content of an evaluation's `documents.json`."""
    return Measured(
        np.asarray(documents["model_bits"], np.float64),
        np.asarray(documents["bytes"], np.float64),
        tuple(documents.get("hashes", ())),
        tuple(documents.get("kinds", ())),
    )


def pairs(new: Measured, before: Measured) -> list[tuple[int, int]]:
    """Rows of the documents that are the same in both, each used once."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(before.hashes):
        rows.setdefault(name, []).append(row)
    return [(row, rows[name].pop(0)) for row, name in enumerate(new.hashes) if rows.get(name)]


def loss_since(new: Measured, before: Measured, *, samples: int, confidence: float, seed: int) -> Estimate:
    """bits per byte of `new` / of `before` - 1, with its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 8).

    Three groups are drawn with replacement, each by itself: documents in both, in `new` alone, in `before` alone. Raises
    ValueError when one side has no document.
    """
    if not len(new) or not len(before):
        raise ValueError(f"{len(new)} new documents against {len(before)}: both sides need at least one")
    sums = sum(
        (
            _resampled(rows, samples=samples, seed=[seed, number])
            for number, rows in enumerate(_groups(new, before))
            if len(rows)
        ),
        np.zeros((samples, 4)),
    )
    draws = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3]) - 1
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(new.bits_per_byte / before.bits_per_byte - 1, float(low), float(high))


def _groups(new: Measured, before: Measured) -> list[NDArray[np.float64]]:
    """Documents in both, in `new` alone, in `before` alone: bits and bytes of each side, shape [documents, 4]."""
    same = pairs(new, before)
    mine, theirs = np.zeros(len(new), bool), np.zeros(len(before), bool)
    mine[[row for row, _ in same]] = True
    theirs[[row for _, row in same]] = True
    first, second = np.column_stack((new.bits, new.sizes)), np.column_stack((before.bits, before.sizes))
    both = np.column_stack((first[[row for row, _ in same]], second[[row for _, row in same]])) if same else first[:0]
    return [both, np.pad(first[~mine], ((0, 0), (0, 2))), np.pad(second[~theirs], ((0, 0), (2, 0)))]


def _resampled(rows: NDArray[np.float64], *, samples: int, seed: Sequence[int]) -> NDArray[np.float64]:
    """Sums of `samples` resamples of the rows, shape [samples, 4]."""
    generator, count = np.random.default_rng(seed), len(rows)
    sums = np.empty((samples, rows.shape[1]))
    block = max(1, BLOCK_DRAWS // count)
    for start in range(0, samples, block):
        chosen = generator.integers(0, count, (min(block, samples - start), count), dtype=np.int32)
        sums[start : start + block] = rows[chosen].sum(axis=1)
    return sums
