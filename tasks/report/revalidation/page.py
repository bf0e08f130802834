"""The page of a revalidation: what it published in, one self-contained HTML text out, light and dark, without script.

The verdict, the parts, the checks and the lineage come last; before them the sections on drift, service and performance.
The sentences are messages.py's, elements tasks/report/markup.py's, the frame that of a run's report.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from string import Template

from tasks.report.data import number, percent, short
from tasks.report.markup import Html, checks_grid, facts, figure, folded, grid, join, tag, tally
from tasks.report.revalidation.charts import axis, calibration, legend, scale_of, whisker
from tasks.report.revalidation.data import (
    Classifier,
    Column,
    Distribution,
    DriftReport,
    Evidence,
    Loss,
    Measured,
    Part,
    PerformanceReport,
    Score,
    ServiceReport,
    Slice,
)
from tasks.report.revalidation.markup import badge, said
from tasks.report.revalidation.messages import (
    MEANS,
    SIGN,
    classifier_said,
    compared,
    drift_said,
    happens,
    loss_said,
    p_said,
    score_said,
    to_do,
    value_said,
)

# The sections of a revalidation's page that are made of columns: drift of the data, and what the endpoint answered.
#
# A column is one statistic with its threshold; its drawing is charts.py's.


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
    text = f" {service.requests:,} answers of endpoint {service.endpoint}{since}, against {service.reference_requests:,} before."
    lead = tag("p", badge(service.verdict), text, class_="said")
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
    return join(
        heading, folded(f"Distributions of what did not move ({len(rest)})", tag("div", *rest, class_="figures"))
    )


def _distribution(column: Column) -> Html:
    """The shares of a column's labels in both, and the largest changes."""
    shares = _shares(column.histogram) if column.histogram else Html()
    moved = tag("ul", *(tag("li", text.replace("->", "\u2192")) for text in column.moved[:MOVED_SHOWN]), class_="moved")
    caption = "share of the reference, then of the new data" if shares else column.title
    return figure(join(shares, moved), column.name.replace("_", " "), caption)


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
    table = grid(heads, rows, class_="features")
    return join(tag("h3", "Domain classifier"), tag("p", classifier_said(classifier), class_="said"), table)


# The performance in a revalidation's page: the champion on new data against itself at promotion, whole and in slices.


SCALE = tag("small", "scale")


def performance_section(performance: PerformanceReport | None, why: str) -> Html:
    """The scores and the slices; where they were not measured, why not."""
    if performance is None:
        return tag(
            "p",
            "The champion was not measured on the new data: ",
            said(why or "nothing is said of it"),
            ".",
            class_="note",
        )
    sure = f"{performance.confidence:.0%} interval" if performance.confidence else "interval"
    scored = f" Scored by {short(performance.scored_by)}." if performance.scored_by else ""
    paired = (
        f" {performance.paired:,} documents are the same in both, and compared one by one."
        if performance.paired
        else ""
    )
    return join(
        facts(
            {
                "loss since promotion": loss_said(performance.loss),
                "perplexity, new": _perplexity(performance.new),
                "perplexity, promotion": _perplexity(performance.promotion),
            }
        ),
        tag("p", f"Lower is better. The whisker is the {sure}.{paired}{scored}", class_="note"),
        _scores(performance),
        _slices(performance),
    )


def _perplexity(score: Score) -> str | None:
    return None if score.perplexity is None else number(score.perplexity)


def _scores(performance: PerformanceReport) -> Html:
    both = {"new data": performance.new, "at promotion": performance.promotion}
    scale = scale_of([value for score in both.values() for value in (score.bits_per_byte, score.low, score.high)])
    rows: list[Sequence[str]] = [
        (
            name,
            "" if score.documents is None else number(score.documents),
            score_said(score),
            _score(name, score, scale),
        )
        for name, score in both.items()
    ]
    rows.append((SCALE, "", "", axis(scale, name="score-axis", what="Bits per byte")))
    return grid(("Bits per byte", "Documents", "Measured", "Interval"), rows, class_="forest")


def _score(name: str, score: Score, scale: tuple[float, float]) -> Html:
    text = f"{name}: {score_said(score)} bits per byte"
    return whisker(score.bits_per_byte, score.low, score.high, scale=scale, name=f"score-{name.split()[0]}", text=text)


def _slices(performance: PerformanceReport) -> Html:
    losses = [each.loss for each in performance.slices if each.loss]
    bounds = [value for loss in losses for value in (loss.estimate, loss.low, loss.high)]
    if not performance.slices:
        return Html()
    scale = scale_of(bounds, zero=True)
    rows = [_slice(each, scale, place) for place, each in enumerate(performance.slices)]
    if losses:
        rows.append((SCALE, "", "", axis(scale, name="slice-axis", share=True, what="Loss since promotion")))
    text = "How far bits per byte lie over those at promotion; right of the line is worse. A diamond failed."
    heads = ("Slice", "Documents, then and now", "Bits per byte", "Loss since promotion")
    return join(tag("h3", "Slices"), tag("p", text, class_="note"), grid(heads, rows, class_="forest"))


