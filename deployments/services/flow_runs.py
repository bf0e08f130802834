"""What several duties ask Prefect's server: flow runs by state, and each run's history; whole, not in pages.

What is done about a flow run is in deployments/watch/dead_runs.py and deployments/watch/schedules.py.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

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
