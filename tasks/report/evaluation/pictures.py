"""Champion against challenger by slice in one picture, as PNG: bits per byte of both, and the relative loss with its interval.

The page's own drawings are charts.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tasks.report.charts import ACCENT, INK, LINE, MUTED, STYLE, WARN
from tasks.report.data import short
from tasks.report.evaluation.data import ComparedSlice, ComparisonReport
from tasks.report.evaluation.messages import signed

FILE = "comparison.png"
SLICES_SHOWN = 24
LABEL_CHARACTERS = 30
DOTS = 110
EDGE = ("axes fraction", "data")


def draw_comparison(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Draw `comparison.json` into a folder."""
    result = ComparisonReport.model_validate(payload)
    rows = result.rows[:SLICES_SHOWN]
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 1.9 + 0.4 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
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
        scores.xaxis.set_major_locator(MaxNLocator(5))
        scores.grid(axis="x", linewidth=0.8)
        _losses(losses, rows, result.confidence)
        _label(scores, rows)
        figure.legend(loc="outside lower left", ncols=2, labelcolor=INK)
        figure.suptitle(
            f"{short(result.candidate)} against the champion {short(result.champion)}", x=0.01, ha="left", fontsize=12
        )
        figure.savefig(folder / FILE, dpi=DOTS, facecolor="white", metadata={"Software": None})
    return folder / FILE


def _losses(axes: Any, rows: Sequence[ComparedSlice], confidence: float) -> None:
    axes.axvline(0.0, color=MUTED, linewidth=1.2)
    for place, row in enumerate(rows):
        if row.loss is None:
            text = "too few documents" if row.status == "insufficient" else "not comparable"
            axes.annotate(text, (1.0, place), xycoords=EDGE, va="center", color=MUTED)
            continue
        ends = [row.loss.low * 100, row.loss.high * 100]
        axes.plot(ends, [place] * 2, color=INK, linewidth=1.6, marker="|", markersize=10)
        axes.plot([row.loss.estimate * 100], [place], "o", color=ACCENT, markersize=8, zorder=3)
        axes.annotate(signed(row.loss.estimate), (1.0, place), xycoords=EDGE, va="center", color=INK)
    axes.set_title(
        f"Loss to the champion, {confidence:.0%} interval: right of the line is worse", loc="left", fontsize=12
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="x", linewidth=0.8)
    axes.tick_params(axis="y", length=0)


def _label(axes: Any, rows: Sequence[ComparedSlice]) -> None:
    axes.set_yticks(range(len(rows)), [f"{_fit(row.slice)}  ({row.documents})" for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _fit(name: str) -> str:
    return name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}\u2026"
