"""Elements of a page. Markup is only made by `tag`, which escapes every text that is not markup already: a document of the
dataset may be hostile HTML. What a page says does not live here (page.py, tasks/report/corpus/section.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tasks.artifacts import Check
from tasks.report.data import number, percent

SIGNS = {"good": "✓", "bad": "✕", "warn": "■", "idle": "–"}
OUTCOMES = {"passed": "good", "warned": "warn", "insufficient": "warn", "failed": "bad"}


class Html(str):
    """Text that is markup already."""


def tag(name: str, *children: str, **attributes: str) -> Html:
    """An element, left out where it has no content (but for table cells). Children that are not Html are escaped.

    `class_` is the attribute class, `aria_label` is aria-label.
    """
    inside = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    text = "".join(f' {key.strip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{text}>{inside}</{name}>") if inside or name == "td" else Html()


def join(*parts: Html) -> Html:
    """Elements one after the other."""
    return Html("".join(parts))


def table(heads: Sequence[str], rows: Sequence[Html]) -> Html:
    """A table of rows that are elements already; nothing without rows."""
    head = tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads)))
    return tag("table", head, tag("tbody", *rows)) if rows else Html()


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]], *, class_: str = "") -> Html:
    """A table of cells, the first of each row its head; every cell also knows its column's name, for narrow screens."""
    head = tag("thead", tag("tr", *(tag("th", head, scope="col") for head in heads)))
    body = (tag("tr", tag("th", first, scope="row"), *map(_labelled, heads[1:], rest)) for first, *rest in rows)
    return tag("table", head, tag("tbody", *body), class_=f"grid {class_}".strip()) if rows else Html()


def _labelled(head: str, cell: str) -> Html:
    return tag("td", cell, data_label=head) if cell else tag("td")


def facts(values: Mapping[str, float | str | None]) -> Html:
    """Names with their values, side by side; what is None is left out."""
    shown = ((name, value) for name, value in values.items() if value is not None)
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", number(value))) for name, value in shown), class_="facts")


def figure(svg: str, heading: str, text: str = "") -> Html:
    """A chart with its caption; nothing without a chart."""
    return tag("figure", tag("figcaption", f"{heading} ", tag("span", text)), Html(svg)) if svg else Html()


def folded(summary: str, body: Html) -> Html:
    """What opens by a click; nothing without a body."""
    return tag("details", tag("summary", summary), body) if body else Html()


def checks_grid(checks: Sequence[Check]) -> Html:
    """What was asked of a subject, worst first."""
    order = sorted(checks, key=lambda check: -list(OUTCOMES).index(check.outcome))
    heads = ("Check", "Outcome", "Measured", "Limit", "Count", "Where")
    return grid(heads, [_check(each) for each in order], class_="checks")


def tally(checks: Sequence[Check]) -> str:
    """How many checks came out how."""
    passed = sum(check.passed for check in checks)
    warned = sum(check.outcome == "warned" for check in checks)
    return f"{passed} of {len(checks)} passed" + (f", {warned} of them with a warning" if warned else "")


def _check(check: Check) -> tuple[str, ...]:
    style = OUTCOMES[check.outcome]
    samples = tag("ul", *(tag("li", tag("code", sample)) for sample in check.samples))
    remedy = tag("small", check.remedy) if check.outcome == "failed" else Html()
    return (
        check.name,
        tag("span", f"{SIGNS[style]} {check.outcome}", class_=style),
        measured(check),
        check.limit,
        "" if check.count is None else number(check.count),
        join(samples, remedy),
    )


def measured(check: Check) -> str:
    """The measured value, as a share where the limit is one."""
    if isinstance(check.measured, float) and "%" in check.limit:
        return f"{check.measured:.2%}" if check.measured < 1 else percent(check.measured)
    return number(check.measured)
