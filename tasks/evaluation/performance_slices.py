"""Slices: the documents of one length or of one kind, each held to itself at promotion, corrected for how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.revalidation import PerformanceConfig
from tasks.evaluation.performance_loss import Measured, loss_since
from tasks.evaluation.scores import Estimate

QUANTILES = (0.25, 0.5, 0.75)
"""Of the lengths at promotion: they cut the documents into four classes that mean the same each time."""
TAIL_DRAWS = 10
"""Draws that must lie beyond either end of an interval: a narrow tail needs more draws."""


@dataclass(frozen=True)
class Slice:
    """One slice of both splits."""

    name: str
    new: Measured
    before: Measured

    def judgeable(self, fewest: int) -> bool:
        """Whether there are enough documents on either side."""
        return min(len(self.new), len(self.before)) >= max(fewest, 1)


def judge_slices(
    new: Measured, before: Measured, config: PerformanceConfig, *, samples: int, confidence: float, seed: int
) -> list[dict[str, Any]]:
    """Every slice as revalidation.json tells it. The intervals hold together, not each by itself (Bonferroni)."""
    found = [*by_length(new, before), *by_kind(new, before)]
    alpha = (1 - confidence) / max(1, sum(each.judgeable(config.min_slice_documents) for each in found))
    drawn = {"samples": max(samples, math.ceil(2 * TAIL_DRAWS / alpha)), "confidence": 1 - alpha, "seed": seed}
    return [_judged(each, config, drawn) for each in found]


def by_length(new: Measured, before: Measured) -> Iterator[Slice]:
    """Four classes by the quartiles of the lengths at promotion, fewer where quartiles fall together."""
    for name, low, high in length_classes(before.sizes):
        chosen = [(side.sizes > low) & (side.sizes <= high) for side in (new, before)]
        yield Slice(name, new.part(chosen[0]), before.part(chosen[1]))


def length_classes(sizes: NDArray[np.float64]) -> Iterator[tuple[str, float, float]]:
    """Names and bounds, in bytes, of the classes that the quartiles of some lengths make: over the first, up to the second."""
    edges = [0.0, *sorted({float(edge) for edge in np.quantile(sizes, QUANTILES)}), math.inf]
    for low, high in pairwise(edges):
        yield _length(low, high), low, high


def by_kind(new: Measured, before: Measured) -> Iterator[Slice]:
    """One slice a kind; none where either evaluation tells no kinds, or all documents are of one."""
    kinds = sorted({*new.kinds, *before.kinds})
    if not new.kinds or not before.kinds or len(kinds) < 2:
        return
    for kind in kinds:
        chosen = [np.array([each == kind for each in side.kinds]) for side in (new, before)]
        yield Slice(f"script {kind}", new.part(chosen[0]), before.part(chosen[1]))


def _judged(each: Slice, config: PerformanceConfig, drawn: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "slice": each.name,
        "documents": len(each.new),
        "reference_documents": len(each.before),
        "new": each.new.bits_per_byte if len(each.new) else None,
        "promotion": each.before.bits_per_byte if len(each.before) else None,
    }
    if not each.judgeable(config.min_slice_documents):
        return {**told, "loss": None, "status": "insufficient"}
    loss = loss_since(each.new, each.before, **drawn)
    status = "failed" if loss.low > config.max_slice_loss else "passed"
    return {**told, "loss": plain(loss), "status": status}


def plain(estimate: Estimate) -> dict[str, float]:
    """An estimate as JSON."""
    return {"estimate": estimate.estimate, "low": estimate.low, "high": estimate.high}


def _length(low: float, high: float) -> str:
    if not low:
        return f"length up to {_size(high)}"
    return f"length over {_size(low)}" if math.isinf(high) else f"length {_size(low)} to {_size(high)}"


def _size(size: float) -> str:
    return f"{size:.0f} B" if size < 1000 else f"{size / 1000:.3g} kB"
