"""Champion against challenger as a table in Markdown, for Prefect's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.report.data import short
from tasks.report.evaluation.data import ComparedSlice, ComparisonReport


def comparison_markdown(payload: Mapping[str, Any]) -> str:
    """Every slice with both models' bits per byte and the relative loss."""
    result = ComparisonReport.model_validate(payload)
    head = f"| slice | documents | this model | champion | loss, {result.confidence:.0%} interval |"
    rows = [f"| {' | '.join((row.slice, str(row.documents), *figures(row)))} |" for row in result.rows]
    about = (
        f"`{short(result.candidate)}` against the champion `{short(result.champion)}`, in bits per byte of the same documents. "
        "A loss over 0 is worse."
    )
    return "\n".join(["# Champion against challenger", "", about, "", head, "| --- | --- | --- | --- | --- |", *rows])


def figures(row: ComparedSlice) -> tuple[str, str, str]:
    """This model, the champion, and the loss with its interval, for people."""
    mine, theirs = (f"{value:.4f}" if value is not None else "" for value in (row.candidate, row.champion))
    if row.loss is None:
        return mine, theirs, "too few documents" if row.status == "insufficient" else "not comparable"
    return mine, theirs, f"{signed(row.loss.estimate)} ({signed(row.loss.low)} to {signed(row.loss.high)})"


def signed(share: float) -> str:
    """A share with its sign: `+1.2%`."""
    return f"{share:+.1%}".replace("-", "\u2212")
