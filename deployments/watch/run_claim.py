"""Who acts on a flow run's state, when several watches see it at once: the first to say so at Prefect's server.

Prefect sets a state without comparing it with the one that the caller saw. It does refuse a second input of one key for a flow
run, in its database. So the key of the input is the id of the state that is to be left, and the input is the claim to it. No
claim is ever deleted: one that is stale is followed by the next generation, whose key is made once as well.
"""

from __future__ import annotations

import json
import os
import re
import socket
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRunInput

STALE_SECONDS = 60.0
"""A claim older than this, with the flow run still in its state, is that of a watch that died before it acted."""

MOST = 200
"""Claims of one state that Prefect lists: each is of a watch that died within a minute."""


def claim(client: SyncPrefectClient, run: UUID, state: UUID, now: float) -> bool:
    """Whether the caller, and nobody else, is to act on this state of this flow run."""
    first = f"headway-watch-{state}"
    made = client.filter_flow_run_input(run, key_prefix=first, limit=MOST, exclude_keys=set())
    claims = {number: one for one in made if (number := _generation(one.key, first)) is not None}
    newest = max(claims, default=-1)
    if claims and abs(now - _time(claims[newest])) < STALE_SECONDS:
        return False
    mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": now})
    key = f"{first}-{newest + 1}" if claims else first
    try:
        client.create_flow_run_input(run, key, mine)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.CONFLICT:
            return False
        raise
    return True


def _generation(key: str, first: str) -> int | None:
    """0 for the first claim to a state, whose key has no number; None for what no watch wrote."""
    match = re.fullmatch(r"(?:-(\d{1,9}))?", key.removeprefix(first))
    return int(match[1] or 0) if match else None


def _time(made: FlowRunInput) -> float:
    """When a claim was made; long ago for one that no watch wrote."""
    try:
        return float(made.decoded_value["time"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return 0.0
