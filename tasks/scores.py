"""Bits per byte, and how sure we may be of them: bootstrap intervals over documents.

Pure: arrays of per-document sums in, numbers out. How bits are measured is in tasks/jobs/evaluate.py and
tasks/jobs/ngram.py; which number closes a gate is decided by the stages. See docs/evaluation.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_DRAWS = 1 << 20
"""Documents drawn at once, so that memory does not grow with the corpus."""


@dataclass(frozen=True)
class Estimate:
    """A number over all documents with the percentile bootstrap interval around it."""

    estimate: float
    low: float
    high: float


def bits_per_byte(bits: ArrayLike, byte_counts: ArrayLike) -> float:
    """Sum of bits over sum of UTF-8 bytes; both of shape [documents]. Comparable between tokenizers."""
    upper, lower = _aligned(bits, byte_counts)
    return float(upper.sum() / lower.sum())


def bits_per_byte_interval(
    bits: ArrayLike, byte_counts: ArrayLike, *, samples: int, confidence: float, seed: int
) -> Estimate:
    """Bits per byte with its interval: documents are drawn with replacement, each draw is a ratio of sums."""
    upper, lower = _aligned(bits, byte_counts)
    draws = _resampled_ratios(upper, lower, samples=samples, seed=seed)
    return _estimate(bits_per_byte(upper, lower), draws, confidence=confidence)


def relative_gain(
    model_bits: ArrayLike, other_bits: ArrayLike, *, samples: int, confidence: float, seed: int
) -> Estimate:
    """1 - sum(model) / sum(other): the share by which the model needs fewer bits for the same documents.

    Both of shape [documents], in the same order: the bootstrap is paired, which takes out how hard a document is.
    """
    upper, lower = _aligned(model_bits, other_bits)
    draws = _resampled_ratios(upper, lower, samples=samples, seed=seed)
    return _estimate(1.0 - float(upper.sum() / lower.sum()), 1.0 - draws, confidence=confidence)


def relative_loss(
    candidate_bits: ArrayLike, champion_bits: ArrayLike, *, samples: int, confidence: float, seed: int
) -> Estimate:
    """sum(candidate) / sum(champion) - 1: the share by which the candidate is worse; paired like `relative_gain`."""
    gain = relative_gain(candidate_bits, champion_bits, samples=samples, confidence=confidence, seed=seed)
    return Estimate(estimate=-gain.estimate, low=-gain.high, high=-gain.low)


def _aligned(upper: ArrayLike, lower: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = np.asarray(upper, dtype=np.float64), np.asarray(lower, dtype=np.float64)
    if first.shape != second.shape or first.ndim != 1:
        raise ValueError(f"shapes {first.shape} and {second.shape}: measure both on the same documents")
    if not np.isfinite(first).all() or not np.isfinite(second).all() or second.sum() <= 0:
        raise ValueError(
            f"{len(first)} documents with sums {first.sum()} and {second.sum()}: need finite, positive ones"
        )
    return first, second


def _resampled_ratios(
    upper: NDArray[np.float64], lower: NDArray[np.float64], *, samples: int, seed: int
) -> NDArray[np.float64]:
    """Ratio of sums of `samples` resamples, shape [samples]; the same seed draws the same documents."""
    generator, count = np.random.default_rng(seed), len(upper)
    ratios = np.empty(samples)
    block = max(1, BLOCK_DRAWS // count)
    for start in range(0, samples, block):
        chosen = generator.integers(0, count, (min(block, samples - start), count), dtype=np.int32)
        ratios[start : start + block] = upper[chosen].sum(axis=1) / lower[chosen].sum(axis=1)
    return ratios


def _estimate(value: float, draws: NDArray[np.float64], *, confidence: float) -> Estimate:
    """Percentile interval (Efron and Tibshirani 1993, chapter 13)."""
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(estimate=value, low=float(low), high=float(high))
