"""What alerts are made of: what was seen at one moment, and one thing that a rule fires for. The rules are alert_rules.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from deployments.telemetry.runs import RunView
from tasks.registry.served import Untrusting
from tasks.security.access_anomalies import Habits


@dataclass(frozen=True)
class Champion:
    """A champion, when it was last found good (deployed or revalidated), and what its newest revalidation said."""

    model: str
    since: float
    verdict: str = ""
    """Empty when there was none, or none that said anything."""
    why: str = ""


@dataclass(frozen=True)
class Seen:
    """What was seen at one moment. None is not known just now: then what fires goes on, and nothing new begins."""

    now: float
    runs: Sequence[RunView] = ()
    disk_free: int | None = None
    champions: Sequence[Champion] | None = None
    late: Sequence[Mapping[str, Any]] | None = None
    """Scheduled runs that did not start in time: `deployment`, `name`, `expected` in seconds since the epoch."""
    down: Sequence[Mapping[str, Any]] | None = None
    """Parts of the platform that do not run: `name`, `details`."""
    broken: Mapping[str, str] | None = None
    """Sources of events that are broken, and why."""
    anomalies: Mapping[str, Mapping[str, Any]] | None = None
    """Endpoints that do not answer as they did: `columns` with what moved in each, `model`."""
    tampered: Mapping[str, Mapping[str, Any]] | None = None
    """Models whose files are not what was signed, by reference: `said`."""
    untrusted: Sequence[Untrusting] | None = None
    """Endpoints whose model is signed by a key that does not count."""
    habits: Habits | None = None
    """Who read what, who was refused, and where each name was seen."""
    firing: frozenset[str] = frozenset()
    """Instances that fire already, as RULE/INSTANCE."""


@dataclass(frozen=True)
class Instance:
    """One thing that a rule fires for. `name` is the same as long as it is the same thing."""

    name: str
    summary: str
    details: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    url: str = ""


Found = list[Instance] | None


def clock(time: float) -> str:
    """A time for people."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
