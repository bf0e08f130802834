"""What became of a batch that was sent: its flow run at Prefect, and how that ended. Changes nothing at Prefect.

The flow run that claimed a batch is the one that counts. Before one did, it is whatever run of the deployment has the batch as
its `cause`: one that was cancelled then ends the batch, for that is what somebody wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

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
from tasks.events.batches import Batch
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
    """What a batch's flow run does now. Raises httpx.HTTPError while Prefect does not answer.

    A run that crashed, or lost its slot, counts as ended when the watch had its time for it, since then and since
    `since`: while the platform was down, nobody took it up.
    """
    given_up = now - CRASH_SECONDS if now - since > CRASH_SECONDS else 0.0
    if batch.flow_run:
        return _claimed(client, home, batch.flow_run, given_up)
    runs = _started_for(client, batch)
    at_work = [run for run in runs if not _final(run, given_up)]
    if not runs:
        return Found("none")
    if at_work:
        return Found("starting", str(at_work[0].id))
    last = max(runs, key=lambda run: run.created or datetime.min.replace(tzinfo=UTC))
    return Found("lost", str(last.id)) if _unwanted(last) else Found("ended", str(last.id), _outcome(home, last))


def _claimed(client: SyncPrefectClient, home: Path, flow_run: str, given_up: float) -> Found:
    try:
        run = client.read_flow_run(UUID(flow_run))
    except ObjectNotFound:
        logged = read_run(home / "runs" / flow_run)
        over = logged.status != "running" or not logged.here
        how = "cancelled" if logged.status == "waiting" else logged.status
        return Found("ended", flow_run, f"{how}, deleted") if over else Found("running", flow_run)
    return Found("ended", flow_run, _outcome(home, run)) if _final(run, given_up) else Found("running", flow_run)


def _final(run: FlowRun, given_up: float) -> bool:
    """Whether it has ended for good. One that crashed, or was at work before and lost its slot, may go on until `given_up`."""
    if run.state is None or not run.state.is_final():
        return False
    comes_again = run.state.is_crashed() or (_refused(run) and run.run_count > 0)
    return not comes_again or run.state.timestamp.timestamp() < given_up


def _unwanted(run: FlowRun) -> bool:
    """Whether it ended before it claimed its batch although nobody asked for that."""
    return bool(run.state and run.state.is_crashed()) or _refused(run)


def _refused(run: FlowRun) -> bool:
    """Whether a limit cancelled it."""
    return bool(run.state and run.state.is_cancelled() and (run.state.message or "").startswith(REFUSED))


def _outcome(home: Path, run: FlowRun) -> str:
    """How it ended, in the run's own word where it left one."""
    closed = read_run(home / "runs" / str(run.id)).last("closed") or {}
    state = run.state.type.value.lower() if run.state else "unknown"
    return AT_END.get(str(closed.get("status")), state) if state in ("completed", "failed") else state


def _started_for(client: SyncPrefectClient, batch: Batch) -> list[FlowRun]:
    """Runs of the batch's deployment that have it as their cause, whoever started them."""
    try:
        deployment = client.read_deployment_by_name(batch.deployment)
    except ObjectNotFound:
        return []
    since = FlowRunFilterExpectedStartTime(after_=datetime.fromtimestamp(batch.made, UTC) - BEFORE)
    results: list[Any] = []
    while len(results) % PAGE == 0:
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(expected_start_time=since),
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id])),
            limit=PAGE,
            offset=len(results),
        )
        results += page
        if not page:
            break
    return [run for run in results if run.parameters.get("cause") == batch.id]
