"""Alerts: what fires is found at every look, kept in platform/alerts.json, told once when it begins and once when it ends.

The rules are deployments/telemetry/alert_rules.py. Telling is an event in Prefect, on which automations notify people; the
contract is docs/monitoring.md. It goes into an outbox in the same file, in the same write, and out of it when it was taken. So
a killed watch tells nothing twice, and nothing gets lost while Prefect is away.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import NAMESPACE_URL, uuid5

import httpx
from pydantic import TypeAdapter, ValidationError

from deployments.configuration.platform import AlertsConfig, PlatformConfig
from deployments.services import mlflow_server, prefect_server
from deployments.services.parts import bridge, worker
from deployments.telemetry.alert_rules import RULES, Champion, Seen
from deployments.telemetry.measure import free_room
from deployments.telemetry.runs import Runs, read_alerts
from tasks.common import process
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact_value
from tasks.registry.model_integrity import standing, untrusted_endpoints
from tasks.registry.refs import read_ref
from tasks.registry.revalidations import champions, last_revalidated, revalidations
from tasks.security import access, audit_chain
from tasks.security.access import Habits
from tasks.security.audit import Entry
from tasks.serving.monitor.watch import standing_anomalies
from tasks.storage import open_store

LONGEST = 4000
"""Characters of details: they may hold the end of a log, and end up in messages."""
FIRED, CLEARED = "headway.alert.fired", "headway.alert.cleared"


def event_of(alert: Mapping[str, Any], state: Literal["fired", "cleared"], now: float) -> dict[str, Any]:
    """The event of a change, as Prefect's API takes it."""
    resource = f"headway.alert.{alert['alert']}.{slug(str(alert['instance']))}"
    occurred = datetime.fromtimestamp(now, UTC).isoformat()
    labels = {f"headway.{name}": str(value) for name, value in alert["labels"].items() if value}
    return {
        "id": str(uuid5(NAMESPACE_URL, f"{resource}/{state}/{alert['since']}/{now}")),
        "event": FIRED if state == "fired" else CLEARED,
        "occurred": occurred,
        "resource": {
            "prefect.resource.id": resource,
            "prefect.resource.name": alert["summary"],
            "headway.alert": alert["alert"],
            "headway.severity": alert["severity"],
            **labels,
        },
        "related": [],
        "payload": {**alert, "details": alert["details"][:LONGEST], "state": state, "time": now},
    }


def slug(text: str) -> str:
    """A part of a resource's id: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text) or "-"


def send(event: dict[str, Any]) -> None:
    """Hand an event to the Prefect server of the environment. Raises httpx.HTTPError while it does not take it."""
    with prefect_server.client() as client:
        client.request("POST", "/events", json=[event]).raise_for_status()


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
    """Follows the audit log and the access log, and remembers what the rules about the unusual need (alert_rules.py).

    State: what was followed so far, as platform/habits.json has it. How far was read is written together with what was read, so a
    killed watch counts nothing twice.
    """

    def __init__(self, home: Path, limits: AlertsConfig) -> None:
        self.home, self._limits = home, limits
        self._path = home / "platform" / "habits.json"
        try:
            self._kept = _KEPT.validate_json(self._path.read_bytes())
        except (OSError, ValidationError):  # both logs are read again from their beginning
            self._kept = Followed()

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
        existing = access.days(self.home)
        for path in existing:
            with open(path, "rb") as file:
                file.seek(self._kept.files.get(path.name, 0))
                read = file.read()
            whole = read[: read.rfind(b"\n") + 1]
            for line in access.lines(whole):
                self._kept.habits.take_read(line)
            self._kept.files[path.name] = self._kept.files.get(path.name, 0) + len(whole)
        self._kept.files = {path.name: self._kept.files[path.name] for path in existing}
        self._kept.habits.forget(now, denials_minutes=self._limits.denials_minutes)
        if asdict(self._kept) != before:
            process.write_json(self._path, asdict(self._kept))
        return self._kept.habits


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
        self._kept = read_alerts(self._path)
        self._asked = float("-inf")
        self._slow: dict[str, Any] = {}

    def tick(self, now: float) -> None:
        """Look once, remember what changed, tell what is not told yet."""
        self._runs.refresh()
        if not 0 <= now - self._asked < SLOW_SECONDS:
            self._asked, self._slow = now, self._ask(now)
        room = free_room(self.home)
        before = {_key(alert): alert for alert in self._kept["firing"]}
        seen = Seen(
            now=now,
            runs=self._runs.views(),
            disk_free=room[0] if room else None,
            firing=frozenset(before),
            **self._slow,
        )
        # Put what is found in the place of what was known; each beginning and each end is an event.
        after = self._firing(seen, before)
        if after != before:
            events = [event_of(alert, "fired", now) for key, alert in after.items() if key not in before]
            events += [event_of(alert, "cleared", now) for key, alert in before.items() if key not in after]
            self._keep(firing=list(after.values()), outbox=[*self._kept["outbox"], *events])
        # Send what waits, in its order; what is not taken stays, and all behind it.
        while self._kept["outbox"]:
            first, *rest = self._kept["outbox"]
            try:
                self._sources.tell(first)
            except AWAY as error:
                logging.info("alerts: an event waits: %s", error)
                return
            self._keep(outbox=rest)

    def _firing(self, seen: Seen, before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The alerts that fire by what is seen, by their keys. What is not known just now fires on."""
        after: dict[str, dict[str, Any]] = {}
        for rule in RULES:
            result = rule.find(seen, self._limits)
            if result is None:
                after |= {key: alert for key, alert in before.items() if alert["alert"] == rule.name}
                continue
            for instance in result:
                alert = {
                    "alert": rule.name,
                    "instance": instance.name,
                    "severity": rule.severity,
                    "summary": instance.summary,
                    "details": instance.details,
                    "remedy": rule.remedy,
                    "labels": dict(instance.labels),
                    "url": instance.url,
                    "since": seen.now,
                }
                alert = redact_value(alert)
                after[_key(alert)] = {**alert, "since": before.get(_key(alert), alert)["since"]}
        return after

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
        made = []
        for model, since in results:
            if since is not None:
                champion = read_ref(store, f"{model}/champion")
                # The newest verdict on the champion that says anything, and why.
                verdicts = (
                    (str(noted["verdict"]), " ".join(noted.get("why", [])))
                    for noted in revalidations(store, model)
                    if noted["champion"] == champion and noted["verdict"] != "unknown"
                )
                made.append(Champion(model, since, *next(verdicts, ("", ""))))
        return made

    def _keep(self, **changes: Any) -> None:
        self._kept = {**self._kept, **changes}
        process.write_json(self._path, self._kept)


def _key(alert: Mapping[str, Any]) -> str:
    return f"{alert['alert']}/{alert['instance']}"
