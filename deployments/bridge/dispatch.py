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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import NAMESPACE_URL, UUID, uuid5

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
)
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from deployments.catalogue.flows import REFUSED
from deployments.catalogue.routes import Route, routes
from deployments.configuration.events import EventsConfig
from deployments.services import prefect_server
from tasks.artifacts import parse_ref
from tasks.common import process
from tasks.common.redaction import redact_value
from tasks.events import batches
from tasks.events.batches import Batch, mark, set_mark
from tasks.events.ledger import Ledger
from tasks.orchestration.run_log import read_run

CRASH_SECONDS = 120.0
"""Time in which the watch puts a run back that crashed, or that a limit cancelled (deployments/watch/dead_runs.py)."""
BEFORE = timedelta(minutes=5)
"""Clocks of two machines differ by less."""
PAGE = 200
AT_END = {"completed": "completed", "gate_closed": "gate_closed", "cancelled": "cancelled", "failed": "failed"}


@dataclass(frozen=True)
class Found:
    """What is known of a batch's flow run."""

    state: Literal["none", "starting", "running", "lost", "ended"]
    """none: Prefect has no run for it. starting: there is one, and it has not claimed the batch. lost: it did not get as far,
    and nobody wanted that: it crashed, or was cancelled only because another run of the deployment was at work."""
    flow_run: str = ""
    outcome: str = ""


def follow(client: SyncPrefectClient, home: Path, batch: Batch, now: float, *, since: float) -> Found:
    """What a batch's flow run does now; nothing is changed at Prefect. Raises httpx.HTTPError while Prefect does not answer.

    The flow run that claimed the batch is the one that counts. Before one did, it is whatever run of the deployment has the
    batch as its `cause`: one that was cancelled then ends the batch, for that is what somebody wanted.

    A run that crashed, or lost its slot, counts as ended when the watch had its time for it, since then and since `since`:
    while the platform was down, nobody took it up.
    """
    given_up = now - CRASH_SECONDS if now - since > CRASH_SECONDS else 0.0
    if batch.flow_run:
        try:
            run = client.read_flow_run(UUID(batch.flow_run))
        except ObjectNotFound:
            logged = read_run(home / "runs" / batch.flow_run)
            if logged.status == "running" and logged.here:
                return Found("running", batch.flow_run)
            how = "cancelled" if logged.status == "waiting" else logged.status
            return Found("ended", batch.flow_run, f"{how}, deleted")
        over = _final(run, given_up)
        return Found("ended", batch.flow_run, _outcome(home, run)) if over else Found("running", batch.flow_run)
    try:
        deployment = client.read_deployment_by_name(batch.deployment)
    except ObjectNotFound:
        return Found("none")
    # Runs of the batch's deployment that have it as their cause, whoever started them.
    begun = FlowRunFilterExpectedStartTime(after_=datetime.fromtimestamp(batch.made, UTC) - BEFORE)
    results: list[FlowRun] = []
    while len(results) % PAGE == 0:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(expected_start_time=begun),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
            limit=PAGE,
            offset=len(results),
        )
        results += page
        if not page:
            break
    runs = [run for run in results if run.parameters.get("cause") == batch.id]
    at_work = [run for run in runs if not _final(run, given_up)]
    if not runs:
        return Found("none")
    if at_work:
        return Found("starting", str(at_work[0].id))
    last = max(runs, key=lambda run: run.created or datetime.min.replace(tzinfo=UTC))
    unwanted = (last.state and last.state.is_crashed()) or _refused(last)
    return Found("lost", str(last.id)) if unwanted else Found("ended", str(last.id), _outcome(home, last))


def _final(run: FlowRun, given_up: float) -> bool:
    """Whether it has ended for good. One that crashed, or was at work before and lost its slot, may go on until `given_up`."""
    if run.state is None or not run.state.is_final():
        return False
    comes_again = run.state.is_crashed() or (_refused(run) and run.run_count > 0)
    return not comes_again or run.state.timestamp.timestamp() < given_up


def _refused(run: FlowRun) -> bool:
    """Whether a limit cancelled it."""
    return bool(run.state and run.state.is_cancelled() and (run.state.message or "").startswith(REFUSED))


def _outcome(home: Path, run: FlowRun) -> str:
    """How it ended, in the run's own word where it left one."""
    closed = read_run(home / "runs" / str(run.id)).last("closed") or {}
    state = run.state.type.value.lower() if run.state else "unknown"
    return AT_END.get(str(closed.get("status")), state) if state in ("completed", "failed") else state


FORWARDED = "forwarded"
AT_ONCE = 50
TOLD_OF_A_BATCH = 50
"""Events that the event of a batch lists; more are counted."""


def forward(client: Any, ledger: Ledger) -> None:
    """Tell Prefect of accepted events that it was not told of. Raises httpx.HTTPError while it does not answer.

    An event of the ledger has one id for ever, so Prefect takes it once however often it is sent; people can make automations
    of their own on it in the page. A batch has an id for each attempt.
    """
    query = "SELECT * FROM events WHERE status = 'accepted' AND number > ? ORDER BY number LIMIT ?"
    while True:
        with ledger.snapshot() as db:
            rows = db.execute(query, (mark(db, FORWARDED), AT_ONCE)).fetchall()
        if not rows:
            return
        _post(client, [event_of(ledger, row) for row in rows])
        with ledger.transaction() as db:
            set_mark(db, FORWARDED, rows[-1]["number"])


