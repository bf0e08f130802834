"""The evidence of a revalidation, for people: a page, the same in short, and two pictures, all from `revalidation.json`.

The page itself is page.py, its sentences and the short form messages.py, the pictures figures.py; what
`revalidation.json` holds is data.py. Who measures and judges does not live here. See docs/revalidation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.redaction import redact
from tasks.report.revalidation.data import evidence
from tasks.report.revalidation.messages import markdown
from tasks.report.revalidation.page import evidence_page

FILE = "evidence.html"


def write_evidence(folder: Path, payload: Mapping[str, Any]) -> Path:
    """Write the page, whole or not at all. Raises ValueError when `payload` is no revalidation."""
    page = redact(evidence_page(evidence(payload)))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{FILE}.new"
    temporary.write_text(page, encoding="utf-8")
    return temporary.replace(folder / FILE)


def evidence_markdown(payload: Mapping[str, Any]) -> str:
    """The same in short, in Markdown, of at most 60 lines: what stands beside the form of an approval."""
    return redact(markdown(evidence(payload)))


def figures(folder: Path, payload: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw `drift.png` and `performance.png`, each where it was measured; returns those that were drawn."""
    from tasks.report.revalidation.figures import draw

    return draw(folder, evidence(payload))
