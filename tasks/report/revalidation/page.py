"""The page of a revalidation: what templates/revalidation.html shows of it, worked out. The sentences are messages.py's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import zip_longest

from markupsafe import Markup

from tasks.report import strips
from tasks.report.data import percent
from tasks.report.pages import render
from tasks.report.revalidation import messages
from tasks.report.revalidation.data import Column, Evidence, Measured

LABELS_SHOWN = 16
VERDICTS = {"valid": "good", "degraded": "warn", "invalid": "bad", "unknown": "idle"}
Share = tuple[str, str]
"""In words, and as the width of a bar in percent of the largest."""


def evidence_page(payload: Evidence) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    return render(
        "revalidation.html",
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
