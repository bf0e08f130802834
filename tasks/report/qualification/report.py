"""A qualification for people: its page and the same in short, both from `qualification.json`.

The page itself is page.py; what `qualification.json` holds is data.py, and what the report of a
run says of it short.py. Who measures and judges does not live here. See docs/qualification.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.redaction import redact
from tasks.report.data import duration
from tasks.report.pages import write_page
from tasks.report.qualification.data import Found, count
from tasks.report.qualification.data import found as read
from tasks.report.qualification.page import MEANS, qualification_page, sentences

FILE = "qualification.html"
SENTENCES_SHOWN = 20


def write_qualification(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all. Raises ValueError when `payload` is no qualification."""
    return write_page(folder / FILE, redact(qualification_page(read(payload))))


def qualification_markdown(payload: Mapping[str, Any]) -> str:
    """The same in short, in Markdown, of at most 30 lines."""
    return redact(_markdown(read(payload)))


def _markdown(result: Found) -> str:
    verdict, measured = result.verdict, result.measured
    machines = ", ".join(
        f"{len(names)} {kind}"
        for kind in ("healthy", "degraded", "failed", "unknown")
        if (names := [node for node in result.nodes if node.verdict == kind])
    )
    entries = [f"- {_plain(reason.sentence)}. {_plain(reason.remedy)}".strip() for reason in result.reasons]
    more = f"- and {len(entries) - SENTENCES_SHOWN} more" if len(entries) > SENTENCES_SHOWN else ""
    answered = f"{result.answered} of {count(measured.expected_nodes, 'machine')} answered"
    parts = [
        f"# Qualification: {verdict.verdict}",
        MEANS[verdict.verdict],
        f"Judged as `{result.sku.name}`: {answered}; {machines or 'no machine has a verdict'}. {duration(measured.seconds)}.",
        "\n".join([*entries[:SENTENCES_SHOWN], more]).strip(),
        "\n".join(f"- {_plain(one)}" for one in sentences(result)),
    ]
    return "\n\n".join(part for part in parts if part)


def _plain(text: str) -> str:
    """On one line, and no markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'").replace("[", "\\[")
