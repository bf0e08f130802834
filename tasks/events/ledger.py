"""The ledger: every event that came, once, and what came of it; in `events/events.db` of the home.

What `receive` returned for is on disk: a kill loses nothing. An event is `accepted`, a `duplicate`, `refused` (with the reason),
or `poison` (a message that could not be read, several times). A flow run claims its batch with its first act, so a batch has one
run, however often it was started. Which events wait, and what a batch is, is batches.py; deciding which
events start what does not live here (deployments/bridge/dispatch.py).
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.common.process import locked, private_folder
from tasks.events.event import Event

# The ledger's database: its tables, and connections to it.
#
# A connection is kept by each thread: opening one for every event costs more than the event. A transaction is on disk
# when it is over (`synchronous = FULL`), and several processes may write: each waits for the other.


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
CREATE INDEX IF NOT EXISTS by_status ON events (status, number);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, trigger TEXT NOT NULL, subject TEXT NOT NULL, deployment TEXT NOT NULL, parameters TEXT NOT NULL,
    made REAL NOT NULL, started REAL, attempts INTEGER NOT NULL DEFAULT 0, seen TEXT, flow_run TEXT, claimed REAL, ended REAL,
    outcome TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS by_trigger ON batches (trigger, subject);
CREATE INDEX IF NOT EXISTS open_ones ON batches (made) WHERE ended IS NULL;
CREATE TABLE IF NOT EXISTS wanted (
    trigger TEXT NOT NULL, event INTEGER NOT NULL, PRIMARY KEY (trigger, event)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_event ON wanted (event);
CREATE TABLE IF NOT EXISTS covered (
    event INTEGER NOT NULL, trigger TEXT NOT NULL, batch TEXT NOT NULL, PRIMARY KEY (event, trigger)
);
CREATE INDEX IF NOT EXISTS by_batch ON covered (batch);
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, number INTEGER NOT NULL);
"""
"""events: `of` is the number of what a duplicate repeats, `became` the number of the event that a data.arrived ended in.
batches: `started` is when it was last sent, `seen` a flow run that was started for it, `flow_run` the one that has it.
wanted: events that a trigger wants and no batch covers yet. marks: the last event that a step has dealt with, by its name."""


class Database:
    """Connections to one database, one a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept = threading.local()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Read and write as one step, on disk afterwards: others wait meanwhile."""
        with self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read what is there at one moment; nobody waits."""
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        db: sqlite3.Connection | None = getattr(self._kept, "connection", None)
        if db is None:
            private_folder(self.path.parent)
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
            db.row_factory = sqlite3.Row
            # One process at a time makes the tables: SQLite does not wait for who changes the journal's mode.
            with locked(self.path.with_suffix(".lock")):
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
                for statement in filter(str.strip, SCHEMA.split(";")):
                    db.execute(statement)
            self._kept.connection = db
        db.execute(begin)
        try:
            yield db
        except BaseException:
            if db.in_transaction:  # SQLite ends it by itself when the disk is full
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")


Status = Literal["accepted", "duplicate", "refused", "poison"]
LONGEST = 2048
"""Characters kept of what a refused one claimed."""


class Receipt(NamedTuple):
    """What became of an event that was handed in."""

    number: int
    status: Status
    of: int | None = None
    """Of a duplicate: the number of the event that it repeats."""


class Ledger:
    """The ledger of a home. Every call is one transaction, and may be made by several processes and threads at once."""

    def __init__(self, home: Path) -> None:
        self._database = Database(home / "events" / "events.db")

    @property
    def path(self) -> Path:
        return self._database.path

    def receive(self, event: Event, *, now: float | None = None) -> Receipt:
        """Take an event in, once."""
        return self.receive_all([event], now=now)[0]

    def receive_all(
        self,
        events: Sequence[Event],
        *,
        now: float | None = None,
        first: Callable[[sqlite3.Connection], None] | None = None,
    ) -> list[Receipt]:
        """Take several events in, in one transaction: all of them are on disk afterwards, or none.

        `first` is done before them in the same transaction; what it raises keeps all of them out. Raises sqlite3.Error when they
        cannot be kept: then the sender must keep them.
        """
        received = time.time() if now is None else now
        with self.transaction() as db:
            if first:
                first(db)
            receipts = []
            for event in events:
                known = _known(db, event)
                status: Status = "accepted" if known is None else "duplicate"
                row: dict[str, Any] = {**event.model_dump(exclude={"data"}), "data": json.dumps(event.data)}
                number = _insert(db, {**row, "received": received, "status": status, "of": known})
                receipts.append(Receipt(number, status, known))
            return receipts

    def knows(self, event: Event) -> bool:
        """Whether an event was taken in before: for who tells of something that another part may have told of."""
        with self.snapshot() as db:
            return _known(db, event) is not None

    def refuse(
        self, channel: str, reason: str, *, source: str = "", identity: str = "", about: str = "", poison: bool = False
    ) -> int:
        """Note something that was not taken in, and why; returns its number. `about` is what it claimed to be about."""
        row = {
            "received": time.time(),
            "channel": channel,
            "status": "poison" if poison else "refused",
            "reason": reason[:LONGEST],
            "subject": about[:LONGEST],
            "source": source[:LONGEST],
            "identity": identity[:LONGEST],
        }
        with self.transaction() as db:
            return _insert(db, row)

    def claim(self, batch: str, flow_run: str) -> str | None:
        """Have a flow run take a batch, unless another one has; returns the id of the flow run that has it now.

        None when there is no such batch. One that was over before any flow run took it is not given away any more: then it is the
        flow run that ended it, or `ended`.
        """
        with self.transaction() as db:
            db.execute(
                "UPDATE batches SET flow_run = ?, claimed = ? WHERE id = ? AND flow_run IS NULL AND ended IS NULL",
                (flow_run, time.time(), batch),
            )
            result = db.execute("SELECT flow_run, seen FROM batches WHERE id = ?", (batch,)).fetchone()
            return None if result is None else str(result["flow_run"] or result["seen"] or "ended")

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Read and write as one step: others wait meanwhile."""
        return self._database.transaction()

    def snapshot(self) -> AbstractContextManager[sqlite3.Connection]:
        """Read what is there at one moment."""
        return self._database.snapshot()


def _insert(db: sqlite3.Connection, row: dict[str, Any]) -> int:
    names = ", ".join(f'"{name}"' for name in row)
    done = db.execute(f"INSERT INTO events ({names}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))
    return int(done.lastrowid or 0)


def _known(db: sqlite3.Connection, event: Event) -> int | None:
    """The accepted event that this one repeats."""
    first = db.execute(
        "SELECT number FROM events WHERE status = 'accepted' AND source = ? AND identity = ?",
        (event.source, event.identity),
    ).fetchone()
    if first is None and event.object:
        first = db.execute(
            "SELECT number FROM events WHERE status = 'accepted' AND object <> '' AND name = ? AND object = ?",
            (event.name, event.object),
        ).fetchone()
    return int(first["number"]) if first else None
