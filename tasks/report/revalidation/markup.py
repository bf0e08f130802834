"""Elements that only a revalidation's page has: badges of a status or a finding, sentences with `code`. More:
tasks/report/markup.py."""

from __future__ import annotations

import re
from html import escape

from tasks.report.markup import SIGNS, Html, join, tag

STYLES = {
    "passed": "good",
    "failed": "bad",
    "absent": "idle",
    "none": "good",
    "drift": "bad",
    "anomaly": "bad",
    "insufficient": "idle",
}
SAID = {"none": "as before"}


def badge(status: str) -> Html:
    """A status of a part or slice, or the finding on a column: a word with a sign and a colour."""
    style = STYLES[status]
    return tag(
        "span", tag("span", SIGNS[style], aria_hidden="true"), f" {SAID.get(status, status)}", class_=f"badge {style}"
    )


def said(text: str) -> Html:
    """A sentence with `code` in backticks."""
    pieces = re.split(r"`([^`]*)`", text)
    return join(*(tag("code", piece) if place % 2 else Html(escape(piece)) for place, piece in enumerate(pieces)))
