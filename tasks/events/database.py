"""The ledger's database: its tables, and connections to it. What they mean is ledger.py; SQLite in WAL mode, `events/events.db`.

A connection is kept by each thread: opening one for every event costs more than the event. A transaction is on disk when it is
over (`synchronous = FULL`), and several processes may write: each waits for the other.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common.process import locked

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
        db = self._connection()
        db.execute(begin)
        try:
            yield db
        except BaseException:
            if db.in_transaction:  # SQLite ends it by itself when the disk is full
                db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")

    def _connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._kept, "connection", None)
        if found is None:
            found = self._kept.connection = _open(self.path)
        return found


def _open(path: Path) -> sqlite3.Connection:
    """A connection whose tables are there. One process at a time: SQLite does not wait for who changes the journal's mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    db.row_factory = sqlite3.Row
    with locked(path.with_suffix(".lock")):
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        for statement in filter(str.strip, SCHEMA.split(";")):
            db.execute(statement)
    return db
