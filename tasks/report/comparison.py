"""Champion against challenger by slice: a table in Markdown, for Prefect's page, and a picture as PNG for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.report.charts import fit
from tasks.report.data import short
from tasks.report.pictures import ACCENT, INK, LINE, MUTED, WARN, picture, rows_of
from tasks.report.published import ComparedSlice, ComparisonReport

FILE = "comparison.png"
SLICES_SHOWN = 24
EDGE = ("axes fraction", "data")


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
        return mine, theirs, _why_none(row)
    return mine, theirs, f"{signed(row.loss.estimate)} ({signed(row.loss.low)} to {signed(row.loss.high)})"


def signed(share: float) -> str:
    """A share with its sign: `+1.2%`."""
    return f"{share:+.1%}".replace("-", "\u2212")


def draw_comparison(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Draw `comparison.json` into a folder: bits per byte of both models, and the relative loss with its interval."""
    result = ComparisonReport.model_validate(payload)
    rows = result.rows[:SLICES_SHOWN]
    with picture(folder / FILE, (11, 1.9 + 0.4 * len(rows)), dots=110) as figure:
        scores, losses = figure.subplots(1, 2, sharey=True)
        # Both models as marks of their own form, joined by a line.
        for place, row in enumerate(rows):
            if row.candidate is not None and row.champion is not None:
                scores.plot([row.champion, row.candidate], [place] * 2, color=LINE, linewidth=3, zorder=1)
        marks = (("champion", "champion", "s", WARN), ("this model", "candidate", "o", ACCENT))
        for label, name, form, colour in marks:
            points = [(value, place) for place, row in enumerate(rows) if (value := getattr(row, name)) is not None]
            if points:
                scores.plot(*zip(*points, strict=True), form, color=colour, markersize=8, label=label, zorder=2)
        scores.set_title("Bits per byte, lower is better", loc="left", fontsize=12)
        rows_of(scores, [f"{fit(row.slice, 30)}  ({row.documents})" for row in rows])
        _losses(losses, rows, result.confidence)
        for axes in (scores, losses):
            axes.locator_params(axis="x", nbins=5)
        figure.legend(loc="outside lower left", ncols=2, labelcolor=INK)
        title = f"{short(result.candidate)} against the champion {short(result.champion)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return folder / FILE


def _losses(axes: Any, rows: Sequence[ComparedSlice], confidence: float) -> None:
    axes.axvline(0.0, color=MUTED, linewidth=1.2)
    for place, row in enumerate(rows):
        text, colour = (signed(row.loss.estimate), INK) if row.loss else (_why_none(row), MUTED)
        axes.annotate(text, (1.0, place), xycoords=EDGE, va="center", color=colour)
        if row.loss:
            ends = [row.loss.low * 100, row.loss.high * 100]
            axes.plot(ends, [place] * 2, color=INK, linewidth=1.6, marker="|", markersize=10)
            axes.plot([row.loss.estimate * 100], [place], "o", color=ACCENT, markersize=8, zorder=3)
    title = f"Loss to the champion, {confidence:.0%} interval: right of the line is worse"
    axes.set_title(title, loc="left", fontsize=12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.grid(axis="x", linewidth=0.8)
    axes.tick_params(axis="y", length=0)


def _why_none(row: ComparedSlice) -> str:
    return "too few documents" if row.status == "insufficient" else "not comparable"