def _slice(each: Slice, scale: tuple[float, float], place: int) -> tuple[str, ...]:
    loss = each.loss or Loss()
    drawn = whisker(
        loss.estimate,
        loss.low,
        loss.high,
        scale=scale,
        name=f"slice-{place}",
        zero=0.0,
        text=f"{each.slice}: {loss_said(each.loss)}",
        failed=each.status == "failed",
    )
    known = each.promotion is not None and each.new is not None
    return (
        join(Html(escape(each.slice)), tag("small", badge(each.status))),
        f"{each.reference_documents:,} / {each.documents:,}",
        f"{value_said(each.promotion)} to {value_said(each.new)}" if known else "not measured",
        join(drawn, tag("small", loss_said(loss) if drawn else "")),
    )


FOLDER = Path(__file__).parents[1]
VERDICTS = {"valid": "good", "degraded": "warn", "invalid": "bad", "unknown": "idle"}
PARTS = {
    "integrity": "what is stored and served is what was signed",
    "data": "the new data passes the rules of validation",
    "drift": "new data against what the champion was promoted on",
    "performance": "the champion on new data against itself at promotion",
    "service": "what an endpoint answered since the last revalidation",
}


def evidence_page(payload: Evidence) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    sections = {
        "Parts": _parts(payload.parts),
        "Drift": drift_section(payload.drift, _part(payload, "drift")),
        "Performance": performance_section(payload.performance, _part(payload, "performance")),
        "Service": service_section(payload.service, _part(payload, "service")),
        "Checks": _checks(payload.parts),
        "Lineage": _lineage(payload),
    }
    shown = {heading: body for heading, body in sections.items() if body}
    links = (tag("a", heading, href=f"#{heading.lower()}") for heading in shown)
    bodies = (tag("section", tag("h2", heading), body, id=heading.lower()) for heading, body in shown.items())
    style = VERDICTS[payload.verdict]
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        style=(FOLDER / "page.css").read_text(encoding="utf-8")
        + (FOLDER / "revalidation" / "evidence.css").read_text(encoding="utf-8"),
        title=escape(f"Revalidation of {payload.name or 'a model'}"),
        status=tag(
            "span",
            tag("span", SIGN[payload.verdict], aria_hidden="true"),
            f" {payload.verdict}",
            class_=f"badge {style}",
        ),
        about=escape(" · ".join(short(ref) for ref in (payload.model, payload.dataset) if ref)),
        links=join(*links),
        main=join(_verdict(payload), *bodies),
    )


def _part(payload: Evidence, name: str) -> str:
    """What the verdict says of a part."""
    return next((part.said for part in payload.parts if part.name == name), "")


def _verdict(payload: Evidence) -> Html:
    head = tag("h2", tag("span", SIGN[payload.verdict], aria_hidden="true"), f" {payload.verdict}")
    why = tag(
        "div", tag("h3", "Why"), tag("ul", *(tag("li", said(one)) for one in payload.why or ("Nothing was said.",)))
    )
    do = tag("div", tag("h3", "What to do"), tag("ol", *(tag("li", said(one)) for one in to_do(payload))))
    told_of = tag("p", tag("strong", "What happens by itself: "), said(happens(payload)), class_="window")
    windows = _windows(payload)
    body = (
        head,
        tag("p", MEANS[payload.verdict], class_="lead"),
        tag("div", why, do, class_="columns"),
        told_of,
        windows,
    )
    return tag("div", *body, class_=f"verdict {VERDICTS[payload.verdict]}", role="status")


def _windows(payload: Evidence) -> Html:
    if len(payload.window.data) < 2:
        return Html()
    refs = join(
        *(join(Html(", " if index else ""), tag("code", short(ref))) for index, ref in enumerate(payload.window.data))
    )
    return tag("p", "Found in a row on ", refs, ".", class_="note")


def _parts(parts: Sequence[Part]) -> Html:
    rows = [
        (
            join(Html(escape(part.name)), tag("small", PARTS.get(part.name, ""))),
            badge(part.status),
            tag("span", said(part.said), class_="said"),
            tally(part.checks) if part.checks else "",
        )
        for part in parts
    ]
    return grid(("Part", "Status", "Found", "Checks"), rows, class_="parts")


def _checks(parts: Sequence[Part]) -> Html:
    """Every check of every part; what failed stands open."""
    asked = [part for part in parts if part.checks]
    opened = (
        join(tag("h3", f"{part.name}: {tally(part.checks)}"), checks_grid(part.checks)) for part in asked if part.failed
    )
    closed = (
        folded(f"{part.name}: {tally(part.checks)}", checks_grid(part.checks)) for part in asked if not part.failed
    )
    return join(*opened, *closed)


def _lineage(payload: Evidence) -> Html:
    drift = payload.drift or DriftReport()
    performance = payload.performance or PerformanceReport()
    rows = {
        "model": payload.model,
        "new data": payload.dataset,
        "reference, that it was promoted on": payload.reference,
        "scored by": performance.scored_by,
        "endpoint": f"endpoint/{payload.service.endpoint}" if payload.service else "",
        "windows": ", ".join(payload.window.data),
    }
    settings = {
        "false-alarm rate": percent(drift.false_alarm_rate) if drift.false_alarm_rate else "",
        "random splits": f"{drift.splits:,}" if drift.splits else "",
        "confidence of intervals": percent(performance.confidence) if performance.confidence else "",
        "windows before acting": number(payload.window.of) if payload.window.of else "",
    }
    listed = [join(tag("dt", name), tag("dd", tag("code", ref))) for name, ref in rows.items() if ref]
    listed += [join(tag("dt", name), tag("dd", value)) for name, value in settings.items() if value]
    return tag("dl", *listed)
