"""Which events wait for which trigger, and the batches that cover them. Each function is one transaction of the ledger.

An event is given to the triggers that want it once, in the order in which events came (`route`). A batch is made of all that
wait for a trigger about one subject; then they are covered, and by no second batch of that trigger. Nothing of Prefect's here.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tasks.events.ledger import Ledger

ROUTED = "routed"
KEEP_ACCEPTED, KEEP_OTHERS = 100_000, 20_000
"""Events kept; of the others, which strangers can send in any number, fewer, and never in the place of accepted ones."""
PRUNED_AT_ONCE = 5_000
UNFINISHED = """
    EXISTS (SELECT 1 FROM wanted w WHERE w.event = e.number)
    OR EXISTS (SELECT 1 FROM covered c JOIN batches b ON b.id = c.batch WHERE c.event = e.number AND b.ended IS NULL)
    OR (e.status = 'accepted' AND e.name IS 'data.arrived' AND e.became IS NULL)
    OR (e.status = 'accepted' AND e.number > (SELECT COALESCE(MAX(number), 0) FROM marks WHERE name = 'routed'))
"""


@dataclass(frozen=True)
class Batch:
    """What one start of a flow covers."""

    id: str
    trigger: str
    subject: str
    deployment: str
    dataset: str
    made: float
    started: float | None
    """When it was last sent; None: never."""
    attempts: int
    seen: str | None
    flow_run: str | None
    """The flow run that claimed it."""


class Held(NamedTuple):
    """Why events go on waiting."""

    why: Literal["run in progress", "cool-down"]
    until: float | None = None
    """When the cool-down is over, in seconds since the epoch."""


Row = sqlite3.Row


def route(ledger: Ledger, wanted_by: Callable[[str, str], Collection[str]], triggers: Collection[str]) -> None:
    """Have each new event wait for the triggers that want it, by its name and subject. `triggers` are all that there are.

    What waited for one that is gone, or has other settings now, waits for those that want it instead.
    """
    with ledger.snapshot() as db:
        if not (_newest(db) > mark(db, ROUTED) or _orphans(db, triggers)):
            return
    with ledger.transaction() as db:
        newest = _newest(db)
        fresh = "SELECT number, name, subject FROM events WHERE status = 'accepted' AND number > ? ORDER BY number"
        for row in db.execute(fresh, (mark(db, ROUTED),)).fetchall():
            pairs = [(trigger, row["number"]) for trigger in wanted_by(row["name"], row["subject"])]
            db.executemany("INSERT OR IGNORE INTO wanted (trigger, event) VALUES (?, ?)", pairs)
        for gone in _orphans(db, triggers):
            # Have what waits for one trigger wait for all others that want it and have not covered it
            waits = "SELECT e.number, e.name, e.subject FROM wanted w JOIN events e ON e.number = w.event WHERE w.trigger = ?"
            uncovered = "SELECT ?1, ?2 WHERE NOT EXISTS (SELECT 1 FROM covered WHERE trigger = ?1 AND event = ?2)"
            for row in db.execute(waits, (gone,)).fetchall():
                pairs = [(trigger, row["number"]) for trigger in wanted_by(row["name"], row["subject"])]
                db.executemany(f"INSERT OR IGNORE INTO wanted (trigger, event) {uncovered}", pairs)
            db.execute("DELETE FROM wanted WHERE trigger = ?", (gone,))
        set_mark(db, ROUTED, newest)


def waiting(ledger: Ledger) -> list[tuple[str, str]]:
    """Each trigger and subject for which events wait."""
    with ledger.snapshot() as db:
        rows = db.execute("SELECT DISTINCT w.trigger, e.subject FROM wanted w JOIN events e ON e.number = w.event")
        return [(row["trigger"], row["subject"]) for row in rows.fetchall()]


def make_batch(
    ledger: Ledger,
    trigger: str,
    subject: str,
    *,
    deployment: str,
    dataset: Callable[[Row], str],
    cooldown: float,
    now: float,
) -> Batch | None:
    """Cover all events that wait for a trigger about a subject with one batch.

    None while a batch of them is open, or the last one was made less than `cooldown` seconds ago. The event that occurred last
    decides the dataset.
    """
    with ledger.transaction() as db:
        if held(db, trigger, subject, cooldown, now):
            return None
        chosen = (
            "SELECT e.* FROM wanted w JOIN events e ON e.number = w.event WHERE w.trigger = ? AND e.subject = ? "
            "ORDER BY e.occurred, e.number"
        )
        rows = db.execute(chosen, (trigger, subject)).fetchall()
        if not rows:
            return None
        numbers = [row["number"] for row in rows]
        identity = f"events-{max(numbers)}-{secrets.token_hex(4)}"
        text = json.dumps({"dataset": dataset(rows[-1])})
        db.execute(
            "INSERT INTO batches (id, trigger, subject, deployment, parameters, made) VALUES (?, ?, ?, ?, ?, ?)",
            (identity, trigger, subject, deployment, text, now),
        )
        db.executemany(
            "INSERT INTO covered (event, trigger, batch) VALUES (?, ?, ?)",
            [(number, trigger, identity) for number in numbers],
        )
        db.executemany("DELETE FROM wanted WHERE trigger = ? AND event = ?", [(trigger, n) for n in numbers])
        return _batch(db.execute("SELECT * FROM batches WHERE id = ?", (identity,)).fetchone())


def held(db: sqlite3.Connection, trigger: str, subject: str, cooldown: float, now: float) -> Held | None:
    """Why no batch may be made now; None when one may."""
    last = db.execute(
        "SELECT made, ended FROM batches WHERE trigger = ? AND subject = ? ORDER BY rowid DESC LIMIT 1",
        (trigger, subject),
    ).fetchone()
    if last is None:
        return None
    if last["ended"] is None:
        return Held("run in progress")
    return Held("cool-down", last["made"] + cooldown) if 0 <= now - last["made"] < cooldown else None


def open_batches(ledger: Ledger) -> list[Batch]:
    """Batches whose flow run has not ended, oldest first."""
    with ledger.snapshot() as db:
        return [_batch(row) for row in db.execute("SELECT * FROM batches WHERE ended IS NULL ORDER BY made").fetchall()]


def events_of(ledger: Ledger, batch: str) -> list[Row]:
    """The events that a batch covers, in the order in which they came."""
    with ledger.snapshot() as db:
        query = "SELECT e.* FROM covered c JOIN events e ON e.number = c.event WHERE c.batch = ? ORDER BY e.number"
        return db.execute(query, (batch,)).fetchall()


def note_sent(ledger: Ledger, batch: Batch, now: float) -> None:
    """A batch was sent to Prefect, once more."""
    with ledger.transaction() as db:
        db.execute("UPDATE batches SET started = ?, attempts = attempts + 1 WHERE id = ?", (now, batch.id))


def note_seen(ledger: Ledger, batch: Batch, flow_run: str) -> None:
    """Prefect has a flow run for a batch; it has not claimed it yet."""
    with ledger.transaction() as db:
        db.execute("UPDATE batches SET seen = ? WHERE id = ?", (flow_run, batch.id))


def note_ended(ledger: Ledger, batch: Batch, outcome: str, now: float) -> None:
    """The flow run of a batch has ended. One that was claimed since `batch` was read, by another flow run, stays open."""
    with ledger.transaction() as db:
        db.execute(
            "UPDATE batches SET ended = ?, outcome = ? WHERE id = ? AND ended IS NULL AND flow_run IS ?",
            (now, outcome, batch.id, batch.flow_run),
        )


def prune(ledger: Ledger, *, accepted: int = KEEP_ACCEPTED, others: int = KEEP_OTHERS) -> int:
    """Forget the oldest finished events beyond so many, and what belongs to them; returns how many.

    Never one that waits, that an open batch covers, or that was not looked at yet.
    """
    gone = 0
    for which, keep in (("= 'accepted'", accepted), ("<> 'accepted'", others)):
        with ledger.transaction() as db:
            oldest = db.execute(
                f"SELECT number FROM events WHERE status {which} ORDER BY number DESC LIMIT 1 OFFSET ?", (keep,)
            ).fetchone()
            if oldest is None:
                continue
            result = db.execute(
                f"SELECT number FROM events e WHERE e.status {which} AND e.number <= ? AND NOT ({UNFINISHED}) LIMIT ?",
                (oldest["number"], PRUNED_AT_ONCE),
            ).fetchall()
            numbers = [(row["number"],) for row in result]
            db.executemany("DELETE FROM events WHERE number = ?", numbers)
            db.executemany("DELETE FROM covered WHERE event = ?", numbers)
            db.execute(
                "DELETE FROM batches WHERE ended IS NOT NULL AND NOT EXISTS (SELECT 1 FROM covered WHERE batch = batches.id)"
            )
            gone += len(numbers)
    return gone


def mark(db: sqlite3.Connection, name: str) -> int:
    """The last event that a step has dealt with."""
    result = db.execute("SELECT number FROM marks WHERE name = ?", (name,)).fetchone()
    return int(result["number"]) if result else 0


def set_mark(db: sqlite3.Connection, name: str, number: int) -> None:
    db.execute("INSERT OR REPLACE INTO marks (name, number) VALUES (?, ?)", (name, number))


def _newest(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT COALESCE(MAX(number), 0) AS newest FROM events").fetchone()["newest"])


def _orphans(db: sqlite3.Connection, triggers: Collection[str]) -> Sequence[str]:
    result = db.execute("SELECT DISTINCT trigger FROM wanted").fetchall()
    return [row["trigger"] for row in result if row["trigger"] not in triggers]


def _batch(row: Any) -> Batch:
    payload = json.loads(row["parameters"])
    kept = ("id", "trigger", "subject", "deployment", "made", "started", "attempts", "seen", "flow_run")
    return Batch(dataset=payload["dataset"], **{name: row[name] for name in kept})


# What the ledger tells people: each event with what came of it, as plain values. It is shown by
# deployments/cli/operations/events.py.


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
        "batches": [_listing_batch(batch) for number in numbers for batch in db.execute(BATCHES, (number,)).fetchall()],
        "waits": [one for number in numbers for one in _waits(db, number, now)],
        "looked_at": looked_at,
    }


def _listing_batch(row: sqlite3.Row) -> dict[str, Any]:
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
