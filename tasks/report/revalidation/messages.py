"""What a revalidation says in sentences: the verdict, what happens, what to do; and the whole of it in short, as Markdown.

Texts may hold `code` in backticks. How the page looks does not live here (page.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tasks.report.data import number, percent, short
from tasks.report.revalidation.data import (
    NOT_MEASURED,
    Classifier,
    Column,
    DriftReport,
    Evidence,
    Loss,
    Part,
    PerformanceReport,
    Score,
)

MEANS = {
    "valid": "The champion is what was signed, and it does on this data what it did when it was promoted.",
    "degraded": "The champion is what was signed, but the data, its scores or its answers are no longer what they were.",
    "invalid": "The champion is not what was signed. It must not be served until it is mended.",
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
            f"{window.shares_documents_with}, which counted already."
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
        learn = (
            "Look at what moved. Data that is broken is mended at its source: a model trained on it learns the fault."
        )
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
        ", ".join(f"{_safe(part.name)} {_status(part)}" for part in payload.parts[:ROWS_SHOWN]),
        _performance(payload.performance),
        _drift(payload.drift),
        f"{_ref(payload.model)} on {_ref(payload.dataset)}, against {_ref(payload.reference)}.",
    ]
    return "\n\n".join(part for part in parts if part)


def _status(part: Part) -> str:
    return f"**{part.status}**" if part.status == "failed" else part.status


def _performance(performance: PerformanceReport | None) -> str:
    if performance is None:
        return ""
    failed = [each for each in performance.slices if each.status == "failed"]
    rows = (f"{_safe(each.slice)}: {loss_said(each.loss)}" for each in failed[:ROWS_SHOWN])
    text = f"{score_said(performance.new)} on the new data, {score_said(performance.promotion)} at promotion"
    return _below(f"**Bits per byte**: {text}; a loss of {loss_said(performance.loss)}.", rows)


def _drift(drift: DriftReport | None) -> str:
    if drift is None:
        return ""
    moved = [column for column in drift.columns if column.found]
    more = f"{len(moved) - ROWS_SHOWN} more" if len(moved) > ROWS_SHOWN else ""
    rows = [*map(_column, moved[:ROWS_SHOWN]), *([more] if more else [])]
    features = drift.classifier.features[:FEATURES_SHOWN] if drift.classifier else ()
    words = f"Told apart by: {', '.join(_code(each.feature) for each in features)}." if features else ""
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
