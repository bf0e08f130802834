"""Who read what: one line for every read of an artifact's files, in a file a day below the home. No contents, and no chain.

Reads are many, so they are not in the audit log (audit.py), which tells what changed and who was refused. What is unusual about
them is access_anomalies.py. See docs/audit.md.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.common.process import append
from tasks.security.audit import account, actor

FOLDER = "access"
KEPT_DAYS = 90


class Access(BaseModel):
    """One line."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    """Seconds since 1970, UTC."""
    who: str
    identity: str = "account"
    host: str = ""
    account: str = ""
    what: str
    """What it was read for: a stage, verify, copy, backup."""
    ref: str
    bytes: int = 0


def note_access(home: Path, ref: str, *, bytes: int, what: str) -> None:
    """Write down that whoever acts now reads an artifact. The first line of a day ends days that are too old."""
    now, who = time.time(), actor()
    line = Access(
        time=now,
        who=who.name,
        identity=who.identity,
        host=socket.gethostname(),
        account=account(),
        what=what,
        ref=ref,
        bytes=bytes,
    )
    path = home / FOLDER / f"{_day(now)}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_old(path.parent, now)
    append(path, line.model_dump_json().encode() + b"\n")


def accesses(home: Path) -> Iterator[Access]:
    """All reads that are kept, newest first."""
    for path in reversed(days(home)):
        yield from reversed(list(lines(path.read_bytes())))


def days(home: Path) -> list[Path]:
    """The files, oldest first."""
    return sorted((home / FOLDER).glob("????-??-??.jsonl"))


def lines(data: bytes) -> Iterator[Access]:
    """The reads that some lines tell of; a line that a full disk cut short is passed over."""
    for line in data.splitlines():
        try:
            yield Access.model_validate(json.loads(line))
        except (ValueError, ValidationError):
            continue


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).date().isoformat()


def _end_old(folder: Path, now: float) -> None:
    first = _day(now - timedelta(days=KEPT_DAYS).total_seconds())
    for path in folder.glob("????-??-??.jsonl"):
        if path.stem < first:
            path.unlink(missing_ok=True)
