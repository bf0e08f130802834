"""The evidence of a revalidation, for people: a page, the same in short, and two pictures, all from `revalidation.json`.

Markup of the page is templates/revalidation.html's, its sentences and the short form are messages.py's; what
`revalidation.json` holds is data.py. Who measures and judges does not live here. See docs/revalidation.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tasks.artifacts import parse_ref
from tasks.common.redaction import redact
from tasks.report import strips
from tasks.report.charts import fit
from tasks.report.data import number, percent, short
from tasks.report.pages import render, write_page
from tasks.report.pictures import ACCENT, BAD, INK, MUTED, SOFT, picture, rows_of
from tasks.report.revalidation import messages
from tasks.report.revalidation.data import Column, Evidence, Measured, PerformanceReport, evidence
from tasks.storage.store import Store, find

FILE = "evidence.html"
PAYLOAD = "revalidation.json"
LABELS_SHOWN = 16
VERDICTS = {"valid": "good", "degraded": "warn", "invalid": "bad", "unknown": "idle"}
Share = tuple[str, str]
"""In words, and as the width of a bar in percent of the largest."""
COLUMNS_SHOWN, SLICES_SHOWN = 24, 20
LABEL_CHARACTERS = 34
FAR = 4.0
"""Thresholds beyond which a value is drawn at the edge, with its number."""
Row = tuple[str, float, Measured, Measured, bool]
"""Label, loss, its interval, and whether it failed."""


def evidence_of(store: Store, revalidation: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a revalidation, every byte checked, and its payload. Raises Unknown, IntegrityError."""
    folder = store.fetch(find(store, *parse_ref(revalidation)))
    return folder, json.loads((folder / PAYLOAD).read_text(encoding="utf-8"))


def write_evidence(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all. Raises ValueError when `payload` is no revalidation."""
    return write_page(folder / FILE, redact(evidence_page(evidence(payload))))


def evidence_markdown(payload: Mapping[str, Any]) -> str:
    """The same in short, in Markdown, of at most 60 lines: what stands beside the form of an approval."""
    return redact(messages.markdown(evidence(payload)))


def evidence_page(payload: Evidence) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    return render(
        "revalidation",
        title=f"Revalidation of {payload.name or 'a model'}",
        evidence=payload,
        style=VERDICTS[payload.verdict],
        words=messages,
        strips=strips,
        calibration=_calibration,
        in_order=_in_order,
        shares_of=_shares,
        percent=percent,
        utc=lambda seconds: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)),
    )


def _calibration(column: Column, name: str) -> Markup:
    """This window's value among those after both sides were mixed and split at random."""
    null = [value for value in column.null if value is not None]
    title = f"{column.name}: calibration"
    return strips.histogram(null, column.value, column.threshold, failed=column.found, name=name, title=title)


def _in_order(columns: Iterable[Column]) -> list[Column]:
    """What moved first, then what could not be judged."""
    rank = {"drift": 0, "anomaly": 0, "insufficient": 1, "none": 2}
    return sorted(
        columns, key=lambda column: (rank[column.verdict], column.p_value if column.p_value is not None else 1.0)
    )


def _shares(column: Column) -> tuple[list[tuple[str, Share, Share]], int]:
    """The most frequent labels with their shares of the reference and of the new data, and how many are left."""
    both = column.histogram
    rows = list(zip_longest(both.labels, both.reference, both.new)) if both else []
    larger = [max(reference or 0.0, new or 0.0) for _, reference, new in rows]
    largest = max(larger, default=0.0) or 1.0
    kept = sorted(sorted(range(len(rows)), key=lambda place: -larger[place])[:LABELS_SHOWN])

    def share(value: Measured) -> Share:
        return "" if value is None else percent(value), f"{min(max((value or 0.0) / largest, 0.0), 1.0) * 100:.1f}"

    return [(rows[at][0] or "", share(rows[at][1]), share(rows[at][2])) for at in kept], len(rows) - len(kept)


def figures(folder: Path, payload: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw `drift.png` and `performance.png` for MLflow, each where it was measured; returns those that were drawn."""
    report, made = evidence(payload), []
    drift = report.drift
    known = [one for one in (drift.columns if drift else ()) if one.value is not None and one.threshold]
    columns = sorted(known, key=lambda column: -(column.value or 0.0) / (column.threshold or 1.0))[:COLUMNS_SHOWN]
    if columns and drift:
        title = f"Drift of {short(drift.new)} from {short(drift.reference)}: {drift.verdict}"
        names = [column.name.replace("_", " ") for column in columns]
        made.append(_save(folder / "drift.png", names, title, lambda axes: _drift(axes, columns)))
    if rows := _rows(report.performance):
        title = f"Bits per byte of {short(report.model)} on {short(report.dataset)}, relative to promotion"
        names = [name for name, *_ in rows]
        made.append(_save(folder / "performance.png", names, title, lambda axes: _performance(axes, rows)))
    return tuple(made)


def _save(path: Path, names: Sequence[str], title: str, plot: Any) -> Path:
    with picture(path, (10, 1.3 + 0.36 * len(names)), dots=150) as figure:
        axes = figure.subplots()
        plot(axes)
        rows_of(axes, [fit(name, LABEL_CHARACTERS) for name in names])
        axes.tick_params(length=0)
        axes.set_title(fit(title, 84), loc="left", fontsize=12)
    return path


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
