"""What the ledger tells people: each event with what came of it, as plain values. It is shown by
deployments/cli/operations/events.py."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.events.batches import ROUTED, held, mark
from tasks.events.ledger import Ledger

BATCHES = "SELECT b.* FROM covered c JOIN batches b ON b.id = c.batch WHERE c.event = ? ORDER BY b.made, b.rowid"


@dataclass(frozen=True)
class Now:
    """What is known of the triggers at this moment, beside the ledger."""

    time: float
    cooldowns: Mapping[str, float]
    """Of each trigger, its cool-down in seconds."""
    kept: Callable[[str], str]
    """Why a trigger starts nothing at all now; empty when it does."""


def told(ledger: Ledger, now: Now, *, limit: int, after: int = 0) -> list[dict[str, Any]]:
    """The newest events with a number above `after`, oldest first. Times are seconds since the epoch."""
    if not ledger.path.exists():
        return []
    with ledger.snapshot() as db:
        query = "SELECT * FROM events WHERE number > ? ORDER BY number DESC LIMIT ?"
        rows = db.execute(query, (after, limit)).fetchall()
        routed = mark(db, ROUTED)
        return [_told(db, row, now, looked_at=row["number"] <= routed) for row in reversed(rows)]


def _told(db: sqlite3.Connection, row: sqlite3.Row, now: Now, *, looked_at: bool) -> dict[str, Any]:
    # The event that it ended in: files that arrived become a version of a dataset.
    became: sqlite3.Row | None = db.execute("SELECT * FROM events WHERE number = ?", (row["became"],)).fetchone()
    numbers = [row["number"], *([became["number"]] if became else [])]
    same = (
        "number",
        "received",
        "occurred",
        "channel",
        "name",
        "subject",
        "object",
        "source",
        "identity",
        "status",
        "reason",
    )
    return {
        **{name: row[name] for name in same},
        "duplicate_of": row["of"],
        "became": became["object"] if became else None,
        "batches": [_batch(batch) for number in numbers for batch in db.execute(BATCHES, (number,)).fetchall()],
        "waits": [one for number in numbers for one in _waits(db, number, now)],
        "looked_at": looked_at,
    }


def _batch(row: sqlite3.Row) -> dict[str, Any]:
    kept = ("id", "trigger", "deployment", "outcome")
    state = "ended" if row["ended"] else "running" if row["flow_run"] else "starting"
    return {**{name: row[name] for name in kept}, "flow_run": row["flow_run"] or row["seen"], "state": state}


def _waits(db: sqlite3.Connection, number: int, now: Now) -> Sequence[dict[str, Any]]:
    """Each trigger that it waits for, and why."""
    query = "SELECT w.trigger, e.subject FROM wanted w JOIN events e ON e.number = w.event WHERE w.event = ?"
    results = []
    for row in db.execute(query, (number,)).fetchall():
        kept, trigger = now.kept(row["trigger"]), row["trigger"]
        why = held(db, trigger, row["subject"], now.cooldowns.get(trigger, 0.0), now.time)
        until = why.until if why and not kept else None
        results.append({"trigger": trigger, "why": kept or (why.why if why else "about to start"), "until": until})
    return results
