"""What telemetry must not forget: how far each exporter got, and the totals that only grow. One SQLite file in telemetry/.

A total and the position up to which events were counted move in one transaction, so a kill at any moment counts nothing twice.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = """
create table if not exists position (reader text, item text, at integer, primary key (reader, item)) without rowid;
create table if not exists total (metric text, labels text, part text, value real, primary key (metric, labels, part))
    without rowid;
create table if not exists note (name text primary key, value text) without rowid;
"""
Key = tuple[str, tuple[str, ...], str]
"""Name of the metric, its labels' values, and the part: empty for a counter; of a histogram `sum` and the buckets' numbers."""


class Ledger:
    """State: the open database, and all of it in memory."""

    def __init__(self, path: Path) -> None:
        self._database = _open(path)
        self._positions: dict[str, dict[str, int]] = {}
        for reader, item, at in self._database.execute("select reader, item, at from position"):
            self._positions.setdefault(reader, {})[item] = at
        rows = self._database.execute("select metric, labels, part, value from total")
        self.totals: dict[Key, float] = {(m, tuple(json.loads(ls)), p): v for m, ls, p, v in rows}

    def positions(self, reader: str) -> Mapping[str, int]:
        """How far a reader got, by item. A reader that never read has none."""
        return self._positions.get(reader, {})

    def advance(self, reader: str, to: Mapping[str, int], add: Mapping[Key, float] | None = None) -> None:
        """Move a reader on, and add to totals, both or neither."""
        sums = {key: self.totals.get(key, 0.0) + value for key, value in (add or {}).items()}
        if not to and not sums:
            return
        with self._database as database:
            rows = [(reader, item, at) for item, at in to.items()]
            database.executemany("insert or replace into position values (?, ?, ?)", rows)
            kept = [(metric, json.dumps(labels), part, value) for (metric, labels, part), value in sums.items()]
            database.executemany("insert or replace into total values (?, ?, ?, ?)", kept)
        self._positions.setdefault(reader, {}).update(to)
        self.totals.update(sums)

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        with self._database as database:
            database.execute("insert or replace into note values (?, ?)", (name, json.dumps(value)))

    def noted(self, name: str) -> Any:
        """The value that was kept under a name; None when there is none."""
        row = self._database.execute("select value from note where name = ?", (name,)).fetchone()
        return json.loads(row[0]) if row else None


def _open(path: Path) -> sqlite3.Connection:
    """Open the ledger. One that is damaged is put aside: everything is read again then, and sent again under the same ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _connect(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # locked, or the disk is full: it is not damaged
            raise
        logging.warning("%s is damaged (%s) and was put aside as %s.damaged", path, error, path.name)
        path.replace(path.with_name(f"{path.name}.damaged"))
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=10)
    try:
        database.executescript(SCHEMA)
        output = database.execute("pragma quick_check").fetchone()[0]
        if output != "ok":
            raise sqlite3.DatabaseError(output)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database
