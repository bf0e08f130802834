"""The part `performance` of a revalidation as JSON, and the checks that it is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tasks.artifacts import Check
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.config.revalidation import PerformanceConfig
from tasks.evaluation.performance_loss import loss_since, measured, pairs
from tasks.evaluation.performance_slices import judge_slices, plain
from tasks.evaluation.scores import bits_per_byte_interval

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


def loss_checks(told: Mapping[str, Any], config: PerformanceConfig, limits: ComparisonConfig) -> tuple[Check, ...]:
    """The whole and every slice that there are documents enough for.

    A slice is judged by the low end alone: among many slices some lie high by chance.
    """
    loss, now, then = told["loss"], told["new"]["bits_per_byte"], told["promotion"]["bits_per_byte"]
    status = loss_status(loss, config, limits)
    advice = (
        f"The interval is too wide to judge by: hold out more documents, or raise revalidation.performance.max_loss_interval = "
        f"{config.max_loss_interval:.4g}. "
        if status == "insufficient"
        else "The data has moved away from what the champion learnt: retrain on it. It goes on serving; "
        "comparison.max_loss_since_promotion is the limit. "
    )
    since = Check(
        name="loss since promotion, relative",
        measured=loss["estimate"],
        limit=f"<= {limits.max_loss_since_promotion:.4g}",
        passed=status == "passed",
        insufficient=status == "insufficient",
        remedy=f"{advice}Bits per byte {now:.4f}, at its promotion {then:.4f}; {told['confidence']:.0%} interval of the loss "
        f"{loss['low']:.4f} to {loss['high']:.4f}.",
    )
    judged = (each for each in told["slices"] if each["status"] != "insufficient")
    return (since, *(_of_slice(each, config) for each in judged))


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


def _of_slice(told: Mapping[str, Any], config: PerformanceConfig) -> Check:
    return Check(
        name=f"loss of the slice {told['slice']}, low end of its interval",
        measured=told["loss"]["low"],
        limit=f"<= {config.max_slice_loss:.4g}",
        passed=told["status"] == "passed",
        remedy="The champion is worse on these documents than it was: retrain on data that has more of them; "
        "revalidation.performance.max_slice_loss is the limit.",
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
