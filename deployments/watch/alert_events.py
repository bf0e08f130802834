"""What an alert says to the world: an event in Prefect, on which automations notify people. The contract is docs/monitoring.md.

The same change of the same alert has the same id, however often it is sent: Prefect takes it once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import NAMESPACE_URL, uuid5

from deployments.services import prefect_server

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
