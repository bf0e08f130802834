"""`headway audit`: who did what, and who was refused."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from deployments.cli.output import say

UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def audit(
    person: Annotated[str, typer.Option(help="Only what this name did, or was claimed for.")] = "",
    what: Annotated[str, typer.Option(help="Only entries with this text in what was done, or to what.")] = "",
    since: Annotated[str, typer.Option(help="Only from here on: 90m, 12h, 7d, or a date, 2026-01-31.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the audit log, newest first: who did what, when, why; and who was refused."""
    from tasks.registry.audit import entries
    from tasks.settings import home
    from tasks.storage import open_store

    start = _start(since)
    found = [
        entry
        for entry in entries(open_store(home()))
        if entry.time >= start
        and person in ("", entry.who, entry.claimed)
        and what in f"{entry.action} {entry.right} {entry.what} {entry.after}"
    ]
    rows = [{**entry.model_dump(), "time": _utc(entry.time)} for entry in found]
    say({"entries": rows}, "\n".join(map(_line, rows)) or "No entry.", as_json=as_json)


def _start(since: str) -> float:
    """Seconds since 1970 of 12h, 7d or a date in UTC. Raises ValueError."""
    if not since:
        return 0.0
    ago = re.fullmatch(r"(\d+)([mhd])", since)
    if ago:
        return (datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})).timestamp()
    try:
        given = datetime.fromisoformat(since)
    except ValueError as error:
        raise ValueError(f"--since {since!r} is neither 90m, 12h, 7d nor a date like 2026-01-31") from error
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _line(row: dict[str, Any]) -> str:
    who = f"{row['who']} as {row['claimed']}" if row["claimed"] else row["who"]
    moved = f"{row['before'] or 'nothing'} -> {row['after']}" if row["after"] else ""
    why = "; ".join(part for part in (row["reason"], row["why"]) if part)
    parts = (
        row["time"],
        f"{who:<16}",
        f"{row['outcome']:<8}",
        row["action"],
        row["what"],
        moved,
        f"({why})" if why else "",
    )
    return "  ".join(part for part in parts if part)
