"""Who acts on a flow run's state, when several watches see it at once: the first to say so at Prefect's server.

Prefect sets a state without comparing it with the one that the caller saw. It does refuse a second input of one key for a flow
run, in its database. So the key of the input is the id of the state that is to be left, and the input is the claim to it.
"""

from __future__ import annotations

import json
import os
import socket
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient

STALE_SECONDS = 60.0
"""A claim older than this, with the flow run still in its state, is that of a watch that died before it acted."""


def claim(client: SyncPrefectClient, run: UUID, state: UUID, now: float) -> bool:
    """Whether the caller, and nobody else, is to act on this state of this flow run."""
    key = f"headway-watch-{state}"
    mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": now})
    if _create(client, run, key, mine):
        return True
    theirs = json.loads(client.read_flow_run_input(run, key))
    if abs(now - theirs["time"]) < STALE_SECONDS:
        return False
    client.delete_flow_run_input(run, key)
    return _create(client, run, key, mine)


def _create(client: SyncPrefectClient, run: UUID, key: str, value: str) -> bool:
    try:
        client.create_flow_run_input(run, key, value)
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.CONFLICT:
            return False
        raise
    return True
