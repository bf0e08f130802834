"""Champion and challenger by slice, as JSON: what the terminal, the report, MLflow and Prefect show of the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation.comparison_losses import Incomparable, loss
from tasks.evaluation.comparison_rules import sampling
from tasks.evaluation.comparison_sides import ALL, Side
from tasks.evaluation.performance_slices import plain
from tasks.evaluation.scores import bits_per_byte

SCHEMA = "headway/comparison/1"


def against(mine: Side, theirs: Side, config: EvaluationConfig) -> dict[str, Any]:
    """Both models on the same documents. Losses are shares: over 0 this model is worse than the champion.

    Intervals are each by itself at `evaluation.confidence`: among many slices some lie apart by chance.
    """
    rows = [_row(name, mine, theirs, config) for name in (ALL, *mine.rows)]
    return {
        "schema": SCHEMA,
        "candidate": mine.ref,
        "champion": theirs.ref,
        "confidence": config.confidence,
        "rows": rows,
        "suites": _suites(mine, theirs),
    }


def in_words(told: Mapping[str, Any]) -> str:
    """The comparison in a line: the whole, and the slice that this model does worst on."""
    whole, *others = told["rows"]
    judged = [row for row in others if row["loss"]]
    said = f"against the champion {_loss(whole, told)}"
    if judged:
        worst = max(judged, key=lambda row: float(row["loss"]["estimate"]))
        said += f"; worst slice {worst['slice']} {_loss(worst, told)}"
    return said


def _loss(row: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    if not (found := row["loss"]):
        return "not comparable"
    word = "more" if found["estimate"] > 0 else "fewer"
    interval = f"{found['low']:+.1%} to {found['high']:+.1%}"
    return f"{abs(found['estimate']):.1%} {word} bits ({told['confidence']:.0%} interval {interval})"


def _row(name: str, mine: Side, theirs: Side, config: EvaluationConfig) -> dict[str, Any]:
    enough = mine.count("bits_per_byte", name) >= config.min_slice_documents or name == ALL
    return {
        "slice": name,
        "status": "measured" if enough else "insufficient",
        "documents": mine.count("bits_per_byte", name),
        "candidate": _bits_per_byte(mine, name),
        "champion": _bits_per_byte(theirs, name),
        "loss": _estimate("bits_per_byte", mine, theirs, name, config) if enough else None,
        "candidate_accuracy": mine.value("accuracy", name),
        "champion_accuracy": theirs.value("accuracy", name),
        "accuracy_loss": _estimate("accuracy", mine, theirs, name, config) if enough else None,
    }


def _estimate(metric: str, mine: Side, theirs: Side, name: str, config: EvaluationConfig) -> dict[str, float] | None:
    try:
        return plain(loss(metric, mine, theirs, name, drawn=sampling(config)))
    except Incomparable:
        return None


def _bits_per_byte(side: Side, name: str) -> float | None:
    try:
        part = side.parts[name]
        return bits_per_byte(part.bits, part.bytes)
    except (KeyError, ValueError):  # not there, or no numbers: the checks say so
        return None


def _suites(mine: Side, theirs: Side) -> list[dict[str, Any]]:
    """Every metric of a suite that this model has, beside the champion's."""
    return [
        {
            "metric": f"{suite}.{name}",
            "candidate": value,
            "champion": theirs.value(f"{suite}.{name}"),
            "samples": told["samples"],
        }
        for suite, told in mine.told.get("suites", {}).items()
        for name, value in told["metrics"].items()
    ]