def event_of(ledger: Ledger, row: sqlite3.Row) -> dict[str, Any]:
    """An accepted event as Prefect's API takes it."""
    payload = {name: row[name] for name in ("number", "name", "subject", "object", "channel", "source", "identity")}
    payload = _clean(redact_value({**payload, "data": json.loads(row["data"])}))
    kind, _, name = str(payload["subject"]).partition("/")
    return {
        "id": str(uuid5(NAMESPACE_URL, f"headway/event/{ledger.path}/{row['number']}/{row['received']}")),
        "event": f"headway.{payload['name']}",
        "occurred": _time(row["received"]),
        "resource": {
            "prefect.resource.id": f"headway.{kind}.{name}",
            "prefect.resource.name": payload["subject"],
            "headway.channel": payload["channel"],
            "headway.object": payload["object"],
        },
        "related": [],
        "payload": {**payload, "occurred": row["occurred"], "received": row["received"]},
    }


def due(name: str, batch: Batch, events: Sequence[sqlite3.Row], now: float) -> dict[str, Any]:
    """The event on which a trigger's automation starts the deployment for a batch; the same id for the same attempt."""
    entries = [{key: row[key] for key in ("number", "name", "subject", "object")} for row in events[-TOLD_OF_A_BATCH:]]
    return {
        "id": str(uuid5(NAMESPACE_URL, f"headway/batch/{batch.id}/{batch.attempts}")),
        "event": name,
        "occurred": _time(now),
        "resource": {
            "prefect.resource.id": f"headway.trigger.{batch.trigger}",
            "prefect.resource.name": f"{batch.deployment} for {batch.subject}",
            "headway.batch": batch.id,
        },
        "related": [],
        "payload": {
            "batch": batch.id,
            "cause": batch.id,
            "trigger": batch.trigger,
            "subject": _clean(batch.subject),
            "dataset": batch.dataset,
            "deployment": batch.deployment,
            "attempt": batch.attempts + 1,
            "covered": len(events),
            "events": _clean(redact_value(entries)),
        },
    }


def send(client: Any, event: dict[str, Any]) -> None:
    """Hand an event to Prefect. Raises httpx.HTTPError while it does not take it."""
    client.request("POST", "/events", json=[event]).raise_for_status()


def _post(client: Any, events: list[dict[str, Any]]) -> None:
    """All of them; one that Prefect will never take must not keep the others from being told."""
    try:
        client.request("POST", "/events", json=events).raise_for_status()
    except httpx.HTTPStatusError as error:
        if not 400 <= error.response.status_code < 500 or error.response.status_code in (401, 403):
            raise
        if len(events) == 1:
            logging.warning("Prefect does not take event %s: %s", events[0]["payload"]["number"], error)
        else:
            for event in events:
                _post(client, [event])


def _clean(value: Any) -> Any:
    """Text without control characters, which not every database takes."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " for c in value)
    if isinstance(value, dict):
        return {str(_clean(key)): _clean(one) for key, one in value.items()}
    return [_clean(one) for one in value] if isinstance(value, list) else value


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


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
        batches.route(
            self.ledger,
            lambda name, subject: [route.name for route in self.routes.values() if route.wants(name, subject)],
            self.routes.keys(),
        )
        due = not 0 <= now - self._pruned < PRUNE_SECONDS
        if due and not batches.prune(self.ledger):  # what is left goes at the next turns, so that nobody waits for long
            self._pruned = now
        with prefect_server.client() as client:
            forward(client, self.ledger)
            opened, waiting = batches.open_batches(self.ledger), batches.waiting(self.ledger)
            if 0 <= now - self._followed < FOLLOW_SECONDS:  # those that a flow run has are looked at not so often
                opened = [batch for batch in opened if not batch.flow_run]
            else:
                self._followed = now
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

    def _start(self, client: Any, route: Route, subject: str, now: float) -> bool:
        """Make one batch of all that wait, and send it, unless something keeps it; whether one was made."""
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
        result = follow(client, self.home, batch, now, since=self._since)
        if result.flow_run and not batch.flow_run and result.flow_run != batch.seen:
            batches.note_seen(self.ledger, batch, result.flow_run)
        if result.state == "ended":
            batches.note_ended(self.ledger, batch, result.outcome, now)
            logging.info("%s: flow run %s ended: %s", batch.id, result.flow_run, result.outcome)
        elif result.state in ("none", "lost"):
            if batch.trigger in self.routes and self._switched.get(batch.trigger) != "on":
                return
            patience = min(AGAIN_SECONDS * 2.0 ** min(max(batch.attempts - 1, 0), 10), AT_MOST_SECONDS)
            if batch.started is not None and 0 <= now - batch.started < patience:
                return
            if batch.trigger in self.routes:
                self._send(client, batch, now)
            else:
                batches.note_ended(self.ledger, batch, "not started: its trigger is gone", now)


def told_at(home: Path) -> Path:
    """Where the bridge says of each trigger whether its automation is on, and what keeps it from starting."""
    return home / "platform" / "bridge" / "triggers.json"


def dataset_of(event: sqlite3.Row) -> str:
    """The dataset that an event names: its object, else its subject, else what it says in `dataset`; empty for none."""
    named = json.loads(event["data"]).get("dataset", "")
    for text in (event["object"], event["subject"], named):
        with suppress(ValueError):
            if isinstance(text, str) and text.startswith("dataset/") and parse_ref(text, kind="dataset"):
                return text
    return ""
