"""Which events start what: events that wait become batches, batches are sent to Prefect, and followed until their run has ended.

A batch is in the ledger before Prefect hears of it. So it does not matter who is killed when: a batch that no flow run has
claimed is sent again, and of several flow runs for one batch the first to claim it does the work (flows/support/prefect_run.py).
What runs where is Prefect's: an automation a trigger (deployments/catalogue/triggers.py), which a person can switch off.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

from deployments.bridge.prefect_events import due, forward, send
from deployments.catalogue.routes import Route, routes
from deployments.configuration.events import EventsConfig
from deployments.services import prefect_server
from tasks.artifacts import parse_ref
from tasks.common import process
from tasks.events import batches
from tasks.events.batches import Batch
from tasks.events.ledger import Ledger

AGAIN_SECONDS = 30.0
"""Time in which a flow run should be there for a batch that was sent; twice as long after each attempt, up to AT_MOST_SECONDS."""
AT_MOST_SECONDS = 600.0
LOOK_SECONDS = 15.0
"""Time between two looks at the automations while nothing waits."""
FOLLOW_SECONDS = 3.0
"""Time between two looks at flow runs that are at work."""
PRUNE_SECONDS = 600.0
MOST_AT_ONCE = 20
"""Batches of one trigger that are open at once: a sender that invents subjects starts no more runs than that."""


class Dispatch:
    """State: what was last written of the triggers, and when what is not done at every turn was last done."""

    def __init__(self, home: Path, config: EventsConfig, ledger: Ledger) -> None:
        self.home, self.ledger = home, ledger
        self.routes: dict[str, Route] = {route.name: route for route in routes(config)}
        self._since = time.time()
        self._looked = self._followed = self._pruned = float("-inf")
        self._switched: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def tick(self, now: float) -> None:
        """One turn. Raises httpx.HTTPError while Prefect does not answer; what waits goes on waiting."""
        batches.route(self.ledger, self._wanted_by, self.routes.keys())
        due = not 0 <= now - self._pruned < PRUNE_SECONDS
        if due and not batches.prune(self.ledger):  # what is left goes at the next turns, so that nobody waits for long
            self._pruned = now
        with prefect_server.client() as client:
            forward(client, self.ledger)
            opened, waiting = self._opened(now), batches.waiting(self.ledger)
            if any(not batch.flow_run for batch in opened) or waiting or not 0 <= now - self._looked < LOOK_SECONDS:
                from deployments.catalogue.triggers import switched

                self._switched = switched(client, list(self.routes)) if self.routes else {}
                self._looked = now
            for batch in opened:
                self._follow(client, batch, now)
            at_work = Counter(batch.trigger for batch in batches.open_batches(self.ledger))
            for trigger, subject in waiting:
                if at_work[trigger] < MOST_AT_ONCE:
                    at_work[trigger] += self._start(client, self.routes[trigger], subject, now)
            # Leave for `headway events` what only Prefect knows.
            payload = {
                name: {"automation": self._switched.get(name), "problem": self._problems.get(name, "")}
                for name in self.routes
            }
            path = told_at(self.home)
            if process.read_json(path) != payload:
                process.write_json(path, payload)

    def _opened(self, now: float) -> list[Batch]:
        """Open batches that are to be looked at now: those that a flow run has not so often."""
        opened = batches.open_batches(self.ledger)
        if 0 <= now - self._followed < FOLLOW_SECONDS:
            return [batch for batch in opened if not batch.flow_run]
        self._followed = now
        return opened

    def _wanted_by(self, name: str, subject: str) -> list[str]:
        return [route.name for route in self.routes.values() if route.wants(name, subject)]

    def _start(self, client: Any, route: Route, subject: str, now: float) -> bool:
        """Make one batch of all that wait, and send it, unless something keeps it; whether one was made."""
        from prefect.exceptions import ObjectNotFound

        cooldown = route.trigger.cooldown_minutes * 60
        with self.ledger.snapshot() as db:
            kept = batches.held(db, route.name, subject, cooldown, now)
        if kept or self._switched.get(route.name) != "on":
            return False
        try:
            standard = client.read_deployment_by_name(route.trigger.start).parameters.get("dataset", "")
        except ObjectNotFound:
            self._problems[route.name] = f"there is no deployment {route.trigger.start}: `headway up` registers it"
            return False
        self._problems.pop(route.name, None)
        batch = batches.make_batch(
            self.ledger,
            route.name,
            subject,
            deployment=route.trigger.start,
            dataset=lambda event: dataset_of(event) or route.trigger.dataset or standard,
            cooldown=cooldown,
            now=now,
        )
        if batch is not None:
            self._send(client, batch, now)
        return batch is not None

    def _send(self, client: Any, batch: Batch, now: float) -> None:
        from deployments.catalogue.triggers import DUE

        covered = batches.events_of(self.ledger, batch.id)
        send(client, due(DUE, batch, covered, now))
        batches.note_sent(self.ledger, batch, now)
        logging.info(
            "%s: %s events of %s start %s (attempt %s)",
            batch.id,
            len(covered),
            batch.subject,
            batch.deployment,
            batch.attempts + 1,
        )

    def _follow(self, client: Any, batch: Batch, now: float) -> None:
        """Note what became of a batch; send one again that nothing came of."""
        from deployments.bridge.following import follow

        result = follow(client, self.home, batch, now, since=self._since)
        if result.flow_run and not batch.flow_run and result.flow_run != batch.seen:
            batches.note_seen(self.ledger, batch, result.flow_run)
        if result.state == "ended":
            batches.note_ended(self.ledger, batch, result.outcome, now)
            logging.info("%s: flow run %s ended: %s", batch.id, result.flow_run, result.outcome)
        elif result.state in ("none", "lost"):
            if not self._patience_is_over(batch, now):
                return
            if batch.trigger in self.routes:
                self._send(client, batch, now)
            else:
                batches.note_ended(self.ledger, batch, "not started: its trigger is gone", now)

    def _patience_is_over(self, batch: Batch, now: float) -> bool:
        if batch.trigger in self.routes and self._switched.get(batch.trigger) != "on":
            return False
        patience = min(AGAIN_SECONDS * 2.0 ** min(max(batch.attempts - 1, 0), 10), AT_MOST_SECONDS)
        return batch.started is None or not 0 <= now - batch.started < patience


def told_at(home: Path) -> Path:
    """Where the bridge says of each trigger whether its automation is on, and what keeps it from starting."""
    return home / "platform" / "bridge" / "triggers.json"


def dataset_of(event: sqlite3.Row) -> str:
    """The dataset that an event names: its object, else its subject, else what it says in `dataset`; empty for none."""
    named = json.loads(event["data"]).get("dataset", "")
    for text in (event["object"], event["subject"], named):
        if isinstance(text, str) and text.startswith("dataset/") and _is_reference(text):
            return text
    return ""


def _is_reference(text: str) -> bool:
    try:
        return bool(parse_ref(text, kind="dataset"))
    except ValueError:
        return False
