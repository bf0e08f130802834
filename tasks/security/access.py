"""Who read what: one line for every read of an artifact's files, in a file a day below the home. No contents, and no chain.

Reads are many, so they are not in the audit log (audit.py), which tells what changed and who was refused. What is unusual about
who reads, and who is refused, is told by three rules over what was seen of each name. deployments/watch/alerts.py follows both
logs and remembers; deployments/telemetry/alert_rules.py makes alerts of it. See docs/audit.md.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.common.process import append
from tasks.security.audit import Entry, account, actor

HOUR = 3600.0
KNOWN_HOURS = 5
"""Hours with reads that a name must have had before its usual hour counts."""
KEPT_HOURS = 30 * 24
"""Hours that the usual one is the median of: thirty days."""
LEAST_BYTES = 1e9
"""Less in an hour is never many times the usual."""


@dataclass(frozen=True)
class Read:
    """One read of one name."""

    time: float
    ref: str
    bytes: int


@dataclass(frozen=True)
class Denial:
    """One refusal: the name that was claimed, or that acted, and where from."""

    time: float
    name: str
    place: str


@dataclass
class Habits:
    """What was seen so far. State: only what the rules need."""

    denials: list[Denial] = field(default_factory=list)
    reads: dict[str, list[Read]] = field(default_factory=dict)
    """By name, of the last hour."""
    hours: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bytes by name and hour since 1970."""
    places: dict[str, dict[str, float]] = field(default_factory=dict)
    """By name, ACCOUNT@HOST and when it was first seen."""

    def take_entry(self, entry: Entry) -> None:
        """An entry of the audit log: one that was refused tells nothing of where a name belongs, nor one without an account.

        Nor does one of somebody unknown.
        """
        account = entry.account or (entry.who if entry.identity == "account" else "")
        place = f"{account}@{entry.host}"
        if entry.outcome == "refused":
            self.denials.append(Denial(entry.time, entry.claimed or entry.who, place))
        elif account and entry.host and entry.identity != "unknown":
            self._was_at(entry.who, place, entry.time)

    def take_read(self, read: Access) -> None:
        """A line of the access log."""
        self._was_at(read.who, f"{read.account or read.who}@{read.host}", read.time)
        self.reads.setdefault(read.who, []).append(Read(read.time, read.ref, read.bytes))
        hours = self.hours.setdefault(read.who, {})
        hours[int(read.time // HOUR)] = hours.get(int(read.time // HOUR), 0) + read.bytes

    def forget(self, now: float, *, denials_minutes: float) -> None:
        """Drop what no rule looks at any more."""
        self.denials = [one for one in self.denials if now - one.time < denials_minutes * 60]
        self.reads = {
            name: kept for name, all_ in self.reads.items() if (kept := [one for one in all_ if now - one.time < HOUR])
        }
        first = int(now // HOUR) - KEPT_HOURS
        self.hours = {
            name: {hour: size for hour, size in hours.items() if hour > first} for name, hours in self.hours.items()
        }

    def _was_at(self, name: str, place: str, time: float) -> None:
        seen = self.places.setdefault(name, {})
        seen[place] = min(time, seen.get(place, time))


@dataclass(frozen=True)
class Unusual:
    """One thing that is unusual. `name` is the same as long as it is the same thing."""

    name: str
    summary: str
    details: str
    labels: Mapping[str, str]


def many_denials(habits: Habits, now: float, *, most: int, minutes: float) -> list[Unusual]:
    """Names that were refused `most` times within so many minutes; and places where several names together were."""
    recent = [one for one in habits.denials if 0 <= now - one.time < minutes * 60]
    names = Counter(one.name for one in recent)
    last = {one.name: one.place for one in recent}
    results = [
        _denied(name, times, minutes, f"last from {last[name]}", {"person": name})
        for name, times in names.items()
        if times >= most
    ]
    places: dict[str, list[str]] = defaultdict(list)
    for one in recent:
        if names[one.name] < most:
            places[one.place].append(one.name)
    return results + [
        _denied(place, len(claimed), minutes, f"claimed were {', '.join(sorted(set(claimed))[:10])}", {"place": place})
        for place, claimed in places.items()
        if len(claimed) >= most
    ]


def bulk_downloads(
    habits: Habits, now: float, *, most_gb: float, most_artifacts: int, times_usual: float
) -> list[Unusual]:
    """Names that read very much within an hour: above a limit, or many times what an hour of theirs usually comes to."""
    results = []
    for name, reads in habits.reads.items():
        recent = [one for one in reads if 0 <= now - one.time < HOUR]
        size, artifacts = sum(one.bytes for one in recent), len({one.ref for one in recent})
        # Median of the hours with reads, without the one that is looked at; None when there are too few.
        hours = habits.hours.get(name, {})
        before = int(now // HOUR) - 1
        known = [size for hour, size in hours.items() if hour < before]
        usual = float(median(known)) if len(known) >= KNOWN_HOURS else None
        over = usual is not None and size > max(times_usual * usual, LEAST_BYTES)
        if size > most_gb * 1e9 or artifacts > most_artifacts or over:
            than = f"; an hour of {name} usually comes to {usual / 1e9:.2f} GB" if usual is not None else ""
            text = f"{size / 1e9:.2f} GB of {artifacts} artifacts within an hour{than}"
            results.append(Unusual(name, f"{name} reads unusually much", text, {"person": name}))
    return results


def new_places(habits: Habits, now: float, *, hours: float) -> list[Unusual]:
    """Accounts and hosts that a name was first seen at within so many hours, and later than somewhere else."""
    results = []
    for name, places in habits.places.items():
        first = min(places.values())
        for place, since in places.items():
            if first < since and 0 <= now - since < hours * HOUR:
                others = ", ".join(sorted(other for other, time in places.items() if time < since)[:5])
                summary = f"{name} was seen at a new place, {place}"
                results.append(
                    Unusual(f"{name}.{place}", summary, f"before: {others}", {"person": name, "place": place})
                )
    return results


def _denied(name: str, times: int, minutes: float, details: str, labels: Mapping[str, str]) -> Unusual:
    return Unusual(name, f"{name} was refused {times} times within {minutes:g} minutes", details, labels)


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
        first = _day(now - timedelta(days=KEPT_DAYS).total_seconds())
        for old in path.parent.glob("????-??-??.jsonl"):
            if old.stem < first:
                old.unlink(missing_ok=True)
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
