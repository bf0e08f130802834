"""A champion on later data against itself at promotion: the part `performance` of a revalidation, and the checks that judge it.

Which documents were measured, and how, is tasks/jobs/evaluate.py; what the verdict makes of it is tasks/revalidate.py. See
docs/revalidation.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Check
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.revalidation import PerformanceConfig
from tasks.data.corpus.measures import CLASSES, classes
from tasks.evaluation.scores import BLOCK_DRAWS, Estimate, bits_per_byte_interval

# What kind of document a text is: the script that most of its letters and digits are of.


SCRIPTS = {
    "letters": "latin",
    "latin": "latin",
    "digits": "digits",
    **{
        name: name
        for name in ("greek", "cyrillic", "arabic_hebrew", "indic_thai", "cjk", "hangul", "emoji_other", "other")
    },
}
"""The kind by the class of a character; ASCII letters and letters with accents are one, and signs and blanks tell nothing."""


def kind_of(text: str) -> str:
    """`latin`, `cyrillic`, `cjk`, `digits` and so on; `none` for a text without a letter or a digit."""
    counts = classes(np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256))
    totals: dict[str, int] = {}
    for name, count in zip(CLASSES, counts.tolist(), strict=True):
        if name in SCRIPTS:
            totals[SCRIPTS[name]] = totals.get(SCRIPTS[name], 0) + count
    kind = max(totals, key=lambda name: totals[name])
    return kind if totals[kind] else "none"


# Slices: the documents of one length or of one kind, each held to itself at promotion, corrected for how many there
# are.


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
    results = [*by_length(new, before), *by_kind(new, before)]
    alpha = (1 - confidence) / max(1, sum(each.judgeable(config.min_slice_documents) for each in results))
    drawn = {"samples": max(samples, math.ceil(2 * TAIL_DRAWS / alpha)), "confidence": 1 - alpha, "seed": seed}
    return [_judged(each, config, drawn) for each in results]


def by_length(new: Measured, before: Measured) -> Iterator[Slice]:
    """Four classes by the quartiles of the lengths at promotion, fewer where quartiles fall together."""
    for name, low, high in length_classes(before.sizes):
        chosen = [(side.sizes > low) & (side.sizes <= high) for side in (new, before)]
        yield Slice(name, new.part(chosen[0]), before.part(chosen[1]))


def length_classes(sizes: NDArray[np.float64]) -> Iterator[tuple[str, float, float]]:
    """Names and bounds, in bytes, of the classes that the quartiles of some lengths make: over the first, up to the second."""
    edges = [0.0, *sorted({float(edge) for edge in np.quantile(sizes, QUANTILES)}), math.inf]
    for low, high in pairwise(edges):
        if not low:
            name = f"length up to {_size(high)}"
        else:
            name = f"length over {_size(low)}" if math.isinf(high) else f"length {_size(low)} to {_size(high)}"
        yield name, low, high


def by_kind(new: Measured, before: Measured) -> Iterator[Slice]:
    """One slice a kind; none where either evaluation tells no kinds, or all documents are of one."""
    kinds = sorted({*new.kinds, *before.kinds})
    if not new.kinds or not before.kinds or len(kinds) < 2:
        return
    for kind in kinds:
        chosen = [np.array([each == kind for each in side.kinds]) for side in (new, before)]
        yield Slice(f"script {kind}", new.part(chosen[0]), before.part(chosen[1]))


def _judged(each: Slice, config: PerformanceConfig, drawn: dict[str, Any]) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "slice": each.name,
        "documents": len(each.new),
        "reference_documents": len(each.before),
        "new": each.new.bits_per_byte if len(each.new) else None,
        "promotion": each.before.bits_per_byte if len(each.before) else None,
    }
    if not each.judgeable(config.min_slice_documents):
        return {**payload, "loss": None, "status": "insufficient"}
    loss = loss_since(each.new, each.before, **drawn)
    status = "failed" if loss.low > config.max_slice_loss else "passed"
    return {**payload, "loss": plain(loss), "status": status}


def plain(estimate: Estimate) -> dict[str, float]:
    """An estimate as JSON."""
    return {"estimate": estimate.estimate, "low": estimate.low, "high": estimate.high}


def _size(size: float) -> str:
    return f"{size:.0f} B" if size < 1000 else f"{size / 1000:.3g} kB"


# The share by which a frozen model needs more bits for new documents than it needed at its promotion, with its
# interval.
#
# A document that stands in both splits is the same for the same model, so it is drawn for both at once: only what
# differs between the two splits makes the interval wide.


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
    """Of each document, as the head of this part says; empty as `hashes` is."""

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


Evaluated = Mapping[str, Any]
"""An evaluation's two files under their names: `evaluation` and `documents`."""


