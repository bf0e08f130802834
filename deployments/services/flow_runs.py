"""What several duties ask Prefect's server: flow runs by state, each run's history, whole and not in pages; and who acts on
a state.

What is done about a flow run is in deployments/watch/dead_runs.py and deployments/watch/schedules.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterCreatedBy,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType

PAGE = 200
AT_WORK = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
"""States in which a run of a deployment holds one of its slots."""
KEPT = "Kept while its deployment was changed"
"""What the state of a run says that was due when `headway up` changed its deployment (deployments/services/registration.py)."""


def flow_runs(
    client: SyncPrefectClient, *types: StateType, named: str = "", by_schedule: bool = False, **criteria: Any
) -> list[FlowRun]:
    """All flow runs in states of these types, and of this name; `by_schedule`: only those that a schedule made."""
    made = FlowRunFilterCreatedBy(type_=["SCHEDULE"]) if by_schedule else None
    name = FlowRunFilterStateName(any_=[named]) if named else None
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(types)), name=name)
    asked = FlowRunFilter(state=state, created_by=made, **criteria)
    results: list[FlowRun] = []
    while True:
        page = client.read_flow_runs(flow_run_filter=asked, limit=PAGE, offset=len(results))
        results += page
        if len(page) < PAGE:
            return results


def history(client: SyncPrefectClient, run: UUID) -> list[State[Any]]:
    """The states that a flow run went through, oldest first."""
    return sorted(client.read_flow_run_states(run), key=lambda state: state.timestamp)


def untried(state: State[Any]) -> bool:
    """Whether the state of a scheduled run is one of a run that no worker looked at."""
    return state.name in ("Scheduled", "Late") or state.message == KEPT


def at(seconds: float) -> str:
    """A time, in seconds since the epoch, as people read it in a state's message."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


STALE_SECONDS = 60.0
"""A claim older than this, with the flow run still in its state, is that of a watch that died before it acted."""

MOST = 200
"""Claims of one state that Prefect lists: each is of a watch that died within a minute."""


def claim(client: SyncPrefectClient, run: UUID, state: UUID, now: float) -> bool:
    """Whether the caller, and nobody else, is to act on this state of this flow run: the first of several watches to say so.

    Prefect sets a state without comparing it with the one that the caller saw. It does refuse a second input of one key for a
    flow run, in its database. So the key of the input is the id of the state that is to be left, and the input is the claim to
    it. No claim is ever deleted: one that is stale is followed by the next generation, whose key is made once as well.
    """
    first = f"headway-watch-{state}"
    claims = {}
    for made in client.filter_flow_run_input(run, key_prefix=first, limit=MOST, exclude_keys=set()):
        # The first claim's key has no number; an input of any other form no watch wrote.
        if match := re.fullmatch(r"(?:-(\d{1,9}))?", made.key.removeprefix(first)):
            claims[int(match[1] or 0)] = made
    newest = max(claims, default=-1)
    if claims:
        try:
            age = abs(now - float(claims[newest].decoded_value["time"]))
        except (ValueError, TypeError, KeyError, OverflowError):  # no watch wrote it
            age = now
        if age < STALE_SECONDS:
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
