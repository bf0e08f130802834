"""Alerts: what fires is found at every look, kept in platform/alerts.json, told once when it begins and once when it ends.

The rules are deployments/telemetry/alert_rules.py. Telling is an event (alert_events.py) that goes into an outbox in the same
file, in the same write, and out of it when it was taken. So a killed watch tells nothing twice, and nothing gets lost while
Prefect is away.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from deployments.configuration.platform import AlertsConfig, PlatformConfig
from deployments.services import bridge, mlflow_server, prefect_server, worker
from deployments.telemetry.alert_rules import RULES, Champion, Instance, Rule, Seen
from deployments.telemetry.host import free_room
from deployments.telemetry.runs import Runs, read_object
from deployments.watch.alert_events import event_of, send
from tasks.common import process
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact_value
from tasks.registry.model_integrity import standing, untrusted_endpoints
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, last_revalidated, revalidations
from tasks.security import access, audit_chain
from tasks.security.access_anomalies import Habits
from tasks.security.audit import Entry
from tasks.serving.monitor.watch import standing_anomalies
from tasks.storage import open_store
from tasks.storage.store import Store

# Who is asked for what alerts want to know beside run folders: Prefect for schedules, the folders of the platform's
# parts.


def platform_sources(home: Path, config: PlatformConfig) -> Sources:
    """The sources of a home whose environment is that of `prefect_server.prepare`."""
    from deployments.watch.schedules import Schedules  # Prefect takes a second, and rules of alerts need none of it

    schedules = Schedules(home, config)

    def late(now: float) -> Sequence[Mapping[str, Any]]:
        with prefect_server.client() as client:
            return [asdict(run) for run in schedules.late_runs(client, now)]

    return Sources(late=late, down=lambda: parts_down(home), broken=lambda: bridge.problems(home))


def parts_down(home: Path) -> list[dict[str, str]]:
    """Parts that do not run or do not answer, and where their logs are."""
    parts = {
        "prefect": (prefect_server.reachable(home), "prefect/server.log"),
        "mlflow": (
            bool(os.environ.get("MLFLOW_TRACKING_URI") or mlflow_server.status(home)),
            "platform/mlflow/server.log",
        ),
        "worker": (worker.status(home) is not None, "platform/worker/worker.log"),
        "bridge": (bridge.status(home) is not None, "platform/bridge/bridge.log"),
    }
    return [{"name": name, "details": f"its log: {log}"} for name, (runs, log) in parts.items() if not runs]


# Follows the audit log and the access log, and remembers what the rules about the unusual need: platform/habits.json.
#
# The rules are tasks/security/access_anomalies.py; they become alerts in deployments/telemetry/alert_rules.py. How far
# it has read is written together with what it read, so a killed watch counts nothing twice.


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
        self._kept = _access_anomalies_read(self._path)

    def look(self, now: float) -> Habits:
        """Read on, and what is known then. Raises what the store raises while it is away."""
        before = asdict(self._kept)
        store = open_store(self.home)
        newest = audit_chain.newest(store).number
        results = list(audit_chain.between(store, self._kept.entry, newest))
        for link, data in results:
            try:
                self._kept.habits.take_entry(Entry.model_validate({**json.loads(data), "number": link.number}))
            except (ValueError, TypeError):
                continue  # `headway audit-log --verify` names it
        self._kept.entry = newest
        self._read_files()
        self._kept.habits.forget(now, denials_minutes=self._limits.denials_minutes)
        if asdict(self._kept) != before:
            process.write_json(self._path, asdict(self._kept))
        return self._kept.habits

    def _read_files(self) -> None:
        existing = access.days(self.home)
        for path in existing:
            with open(path, "rb") as file:
                file.seek(self._kept.files.get(path.name, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            for read in access.lines(whole):
                self._kept.habits.take_read(read)
            self._kept.files[path.name] = self._kept.files.get(path.name, 0) + len(whole)
        self._kept.files = {path.name: self._kept.files[path.name] for path in existing}


def _access_anomalies_read(path: Path) -> Followed:
    """What was kept; of an odd file nothing: both logs are read again from their beginning."""
    try:
        return _KEPT.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return Followed()


SLOW_SECONDS = 30.0
"""Time between two questions to Prefect, the store and the other parts."""
AWAY = (OSError, RuntimeError, ValueError, LookupError, HeadwayError, httpx.HTTPError)
"""What asking and telling may raise while somebody does not answer, or answers something odd."""


@dataclass(frozen=True)
class Sources:
    """Who is asked for what run folders do not tell, and who is told. Each may raise when it does not answer."""

    late: Callable[[float], Sequence[Mapping[str, Any]]]
    """Scheduled runs that have not started in time: deployment, name, expected."""
    down: Callable[[], Sequence[Mapping[str, Any]]]
    """Parts that do not run: name, details."""
    broken: Callable[[], Mapping[str, str]] = dict
    """Sources of events that are broken, and why."""
    tell: Callable[[dict[str, Any]], None] = send


class Alerts:
    """What fires now. State: `firing` and `outbox` of platform/alerts.json, and in memory the answers of the slow sources."""

    def __init__(self, home: Path, config: PlatformConfig, sources: Sources) -> None:
        self.home, self._limits, self._sources = home, config.alerts, sources
        self._path = home / "platform" / "alerts.json"
        self._runs = Runs(home)
        self._habits = Follower(home, config.alerts)
        self._kept = _read(self._path)
        self._asked = float("-inf")
        self._slow: dict[str, Any] = {}

    def tick(self, now: float) -> None:
        """Look once, remember what changed, tell what is not told yet."""
        self._runs.refresh()
        if not 0 <= now - self._asked < SLOW_SECONDS:
            self._asked, self._slow = now, self._ask(now)
        self._settle(self._seen(now), now)
        self._tell()

    def _seen(self, now: float) -> Seen:
        room = free_room(self.home)
        return Seen(
            now=now,
            runs=self._runs.views(),
            disk_free=room[0] if room else None,
            firing=frozenset(_key(alert) for alert in self._kept["firing"]),
            **self._slow,
        )

    def _ask(self, now: float) -> dict[str, Any]:
        """The slow facts; those that cannot be had now are left out."""
        asked: dict[str, Callable[[], Any]] = {
            "late": lambda: self._sources.late(now),
            "champions": self._champions,
            "down": self._sources.down,
            "broken": self._sources.broken,
            "anomalies": lambda: standing_anomalies(self.home),
            "tampered": lambda: standing(self.home),
            "untrusted": lambda: untrusted_endpoints(self.home, open_store(self.home)),
            "habits": lambda: self._habits.look(now),
        }
        result = {}
        for name, ask in asked.items():
            try:
                result[name] = ask()
            except AWAY as error:
                logging.info("alerts: %s is not known now: %s", name, error)
        return result

    def _champions(self) -> list[Champion]:
        """Every champion, when it last passed a revalidation or became champion, and what the newest one said of it."""
        store = open_store(self.home)
        results = [(model, last_revalidated(store, model)) for model in champions(store)]
        return [Champion(model, since, *_verdict(store, model)) for model, since in results if since is not None]

    def _settle(self, seen: Seen, now: float) -> None:
        """Put what is found in the place of what was known; each beginning and each end is an event."""
        before = {_key(alert): alert for alert in self._kept["firing"]}
        after: dict[str, dict[str, Any]] = {}
        for rule in RULES:
            result = rule.find(seen, self._limits)
            if result is None:
                after |= {key: alert for key, alert in before.items() if alert["alert"] == rule.name}
                continue
            for instance in result:
                alert = redact_value(_alert(rule, instance, now))
                after[_key(alert)] = {**alert, "since": before.get(_key(alert), alert)["since"]}
        if after == before:
            return
        events = [event_of(alert, "fired", now) for key, alert in after.items() if key not in before]
        events += [event_of(alert, "cleared", now) for key, alert in before.items() if key not in after]
        self._keep(firing=list(after.values()), outbox=[*self._kept["outbox"], *events])

    def _tell(self) -> None:
        """Send what waits, in its order; what is not taken stays, and all behind it."""
        while self._kept["outbox"]:
            first, *rest = self._kept["outbox"]
            try:
                self._sources.tell(first)
            except AWAY as error:
                logging.info("alerts: an event waits: %s", error)
                return
            self._keep(outbox=rest)

    def _keep(self, **changes: Any) -> None:
        self._kept = {**self._kept, **changes}
        process.write_json(self._path, self._kept)


def firing(home: Path) -> list[dict[str, Any]]:
    """The alerts that fire: alert, instance, severity, summary, details, remedy, labels, url, since."""
    alerts: list[dict[str, Any]] = _read(home / "platform" / "alerts.json")["firing"]
    return alerts


def _verdict(store: Store, model: str) -> tuple[str, str]:
    """The newest verdict on the champion that says anything, and why."""
    champion = read_ref(store, f"{model}/champion")
    for noted in revalidations(store, model):
        if noted["champion"] == champion and noted["verdict"] != "unknown":
            return str(noted["verdict"]), " ".join(noted.get("why", []))
    return "", ""


def _alert(rule: Rule, instance: Instance, now: float) -> dict[str, Any]:
    return {
        "alert": rule.name,
        "instance": instance.name,
        "severity": rule.severity,
        "summary": instance.summary,
        "details": instance.details,
        "remedy": rule.remedy,
        "labels": dict(instance.labels),
        "url": instance.url,
        "since": now,
    }


def _key(alert: Mapping[str, Any]) -> str:
    return f"{alert['alert']}/{alert['instance']}"


def _read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """What was kept; of an odd file nothing, so that whatever fires is told again rather than never."""
    result = read_object(path)
    lists = {name: value if isinstance(value := result.get(name), list) else [] for name in ("firing", "outbox")}
    return {name: [one for one in value if isinstance(one, dict)] for name, value in lists.items()}
