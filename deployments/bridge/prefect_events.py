"""What the bridge says to Prefect: every event that it accepted, and that a batch is due. It is handed a client of Prefect's.

An event of the ledger has one id for ever, so Prefect takes it once however often it is sent; people can make automations of
their own on it in the page. A batch has an id for each attempt.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import httpx

from tasks.common.redaction import redact_value
from tasks.events.batches import Batch, mark, set_mark
from tasks.events.ledger import Ledger

FORWARDED = "forwarded"
AT_ONCE = 50
TOLD_OF_A_BATCH = 50
"""Events that the event of a batch lists; more are counted."""


def forward(client: Any, ledger: Ledger) -> None:
    """Tell Prefect of accepted events that it was not told of. Raises httpx.HTTPError while it does not answer."""
    while rows := _untold(ledger):
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


def _untold(ledger: Ledger) -> list[Any]:
    query = "SELECT * FROM events WHERE status = 'accepted' AND number > ? ORDER BY number LIMIT ?"
    with ledger.snapshot() as db:
        return db.execute(query, (mark(db, FORWARDED), AT_ONCE)).fetchall()


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
