"""The page of a revalidation: what it published in, one self-contained HTML text out, light and dark, without script.

The verdict, the parts, the checks and the lineage are here; drift and service are columns.py's, performance
scores.py's. The sentences are messages.py's, elements tasks/report/markup.py's, the frame that of a run's report.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from tasks.report.data import number, percent, short
from tasks.report.markup import Html, checks_grid, folded, grid, join, tag, tally
from tasks.report.revalidation.columns import drift_section, service_section
from tasks.report.revalidation.data import DriftReport, Evidence, Part, PerformanceReport
from tasks.report.revalidation.markup import badge, said
from tasks.report.revalidation.messages import MEANS, SIGN, happens, to_do
from tasks.report.revalidation.scores import performance_section

FOLDER = Path(__file__).parents[1]
VERDICTS = {"valid": "good", "degraded": "warn", "invalid": "bad", "unknown": "idle"}
PARTS = {
    "integrity": "what is stored and served is what was signed",
    "data": "the new data passes the rules of validation",
    "drift": "new data against what the champion was promoted on",
    "performance": "the champion on new data against itself at promotion",
    "service": "what an endpoint answered since the last revalidation",
}


def evidence_page(told: Evidence) -> str:
    """The page as one HTML document, UTF-8; equal values give equal text."""
    sections = {
        "Parts": _parts(told.parts),
        "Drift": drift_section(told.drift, _part(told, "drift")),
        "Performance": performance_section(told.performance, _part(told, "performance")),
        "Service": service_section(told.service, _part(told, "service")),
        "Checks": _checks(told.parts),
        "Lineage": _lineage(told),
    }
    shown = {heading: body for heading, body in sections.items() if body}
    links = (tag("a", heading, href=f"#{heading.lower()}") for heading in shown)
    bodies = (tag("section", tag("h2", heading), body, id=heading.lower()) for heading, body in shown.items())
    style = VERDICTS[told.verdict]
    return Template((FOLDER / "page.html").read_text(encoding="utf-8")).substitute(
        style=(FOLDER / "page.css").read_text(encoding="utf-8")
        + (FOLDER / "revalidation" / "evidence.css").read_text(encoding="utf-8"),
        title=escape(f"Revalidation of {told.name or 'a model'}"),
        status=tag(
            "span", tag("span", SIGN[told.verdict], aria_hidden="true"), f" {told.verdict}", class_=f"badge {style}"
        ),
        about=escape(" · ".join(short(ref) for ref in (told.model, told.dataset) if ref)),
        links=join(*links),
        main=join(_verdict(told), *bodies),
    )


def _part(told: Evidence, name: str) -> str:
    """What the verdict says of a part."""
    return next((part.said for part in told.parts if part.name == name), "")


def _verdict(told: Evidence) -> Html:
    head = tag("h2", tag("span", SIGN[told.verdict], aria_hidden="true"), f" {told.verdict}")
    why = tag("div", tag("h3", "Why"), tag("ul", *(tag("li", said(one)) for one in told.why or ("Nothing was said.",))))
    do = tag("div", tag("h3", "What to do"), tag("ol", *(tag("li", said(one)) for one in to_do(told))))
    told_of = tag("p", tag("strong", "What happens by itself: "), said(happens(told)), class_="window")
    windows = _windows(told)
    body = (head, tag("p", MEANS[told.verdict], class_="lead"), tag("div", why, do, class_="columns"), told_of, windows)
    return tag("div", *body, class_=f"verdict {VERDICTS[told.verdict]}", role="status")


def _windows(told: Evidence) -> Html:
    if len(told.window.data) < 2:
        return Html()
    refs = join(
        *(join(Html(", " if index else ""), tag("code", short(ref))) for index, ref in enumerate(told.window.data))
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


def _lineage(told: Evidence) -> Html:
    drift = told.drift or DriftReport()
    performance = told.performance or PerformanceReport()
    rows = {
        "model": told.model,
        "new data": told.dataset,
        "reference, that it was promoted on": told.reference,
        "scored by": performance.scored_by,
        "endpoint": f"endpoint/{told.service.endpoint}" if told.service else "",
        "windows": ", ".join(told.window.data),
    }
    settings = {
        "false-alarm rate": percent(drift.false_alarm_rate) if drift.false_alarm_rate else "",
        "random splits": f"{drift.splits:,}" if drift.splits else "",
        "confidence of intervals": percent(performance.confidence) if performance.confidence else "",
        "windows before acting": number(told.window.of) if told.window.of else "",
    }
    listed = [join(tag("dt", name), tag("dd", tag("code", ref))) for name, ref in rows.items() if ref]
    listed += [join(tag("dt", name), tag("dd", value)) for name, value in settings.items() if value]
    return tag("dl", *listed)
