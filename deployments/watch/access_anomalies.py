"""Follows the audit log and the access log, and remembers what the rules about the unusual need: platform/habits.json.

The rules are tasks/security/access_anomalies.py; they become alerts in deployments/telemetry/alert_rules.py. How far it has read
is written together with what it read, so a killed watch counts nothing twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from deployments.configuration.platform import AlertsConfig
from tasks.common import process
from tasks.security import access, audit_chain
from tasks.security.access_anomalies import Habits
from tasks.security.audit import Entry
from tasks.storage import open_store


@dataclass
class Followed:
    """How far both logs were read, and what came of it."""

    entry: int = 0
    """Number of the newest entry of the audit log."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file of the access log."""
    habits: Habits = field(default_factory=Habits)


_KEPT = TypeAdapter(Followed)


class Follower:
    """State: what was followed so far, as the file has it."""

    def __init__(self, home: Path, limits: AlertsConfig) -> None:
        self.home, self._limits = home, limits
        self._path = home / "platform" / "habits.json"
        self._kept = _read(self._path)

    def look(self, now: float) -> Habits:
        """Read on, and what is known then. Raises what the store raises while it is away."""
        before = asdict(self._kept)
        self._read_entries()
        self._read_files()
        self._kept.habits.forget(now, denials_minutes=self._limits.denials_minutes)
        if asdict(self._kept) != before:
            process.write_json(self._path, asdict(self._kept))
        return self._kept.habits

    def _read_entries(self) -> None:
        store = open_store(self.home)
        newest = audit_chain.newest(store).number
        found = list(audit_chain.between(store, self._kept.entry, newest))
        for link, data in found:
            try:
                self._kept.habits.take_entry(Entry.model_validate({**json.loads(data), "number": link.number}))
            except (ValueError, TypeError):
                continue  # `headway audit-log --verify` names it
        self._kept.entry = newest

    def _read_files(self) -> None:
        there = access.days(self.home)
        for path in there:
            with open(path, "rb") as file:
                file.seek(self._kept.files.get(path.name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            for read in access.lines(whole):
                self._kept.habits.take_read(read)
            self._kept.files[path.name] = self._kept.files.get(path.name, 0) + len(whole)
        self._kept.files = {path.name: self._kept.files[path.name] for path in there}


def _read(path: Path) -> Followed:
    """What was kept; of an odd file nothing: both logs are read again from their beginning."""
    try:
        return _KEPT.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Followed()
