"""The sections of a revalidation's page that are made of columns: drift of the data, and what the endpoint answered.

A column is one statistic with its threshold; its drawing is charts.py's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

from tasks.report.data import number, percent
from tasks.report.markup import Html, figure, folded, grid, join, tag
from tasks.report.revalidation.charts import calibration, legend
from tasks.report.revalidation.data import Classifier, Column, Distribution, DriftReport, Measured, ServiceReport
from tasks.report.revalidation.markup import badge, said
from tasks.report.revalidation.messages import classifier_said, compared, drift_said, p_said, value_said

LABELS_SHOWN, MOVED_SHOWN = 16, 12
COLUMN_HEADS = (
    "Column",
    "Finding",
    "Measured",
    "Threshold",
    "p, corrected",
    "Reference",
    "New",
    "Against random splits",
)


def drift_section(drift: DriftReport | None, why: str) -> Html:
    """The columns of the data; where they were not measured, why not."""
    if drift is None:
        return tag(
            "p", "New and reference data were not compared: ", said(why or "nothing is said of it"), class_="note"
        )
    order = _in_order(drift.columns)
    return join(
        tag("p", badge(drift.verdict), " ", said(drift_said(drift)), class_="said"),
        tag("p", compared(drift), class_="note"),
        legend() if any(column.null for column in drift.columns) else Html(),
        Html() if drift.columns else tag("p", "No column was measured.", class_="note"),
        _columns(order, "drift"),
        _distributions(order),
        _classifier(drift.classifier),
    )


def service_section(service: ServiceReport | None, why: str) -> Html:
    """The columns of an endpoint's answers; where there are none, why not."""
    if service is None:
        return tag("p", "No answers were compared: ", said(why or "nothing is said of it"), class_="note")
    since = time.strftime(" since %Y-%m-%d %H:%M UTC", time.gmtime(service.since)) if service.since else ""
    told = f" {service.requests:,} answers of endpoint {service.endpoint}{since}, against {service.reference_requests:,} before."
    lead = tag("p", badge(service.verdict), told, class_="said")
    order = _in_order(service.columns)
    return join(lead, _columns(order, "service"), _distributions(order))


def _in_order(columns: Iterable[Column]) -> list[Column]:
    """What moved first, then what could not be judged."""
    rank = {"drift": 0, "anomaly": 0, "insufficient": 1, "none": 2}
    return sorted(
        columns, key=lambda column: (rank[column.verdict], column.p_value if column.p_value is not None else 1.0)
    )


def _columns(columns: Sequence[Column], style: str) -> Html:
    rows = [_column(column, f"{style}-{place}") for place, column in enumerate(columns)]
    return grid(COLUMN_HEADS, rows, class_=style)


def _column(column: Column, identity: str) -> tuple[str, ...]:
    return (
        join(Html(escape(column.name.replace("_", " "))), tag("small", column.title)),
        badge(column.verdict),
        join(Html(escape(value_said(column.value))), tag("small", column.unit if column.value is not None else "")),
        "" if column.threshold is None else value_said(column.threshold),
        p_said(column.p_value),
        "" if column.reference is None else number(column.reference),
        "" if column.new is None else number(column.new),
        calibration(column, identity),
    )


def _distributions(columns: Sequence[Column]) -> Html:
    shown = {column.name: _distribution(column) for column in columns}
    moved = [shown[column.name] for column in columns if column.found and shown[column.name]]
    rest = [shown[column.name] for column in columns if not column.found and shown[column.name]]
    heading = join(tag("h3", "What moved"), tag("div", *moved, class_="figures")) if moved else Html()
    return join(heading, folded(f"Distributions of what did not move ({len(rest)})", _figures(rest)))


def _figures(figures: Sequence[Html]) -> Html:
    return tag("div", *figures, class_="figures")


def _distribution(column: Column) -> Html:
    """The shares of a column's labels in both, and the largest changes."""
    shares = _shares(column.histogram) if column.histogram else Html()
    moved = tag("ul", *(tag("li", text.replace("->", "\u2192")) for text in column.moved[:MOVED_SHOWN]), class_="moved")
    said = "share of the reference, then of the new data" if shares else column.title
    return figure(join(shares, moved), column.name.replace("_", " "), said)


def _shares(histogram: Distribution) -> Html:
    rows = list(zip_longest(histogram.labels, histogram.reference, histogram.new))
    largest = max((share or 0.0 for _, *both in rows for share in both), default=0.0) or 1.0
    order = sorted(range(len(rows)), key=lambda place: -max(rows[place][1] or 0.0, rows[place][2] or 0.0))[
        :LABELS_SHOWN
    ]
    cells = [
        (
            label or "",
            _share(reference),
            _share(new),
            join(_bar(reference, largest, "reference"), _bar(new, largest, "new")),
        )
        for label, reference, new in (rows[place] for place in sorted(order))
    ]
    left = len(rows) - len(cells)
    return join(
        grid(("Label", "Ref.", "New", "Shares"), cells, class_="shares"),
        tag("small", f"and {left} rarer ones") if left > 0 else Html(),
    )


def _share(share: Measured) -> str:
    return "" if share is None else percent(share)


def _bar(share: Measured, largest: float, style: str) -> Html:
    width = min(max((share or 0.0) / largest, 0.0), 1.0) * 100
    return tag("span", Html("&nbsp;"), class_=f"bar {style}", style=f"width:{width:.1f}%", aria_hidden="true")


def _classifier(classifier: Classifier | None) -> Html:
    if classifier is None:
        return Html()
    rows = [
        (
            tag("code", each.feature),
            "" if each.weight is None else ("new data" if each.weight > 0 else "reference"),
            _share(each.reference),
            _share(each.new),
            value_said(each.weight),
        )
        for each in classifier.features
    ]
    heads = ("Word or token", "Speaks for", "In reference", "In new", "Weight")
    told = grid(heads, rows, class_="features")
    return join(tag("h3", "Domain classifier"), tag("p", classifier_said(classifier), class_="said"), told)
