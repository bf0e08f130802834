"""The evidence of a revalidation, for people: a page, the same in short, and two pictures, all from `revalidation.json`.

The page itself is page.py, its sentences and the short form messages.py; what
`revalidation.json` holds is data.py. Who measures and judges does not live here. See docs/revalidation.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.artifacts import parse_ref
from tasks.common.redaction import redact
from tasks.report.charts import ACCENT, BAD, INK, LINE, MUTED, SOFT, STYLE
from tasks.report.data import number, short
from tasks.report.revalidation.data import Column, Evidence, Measured, PerformanceReport, evidence
from tasks.report.revalidation.messages import markdown
from tasks.report.revalidation.page import evidence_page
from tasks.storage.store import Store, find

# A revalidation's two pictures for MLflow, as PNG: the drift of every column, and the performance with its slices.
#
# The page's own drawings are charts.py.


COLUMNS_SHOWN, SLICES_SHOWN = 24, 20
LABEL_CHARACTERS = 34
FAR = 4.0
"""Thresholds beyond which a value is drawn at the edge, with its number."""
DOTS = 150


def draw(folder: Path, report: Evidence) -> tuple[Path, ...]:
    """Draw what was measured into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [
        column
        for column in (report.drift.columns if report.drift else ())
        if column.value is not None and column.threshold
    ]
    columns = sorted(known, key=lambda column: -(column.value or 0.0) / (column.threshold or 1.0))[:COLUMNS_SHOWN]
    made = []
    if columns and report.drift:
        title = f"Drift of {short(report.drift.new)} from {short(report.drift.reference)}: {report.drift.verdict}"
        made.append(_save(folder / "drift.png", len(columns), title, lambda axes: _drift(axes, columns)))
    rows = _rows(report.performance)
    if rows:
        title = f"Bits per byte of {short(report.model)} on {short(report.dataset)}, relative to promotion"
        made.append(_save(folder / "performance.png", len(rows), title, lambda axes: _performance(axes, rows)))
    return tuple(made)


def _drift(axes: Any, columns: Sequence[Column]) -> None:
    """Each column in units of its threshold, so that one line is the threshold of all."""
    for row, column in enumerate(columns):
        threshold = column.threshold or 1.0
        null = [value / threshold for value in column.null if value is not None]
        axes.plot(null, [row] * len(null), "|", color=SOFT, markersize=11, markeredgewidth=1.2)
        value = (column.value or 0.0) / threshold
        style = {"marker": "D", "color": BAD} if column.found else {"marker": "o", "color": ACCENT}
        axes.plot([min(value, FAR)], [row], markersize=8, linestyle="", zorder=3, **style)
        text = f"{number(column.value)} {column.unit}, threshold {number(threshold)}".replace(" ,", ",")
        axes.text(FAR * 1.04, row, text, va="center", color=INK)
    axes.axvline(1.0, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.set_xlim(min(0.0, axes.get_xlim()[0]), FAR * 1.02)
    axes.set_xlabel(
        f"value by its threshold (dashed); bars: both sides mixed, split at random; beyond {FAR:g}: at the edge"
    )
    _label(axes, [column.name.replace("_", " ") for column in columns])


Row = tuple[str, float, Measured, Measured, bool]
"""Label, loss, its interval, and whether it failed."""


def _rows(performance: PerformanceReport | None) -> list[Row]:
    if performance is None:
        return []
    losses = [("all documents", performance.loss, False)]
    losses += [(each.slice, each.loss, each.status == "failed") for each in performance.slices[:SLICES_SHOWN]]
    return [
        (name, loss.estimate, loss.low, loss.high, failed)
        for name, loss, failed in losses
        if loss and loss.estimate is not None
    ]


def _performance(axes: Any, rows: Sequence[Row]) -> None:
    axes.axvline(0.0, color=MUTED, linewidth=1.0)
    for place, (_, estimate, low, high, failed) in enumerate(rows):
        if low is not None and high is not None:
            axes.plot([low * 100, high * 100], [place] * 2, color=INK, linewidth=1.6, marker="|", markersize=9)
        style = {"marker": "D", "color": BAD} if failed else {"marker": "o", "color": ACCENT}
        axes.plot([estimate * 100], [place], markersize=8, linestyle="", zorder=3, **style)
    axes.set_xlabel("change of bits per byte since promotion, percent: right of the line is worse; a diamond failed")
    _label(axes, [name for name, *_ in rows])


def _label(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_fit(name) for name in names], color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.grid(axis="x", color=LINE, linewidth=0.8)


def _fit(name: str) -> str:
    return name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}\u2026"


def _save(path: Path, rows: int, title: str, plot: Any) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.3 + 0.36 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        plot(axes)
        axes.set_title(title if len(title) <= 84 else f"{title[:83]}\u2026", loc="left", fontsize=12)
        figure.savefig(path, dpi=DOTS, metadata={"Software": None})
    return path


FILE = "evidence.html"
PAYLOAD = "revalidation.json"


def evidence_of(store: Store, revalidation: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a revalidation, every byte checked, and its payload. Raises Unknown, IntegrityError."""
    folder = store.fetch(find(store, *parse_ref(revalidation)))
    return folder, json.loads((folder / PAYLOAD).read_text(encoding="utf-8"))


def write_evidence(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all. Raises ValueError when `payload` is no revalidation."""
    page = redact(evidence_page(evidence(payload)))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.new"
    temporary.write_text(page, encoding="utf-8")
    return temporary.replace(folder / FILE)


def evidence_markdown(payload: Mapping[str, Any]) -> str:
    """The same in short, in Markdown, of at most 60 lines: what stands beside the form of an approval."""
    return redact(markdown(evidence(payload)))


def figures(folder: Path, payload: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw `drift.png` and `performance.png`, each where it was measured; returns those that were drawn."""

    return draw(folder, evidence(payload))
