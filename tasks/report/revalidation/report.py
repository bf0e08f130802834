"""The evidence of a revalidation, for people: a page, the same in short, and two pictures, all from `revalidation.json`.

Markup of the page is templates/revalidation.html's, what `revalidation.json` holds is data.py. Sentences (the verdict, what
happens, what to do) may hold `code` in backticks. Who measures and judges does not live here. See docs/revalidation.md.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tasks.artifacts import parse_ref
from tasks.common.redaction import redact
from tasks.report import charts
from tasks.report.charts import fit
from tasks.report.data import number, percent, short
from tasks.report.pages import render, write_page
from tasks.report.pictures import ACCENT, BAD, INK, MUTED, SOFT, drawable, picture, rows_of
from tasks.report.revalidation.data import (
    NOT_MEASURED,
    Classifier,
    Column,
    DriftReport,
    Evidence,
    Loss,
    Measured,
    PerformanceReport,
    Score,
    evidence,
)
from tasks.storage.store import Store, find

MEANS = {
    "valid": "The champion is what was signed, and it does on this data what it did when it was promoted.",
    "degraded": "The champion is what was signed, but the data, its scores or its answers are no longer what they were.",
    "invalid": "The champion is not what was signed. It must not be served until it is repaired.",
    "unknown": "Too little could be measured for a verdict. That is no all-clear.",
}
SIGN = {"valid": "\u2713", "degraded": "\u25a0", "invalid": "\u2715", "unknown": "?"}
ROWS_SHOWN, FEATURES_SHOWN = 8, 6
"""In the short form."""
CHARACTERS_SHOWN = 240
NOTHING = 1e-9


def happens(payload: Evidence) -> str:
    """What this revalidation starts by itself."""
    window = payload.window
    if payload.verdict == "degraded" and window.shares_documents_with and not payload.acts:
        return (
            f"Window {window.number} of {window.of}: nothing starts, for this data shares documents with "
            f"{window.shares_documents_with}, which counted already. A folder that is watched is published whole: move files "
            "that were judged out of it, and the next revalidation is of new documents only."
        )
    if payload.verdict != "degraded":
        return (
            "Nothing starts by this verdict." if payload.verdict == "valid" else "No retraining starts by this verdict."
        )
    if payload.acts:
        return (
            f"Window {window.number} of {window.of}: the event `model.degraded` is said, and what is triggered by it starts, "
            "once in its cool-down."
        )
    if window.number < window.of:
        return (
            f"Window {window.number} of {window.of}: nothing starts yet. `model.degraded` is said when a revalidation on other "
            "data finds the same again."
        )
    return f"Window {window.number} of {window.of}: nothing starts again, for this data counted already."


def to_do(payload: Evidence) -> tuple[str, ...]:
    """What a person does next, the most important first."""
    own = tuple(dict.fromkeys(check.remedy for part in payload.parts for check in part.failed if check.remedy))
    name = payload.name
    if payload.verdict == "invalid":
        return (
            f"`headway verify model/{name}` names every file that is not as it was signed.",
            *own,
            f"Or go back to the champion before it: `headway rollback model/{name} --reason TEXT` verifies that one.",
            "Find out who changed it: `headway audit-log --verify`, and the system's own logs.",
        )
    if payload.verdict == "degraded":
        learn = "Look at what moved. Fix broken data at its source: a model trained on it learns the fault."
        act = (
            "`headway approve` lists the retraining that waits for you, where approval is asked for."
            if payload.acts
            else f"`headway revalidate {name} --data NAME@VERSION` looks at other data now."
        )
        return (learn, act, "`headway retrain` trains on the new data at once, whatever the windows say.")
    if payload.verdict == "unknown":
        more = f"Give it what it lacked, as said of each part, and look again: `headway revalidate {name}`."
        return (more, *own)
    return ("Nothing.", *own)


def loss_said(loss: Loss | None) -> str:
    """A loss with its interval, in percent."""
    if loss is None or loss.estimate is None:
        return NOT_MEASURED
    spread = f" ({signed(loss.low)} to {signed(loss.high)})" if loss.low is not None and loss.high is not None else ""
    return f"{signed(loss.estimate)}{spread}"


def signed(share: float) -> str:
    """A share in percent that always shows its sign."""
    return f"{'+' if share > 0 else ''}{percent(share)}"


def score_said(score: Score) -> str:
    """Bits per byte with the interval."""
    if score.bits_per_byte is None:
        return NOT_MEASURED
    known = score.low is not None and score.high is not None
    return f"{score.bits_per_byte:.3f}" + (f" ({score.low:.3f} to {score.high:.3f})" if known else "")


def value_said(value: float | None) -> str:
    """A value with about four digits; rounding errors of nothing are nothing."""
    return NOT_MEASURED if value is None else number(value) if abs(value) > NOTHING else "0"


def measured_said(column: Column) -> str:
    """What a column measured, with its unit."""
    return f"{value_said(column.value)} {column.unit}".strip() if column.value is not None else NOT_MEASURED


def p_said(p: float | None) -> str:
    """A p value: small ones are told as a limit."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def compared(drift: DriftReport) -> str:
    """How many documents were looked at, and how the thresholds were made."""
    count = drift.documents
    looked = f"Looked at {count.looked_at_new:,} of {count.new:,} new documents and {count.looked_at_reference:,} of "
    rate = (
        f" At most {percent(drift.false_alarm_rate)} of windows of unchanged data are called drift."
        if drift.false_alarm_rate
        else ""
    )
    made = f" Thresholds are made from {drift.splits:,} random splits of both sides mixed." if drift.splits else ""
    return f"{looked}{count.reference:,} in the reference.{made}{rate}"