def compared(
    new: Evaluated, before: Evaluated, config: PerformanceConfig, drawn: EvaluationConfig, *, scored_by: str
) -> dict[str, Any]:
    """The champion on new documents against itself at promotion. `scored_by` is the checkpoint that scored both.

    Losses are shares, lengths bytes, perplexities per token of the champion's own tokenizer.
    """
    mine, theirs = measured(new["documents"]), measured(before["documents"])
    sampling: dict[str, Any] = {"samples": drawn.bootstrap_samples, "confidence": drawn.confidence, "seed": drawn.seed}
    return {
        "new": _score(new, sampling),
        "promotion": _score(before, sampling),
        "loss": plain(loss_since(mine, theirs, **sampling)),
        "paired": len(pairs(mine, theirs)),
        "confidence": drawn.confidence,
        "scored_by": scored_by,
        "slices": judge_slices(mine, theirs, config, **sampling),
    }


def loss_status(
    loss: Mapping[str, float], config: PerformanceConfig, limits: ComparisonConfig
) -> Literal["failed", "insufficient", "passed"]:
    """Whether the whole is worse than it may be, by the estimate of the loss and its interval.

    It failed when the estimate is over the limit and the low end over 0: there is a loss, and it is likely too large. An interval
    wider than max_loss_interval tells neither, and an estimate over the limit has not passed.
    """
    over = loss["estimate"] > limits.max_loss_since_promotion
    if over and loss["low"] > 0:
        return "failed"
    return "insufficient" if over or loss["high"] - loss["low"] > config.max_loss_interval else "passed"


def loss_checks(payload: Mapping[str, Any], config: PerformanceConfig, limits: ComparisonConfig) -> tuple[Check, ...]:
    """The whole and every slice that there are documents enough for.

    A slice is judged by the low end alone: among many slices some lie high by chance.
    """
    loss, now, then = payload["loss"], payload["new"]["bits_per_byte"], payload["promotion"]["bits_per_byte"]
    status = loss_status(loss, config, limits)
    advice = (
        f"The interval is too wide to judge by: hold out more documents, or raise revalidation.performance.max_loss_interval = "
        f"{config.max_loss_interval:.4g}. "
        if status == "insufficient"
        else "The data has moved away from the champion's training data: retrain on it. The champion stays in service; "
        "comparison.max_loss_since_promotion is the limit. "
    )
    since = Check(
        name="loss since promotion, relative",
        measured=loss["estimate"],
        limit=f"<= {limits.max_loss_since_promotion:.4g}",
        passed=status == "passed",
        insufficient=status == "insufficient",
        remedy=f"{advice}Bits per byte {now:.4f}, at its promotion {then:.4f}; {payload['confidence']:.0%} interval of the loss "
        f"{loss['low']:.4f} to {loss['high']:.4f}.",
    )
    slices = (
        Check(
            name=f"loss of the slice {each['slice']}, low end of its interval",
            measured=each["loss"]["low"],
            limit=f"<= {config.max_slice_loss:.4g}",
            passed=each["status"] == "passed",
            remedy="The champion is worse on these documents than it was: retrain on data that has more of them; "
            "revalidation.performance.max_slice_loss is the limit.",
        )
        for each in payload["slices"]
        if each["status"] != "insufficient"
    )
    return (since, *slices)


def bigram_checks(
    metrics: Mapping[str, float], config: EvaluationConfig, limits: ComparisonConfig
) -> tuple[Check, ...]:
    """What a model must gain over the Kneser-Ney bigram of the same data. `metrics` are an evaluation's."""
    gain, low = metrics.get("gain_over_bigram"), metrics.get("gain_low")
    remedy = "Train longer or on more data, or lower comparison.min_gain_over_bigram."
    return (
        Check(
            name="gain over the Kneser-Ney bigram",
            measured="missing" if gain is None else gain,
            limit=f">= {limits.min_gain_over_bigram:.4g}",
            passed=gain is not None and gain >= limits.min_gain_over_bigram,
            remedy=remedy,
        ),
        Check(
            name=f"gain over the bigram, low end of the {config.confidence:.0%} interval",
            measured="missing" if low is None else low,
            limit="> 0" if limits.min_gain_over_bigram >= 0 else f"> {limits.min_gain_over_bigram:.4g}",
            passed=low is not None and low > min(limits.min_gain_over_bigram, 0),
            remedy=remedy,
        ),
    )


def _score(of: Evaluated, sampling: dict[str, Any]) -> dict[str, Any]:
    score = bits_per_byte_interval(of["documents"]["model_bits"], of["documents"]["bytes"], **sampling)
    return {
        "bits_per_byte": score.estimate,
        "low": score.low,
        "high": score.high,
        "perplexity": of["evaluation"]["perplexity"],
        "documents": len(of["documents"]["bytes"]),
    }
