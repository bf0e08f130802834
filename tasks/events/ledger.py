"""The ledger: every event that came, once, and what came of it; in `events/events.db` of the home (SQLite, WAL).

What `receive` returned for is on disk: a kill loses nothing. An event is `accepted`, a `duplicate`, `refused` (with the reason),
or `poison` (a message that could not be read, several times). A batch is what one start of a flow covers: all events of a trigger
that wait. A flow run claims its batch with its first act, so a batch has one run, however often it was started. Deciding which
events start what does not live here (deployments/bridge/dispatch.py).
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.events.event import Event

Status = Literal["accepted", "duplicate", "refused", "poison"]
BUSY_SECONDS = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, received REAL NOT NULL, channel TEXT NOT NULL, status TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '', of INTEGER, became INTEGER,
    name TEXT, subject TEXT, source TEXT, identity TEXT, object TEXT, occurred REAL, data TEXT NOT NULL DEFAULT '{}'
);
CREATE UNIQUE INDEX IF NOT EXISTS one_identity ON events (source, identity) WHERE status = 'accepted';
CREATE UNIQUE INDEX IF NOT EXISTS one_object ON events (name, object) WHERE status = 'accepted' AND object <> '';
CREATE INDEX IF NOT EXISTS by_name ON events (name, status, became);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, trigger TEXT NOT NULL, subject TEXT NOT NULL, deployment TEXT NOT NULL, parameters TEXT NOT NULL,
    made REAL NOT NULL, started REAL, attempts INTEGER NOT NULL DEFAULT 0, flow_run TEXT, claimed REAL, ended REAL,
    outcome TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS covered (
    event INTEGER NOT NULL, trigger TEXT NOT NULL, batch TEXT NOT NULL, PRIMARY KEY (event, trigger)
);
"""


class Receipt(NamedTuple):
    """What became of an event that was handed in."""

    number: int
    status: Status
    of: int | None = None
    """Of a duplicate: the number of the event that it repeats."""


class Ledger:
    """The ledger of a home. Every call is one transaction, and may be made by several processes at once."""

    def __init__(self, home: Path) -> None:
        self.path = home / "events" / "events.db"

    def receive(self, event: Event, *, now: float | None = None) -> Receipt:
        """Take an event in, once."""
        return self.receive_all([event], now=now)[0]

    def receive_all(self, events: Sequence[Event], *, now: float | None = None) -> list[Receipt]:
        """Take several events in, in one transaction: all of them are on disk afterwards, or none."""
        received = time.time() if now is None else now
        with self.transaction() as db:
            return [_receive(db, event, received) for event in events]

    def refuse(
        self, channel: str, reason: str, *, source: str = "", identity: str = "", about: str = "", poison: bool = False
    ) -> int:
        """Note something that was not taken in, and why; returns its number. `about` is what it claimed to be about."""
        values = (
            time.time(),
            channel,
            "poison" if poison else "refused",
            reason,
            about[:2048],
            source[:2048],
            identity[:2048],
        )
        columns = "received, channel, status, reason, subject, source, identity"
        with self.transaction() as db:
            return int(
                db.execute(f"INSERT INTO events ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values).lastrowid or 0
            )

    def claim(self, batch: str, flow_run: str) -> str | None:
        """Have a flow run take a batch, unless another one has; returns the id of the flow run that has it now.

        None when there is no such batch.
        """
        with self.transaction() as db:
            db.execute(
                "UPDATE batches SET flow_run = ?, claimed = ? WHERE id = ? AND flow_run IS NULL",
                (flow_run, time.time(), batch),
            )
            found = db.execute("SELECT flow_run FROM batches WHERE id = ?", (batch,)).fetchone()
            return str(found["flow_run"]) if found else None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Read and write as one step: others wait meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            _create(db)
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")
        finally:
            db.close()


def _create(db: sqlite3.Connection) -> None:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'covered'").fetchone():
        for statement in _statements():
            db.execute(statement)


def _statements() -> Iterable[str]:
    return (part for part in SCHEMA.split(";") if part.strip())


def _receive(db: sqlite3.Connection, event: Event, received: float) -> Receipt:
    known = _known(db, event)
    status: Status = "duplicate" if known is not None else "accepted"
    row: dict[str, Any] = {
        **event.model_dump(exclude={"data"}),
        "data": json.dumps(event.data),
        "received": received,
        "status": status,
        "of": known,
    }
    names = ", ".join(f'"{name}"' for name in row)
    done = db.execute(f"INSERT INTO events ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    return Receipt(int(done.lastrowid or 0), status, known)


def _known(db: sqlite3.Connection, event: Event) -> int | None:
    """The accepted event that this one repeats."""
    found = db.execute(
        "SELECT number FROM events WHERE status = 'accepted' AND ((source = ? AND identity = ?) OR (name = ? AND object = ?"
        " AND object <> '')) ORDER BY number LIMIT 1",
        (event.source, event.identity, event.name, event.object),
    ).fetchone()
    return int(found["number"]) if found else None