def drift_said(drift: DriftReport) -> str:
    """The verdict on the data in a sentence; each column stands below it."""
    moved = [column.name for column in drift.columns if column.found]
    return f"{len(moved)} of {len(drift.columns)} columns are over their thresholds." if moved else drift.why


def classifier_said(classifier: Classifier) -> str:
    """What the domain classifier could do."""
    if classifier.auc is None:
        return "A classifier was not tried."
    threshold = f"; drift above {classifier.threshold:.3f}" if classifier.threshold is not None else ""
    p = f", p {p_said(classifier.p_value)}" if classifier.p_value is not None else ""
    text = f"A classifier tells new from reference documents with AUC {classifier.auc:.3f}{p}{threshold}."
    return f"{text} 0.5 is guessing, 1 is never wrong."


def markdown(payload: Evidence) -> str:
    """The evidence in short. Lists, no tables: the form of an approval is narrow."""
    parts = [
        f"## {SIGN[payload.verdict]} {payload.verdict}: {_safe(payload.name)}",
        MEANS[payload.verdict],
        _list(_safe(why) for why in payload.why[:ROWS_SHOWN]),
        happens(payload),
        ", ".join(
            f"{_safe(part.name)} {'**failed**' if part.status == 'failed' else part.status}"
            for part in payload.parts[:ROWS_SHOWN]
        ),
        _performance_in_short(payload.performance),
        _drift_in_short(payload.drift),
        f"{_ref(payload.model)} on {_ref(payload.dataset)}, against {_ref(payload.reference)}.",
    ]
    return "\n\n".join(part for part in parts if part)


def _performance_in_short(performance: PerformanceReport | None) -> str:
    if performance is None:
        return ""
    failed = [each for each in performance.slices if each.status == "failed"]
    rows = (f"{_safe(each.slice)}: {loss_said(each.loss)}" for each in failed[:ROWS_SHOWN])
    text = f"{score_said(performance.new)} on the new data, {score_said(performance.promotion)} at promotion"
    return _below(f"**Bits per byte**: {text}; a loss of {loss_said(performance.loss)}.", rows)


def _drift_in_short(drift: DriftReport | None) -> str:
    if drift is None:
        return ""
    moved = [column for column in drift.columns if column.found]
    more = f"{len(moved) - ROWS_SHOWN} more" if len(moved) > ROWS_SHOWN else ""
    rows = [*map(_column, moved[:ROWS_SHOWN]), *([more] if more else [])]
    features = drift.classifier.features[:FEATURES_SHOWN] if drift.classifier else ()
    words = f"What distinguishes them: {', '.join(_code(each.feature) for each in features)}." if features else ""
    head = f"**What moved** ({len(moved)} of {len(drift.columns)} columns). {compared(drift)}"
    return "\n\n".join(part for part in (_below(head, rows), words) if part)


def _column(column: Column) -> str:
    values = (column.reference, column.new)
    how = "; ".join(column.moved[:3]) or " to ".join(value_said(one) for one in values if one is not None)
    measured = f"{_safe(column.name)} {measured_said(column)}, threshold {value_said(column.threshold)}"
    return f"{measured}: {_safe(how)}" if how else measured


def _below(head: str, rows: Iterable[str]) -> str:
    return "\n\n".join(part for part in (head, _list(rows)) if part)


def _list(rows: Iterable[str]) -> str:
    return "\n".join(f"- {row}" for row in rows)


def _safe(text: str) -> str:
    """A text of unknown origin, on one line: markup in it stays text."""
    flat = " ".join(text.replace("->", "\u2192").split())
    cut = flat if len(flat) <= CHARACTERS_SHOWN else f"{flat[: CHARACTERS_SHOWN - 1]}\u2026"
    closed = cut if cut.count("`") % 2 == 0 else cut.replace("`", "'")
    plain = closed.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\*_\[\]|~#!])", r"\\\1", plain)


def _code(text: str) -> str:
    flat = " ".join(text.split()).replace("`", "'").replace("|", "\u00a6")
    return f"`{flat[:CHARACTERS_SHOWN] or ' '}`"


def _ref(ref: str) -> str:
    return _code(short(ref)) if ref else "nothing"


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
    return redact(markdown(evidence(payload)))


def evidence_page(payload: Evidence) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    sentences = (happens, to_do, loss_said, score_said, value_said, p_said, compared, drift_said, classifier_said)
    return render(
        "revalidation",
        title=f"Revalidation of {payload.name or 'a model'}",
        evidence=payload,
        style=VERDICTS[payload.verdict],
        words={"MEANS": MEANS, "SIGN": SIGN, **{each.__name__: each for each in sentences}},
        strips=charts,
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
    return charts.histogram(null, column.value, column.threshold, failed=column.found, name=name, title=title)


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
    if not drawable():
        return ()
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
