"""Bits per byte and other scores, and how sure we may be of them: bootstrap intervals over documents; calibration.

Pure: arrays of per-document sums in, numbers out. How they are measured is in tasks/jobs/evaluation/ and
tasks/jobs/evaluation/ngram.py; which number closes a gate is decided by the stages. See docs/evaluation.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_DRAWS = 1 << 20
"""Documents drawn at once, so that memory does not grow with the corpus."""
CALIBRATION_BINS = 15
"""Of equal width between 0 and 1, as Guo et al. 2017 (On Calibration of Modern Neural Networks) take."""


@dataclass(frozen=True)
class Estimate:
    """A number over all documents with the bootstrap interval around it."""

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
    return ratio(bits, byte_counts, samples=samples, confidence=confidence, seed=seed)


def ratio(upper: ArrayLike, lower: ArrayLike, *, samples: int, confidence: float, seed: int) -> Estimate:
    """Sum of `upper` over sum of `lower`, both of shape [documents], with its interval; equal seeds draw equal documents."""
    first, second = _aligned(upper, lower)
    draws = _resampled_ratios(first, second, samples=samples, seed=seed)
    return _estimate(float(first.sum() / second.sum()), draws, len(first), confidence=confidence)


def relative_gain(
    model_bits: ArrayLike, other_bits: ArrayLike, *, samples: int, confidence: float, seed: int
) -> Estimate:
    """1 - sum(model) / sum(other): the share by which the model needs fewer bits for the same documents.

    Both of shape [documents], in the same order: the bootstrap is paired, which takes out how hard a document is.
    """
    upper, lower = _aligned(model_bits, other_bits)
    draws = _resampled_ratios(upper, lower, samples=samples, seed=seed)
    return _estimate(1.0 - float(upper.sum() / lower.sum()), 1.0 - draws, len(upper), confidence=confidence)


def relative_loss(
    candidate_bits: ArrayLike, champion_bits: ArrayLike, *, samples: int, confidence: float, seed: int
) -> Estimate:
    """sum(candidate) / sum(champion) - 1: the share by which the candidate is worse; paired like `relative_gain`."""
    gain = relative_gain(candidate_bits, champion_bits, samples=samples, confidence=confidence, seed=seed)
    return Estimate(estimate=-gain.estimate, low=-gain.high, high=-gain.low)


def widened(loss: Estimate, seed_noise: float, *, confidence: float) -> Estimate:
    """A relative loss whose interval also holds over seeds of training: both models were drawn from their recipes.

    `seed_noise` is the relative standard deviation of bits per byte over seeds of one recipe, taken as known; two models differ
    by sqrt(2) of it. Half widths of independent parts, each with its own quantile, add as squares (Banerjee 1960, Sankhya 22).
    """
    seeds = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(2) * seed_noise * (1 + loss.estimate)
    below, above = (math.hypot(end - loss.estimate, seeds) for end in (loss.low, loss.high))
    return Estimate(loss.estimate, loss.estimate - below, loss.estimate + above)


def wilson(count: int, samples: int, *, confidence: float) -> Estimate:
    """A counted share with its score interval (Wilson 1927), which holds for few samples and for shares of 0 and 1.

    Raises ValueError without a sample.
    """
    if samples < 1 or not 0 <= count <= samples:
        raise ValueError(f"{count} of {samples}: a share needs at least one sample, and no more hits than samples")
    from scipy.stats import binomtest  # takes half a second

    interval = binomtest(count, samples).proportion_ci(confidence, method="wilson")
    return Estimate(count / samples, float(interval.low), float(interval.high))


def paired_difference(lost: int, won: int, problems: int, *, confidence: float) -> Estimate:
    """(lost - won) / problems with its score interval (Tango 1998, Statistics in Medicine 17): shares on the same problems.

    `lost` and `won` are the problems that one side alone has right. It holds for few problems, and for none that differ: then it
    reaches to z^2 / (problems + z^2) on either side. Raises ValueError without a problem.
    """
    if problems < 1 or min(lost, won) < 0 or lost + won > problems:
        raise ValueError(
            f"{lost} lost and {won} won of {problems}: a share needs at least one problem, each counted once"
        )
    z, result = NormalDist().inv_cdf((1 + confidence) / 2), (lost - won) / problems
    return Estimate(result, -_tango(won, lost, problems, z), _tango(lost, won, problems, z))


def _tango(lost: int, won: int, problems: int, z: float) -> float:
    """The largest difference whose score statistic is not under -z, by bisection."""
    low, high = (lost - won) / problems, 1.0
    for _ in range(60):
        tried = (low + high) / 2
        b = -lost - won + (2 * problems - lost + won) * tried
        c = -won * tried * (1 - tried)
        nuisance = (math.sqrt(max(b * b - 8 * problems * c, 0.0)) - b) / (4 * problems)
        spread = math.sqrt(max(problems * (2 * nuisance + tried * (1 - tried)), 0.0))
        inside = problems * tried - (lost - won) <= z * spread
        low, high = (tried, high) if inside else (low, tried)
    return low


def no_certainty(documents: int) -> NDArray[np.float64]:
    """A table to count in, shape [documents, bins, 3]: tokens, the sum of the likeliest token's probability, tokens right."""
    return np.zeros((documents, CALIBRATION_BINS, 3))


def add_certainty(
    table: NDArray[np.float64], rows: NDArray[np.int64], probability: ArrayLike, right: ArrayLike
) -> None:
    """Count tokens into the table: the document of each, the likeliest token's probability, and whether it is right; [tokens]."""
    sure = np.nan_to_num(np.asarray(probability, np.float64))
    places = rows * CALIBRATION_BINS + np.minimum((sure * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    for column, values in enumerate((np.ones(len(sure)), sure, np.asarray(right, np.float64))):
        np.add.at(table.reshape(-1, 3)[:, column], places, values)


def calibration_error(table: NDArray[np.float64]) -> float:
    """Expected calibration error (Naeini et al. 2015): |share right - mean probability| of the bins, by their tokens. 0 is best.

    `table` is summed over documents, or not.
    """
    tokens, sure, right = table.reshape(-1, CALIBRATION_BINS, 3).sum(axis=0).T
    return float(np.abs(right - sure).sum() / tokens.sum())


def reliability(table: NDArray[np.float64]) -> list[dict[str, float]]:
    """The reliability curve: of each bin with a token its bounds, tokens, mean probability and share right."""
    result = table.reshape(-1, CALIBRATION_BINS, 3).sum(axis=0).tolist()
    return [
        {
            "from": place / CALIBRATION_BINS,
            "to": (place + 1) / CALIBRATION_BINS,
            "tokens": int(tokens),
            "probability": sure / tokens,
            "accuracy": right / tokens,
        }
        for place, (tokens, sure, right) in enumerate(result)
        if tokens
    ]


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


def _estimate(value: float, draws: NDArray[np.float64], count: int, *, confidence: float) -> Estimate:
    """Expanded percentiles of `count` documents (Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 4.5).

    Percentiles alone are too narrow for few: their spread is that of a sum over n instead of n - 1, and its tails are normal
    where Student's are meant. So they are taken farther out. Two documents or more; of one, nothing is known.
    """
    from scipy.special import ndtr, stdtrit  # takes a tenth of a second

    outside = (1 - confidence) / 2
    if count > 1:
        outside = float(ndtr(math.sqrt(count / (count - 1)) * stdtrit(count - 1, outside)))
    low, high = np.quantile(draws, [outside, 1 - outside])
    return Estimate(estimate=value, low=float(low), high=float(high))
