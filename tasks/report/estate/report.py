"""An audit as fields for machines: what `headway estate audit --json` prints, and audit.json of the artifact has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tasks.report.estate.audit import WORST, Row
from tasks.report.estate.what_if import WhatIf


def fields(rows: Sequence[Row], *, subscription: str, notes: Sequence[str], drift: WhatIf | None) -> dict[str, Any]:
    return {
        "subscription": subscription,
        "counts": counts(rows),
        "notes": list(notes),
        "drift": drift.plain() if drift else None,
        "rows": [_row(row) for row in rows],
    }


def counts(rows: Iterable[Row]) -> dict[str, int]:
    verdicts = [row.verdict for row in rows]
    return {verdict: verdicts.count(verdict) for verdict in WORST}


def checks_of(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What an error tells of rows that are not met, or not known."""
    return [
        {"name": f"{row.recommendation.id}/{one.check}", "measured": one.text, "limit": "met", "remedy": one.remedy}
        for row in rows
        for one in row.findings
        if one.verdict in ("not met", "not in this export")
    ]


def _row(row: Row) -> dict[str, Any]:
    named = {key: getattr(row.recommendation, key) for key in ("id", "text", "source", "impact", "link")}
    findings = [
        {
            **{key: getattr(one, key) for key in ("check", "verdict", "text", "resource", "remedy")},
            "waiver": one.waiver.model_dump(mode="json") if one.waiver else None,
        }
        for one in row.findings
    ]
    return {**named, "verdict": row.verdict, "why": row.why, "findings": findings}
