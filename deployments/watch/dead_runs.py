"""Flow runs whose process died: found, given their true end, and taken up again where the settings say so.

Prefect alone leaves them Running, Cancelling or Pending for ever when the worker died with them. Whether a process lives is
sightings.py; who acts when several watches see the same is claims.py; that no slot stays occupied is slots.py. Finished stages
are not run again: their records are reused (tasks/stage.py). Dead jobs are the compute backends' business.

Only runs of this platform are touched: those of our work pool whose worker was on this host, and those of this home's command
line. A run from the command line that dies before it opened its folder (runs/ID) belongs to nobody that can be known: it is left.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed

from deployments.catalogue import POOL
from deployments.settings import PlatformConfig
from deployments.watch.claims import claim
from deployments.watch.flow_runs import AT_WORK, at, flow_runs, history
from deployments.watch.sightings import Sighting, look
from deployments.watch.slots import Slots

CONFIRM_SECONDS = 2.0
"""A death is acted on when it is still seen so long after the first look: a worker that lives tells of it itself, in 0.2 s."""
PATIENCE_SECONDS = 45.0
"""A run without a process may still be about to get one for so long."""
RESUME_WITHIN = timedelta(hours=1)
"""Runs that crashed before this are history: a changed setting does not bring them back."""
RESUMED = "Taken up again"
"""How the message of every state begins that this duty queued; they are counted."""
OVER = ("failed", "gate_closed")
"""Ends that a flow wrote down itself, and that come back however often it is started."""


class DeadRuns:
    """State: which deaths were seen at the last look and since when, and which crashed runs are settled."""

    def __init__(self, home: Path, config: PlatformConfig, *, patience: float = PATIENCE_SECONDS) -> None:
        self.home, self.config, self.patience = home, config, patience
        self._suspects: dict[UUID, float] = {}
        self._settled: set[UUID] = set()
        self._slots = Slots()

    def tick(self, client: SyncPrefectClient, now: float) -> None:
        """Look once. A death is acted on at the second look that sees it, two seconds or more after the first."""
        suspects: dict[UUID, float] = {}
        for run in flow_runs(client, *AT_WORK, StateType.PAUSED):
            seen = self._dead(client, run, now)
            if seen is None or run.state_id is None:
                continue
            suspects[run.state_id] = self._suspects.get(run.state_id, time.monotonic())
            if time.monotonic() - suspects[run.state_id] >= CONFIRM_SECONDS:
                self._safely(self._end, client, run, now, seen)
        self._suspects = suspects
        if self.config.on_crash == "resume":
            for run in self._crashed(client, now):
                self._safely(self._resume, client, run, now)
        self._slots.tick(client)

    def _dead(self, client: SyncPrefectClient, run: FlowRun, now: float) -> Sighting | None:
        """What tells that nobody works on the run; None when somebody does, may soon, or when it is not ours to judge."""
        state = run.state
        ours = run.work_pool_name == POOL or (self.home / "runs" / str(run.id)).exists()
        if not ours or state is None or (state.is_paused() and state.state_details.pause_reschedule):
            return None
        seen = look(self.home, run, lambda: taken_up(history(client, run.id)))
        waited = abs(now - state.timestamp.timestamp())
        if seen.verdict == "gone" or (seen.verdict == "unclear" and waited >= self.patience):
            return seen
        return None

    def _end(self, client: SyncPrefectClient, run: FlowRun, now: float, seen: Sighting) -> None:
        """Give a dead run its true end: the one that it wrote down, or cancelled, queued again, or crashed."""
        assert run.state_id is not None, "a run without a state is not judged"
        if not claim(client, run.id, run.state_id, now):
            return
        queued = self._resumes(client, run)
        never_began = run.deployment_id is not None and run.state is not None and run.state.is_pending()
        if never_began and queued < max(self.config.max_resumes, 1):
            state = AwaitingRetry(message=f"{RESUMED}: {seen.words}, so nothing had begun ({at(now)})")
        else:
            state = self._true_end(run, now, seen, queued)
        if _set(client, run, state) and state.is_final():
            _end_tasks(client, run)
        if state.is_crashed() and self.config.on_crash == "resume":
            self._resume(client, client.read_flow_run(run.id), now)

    def _true_end(self, run: FlowRun, now: float, seen: Sighting, queued: int) -> State[Any]:
        status = seen.log.status if seen.log else "died"
        if run.state is not None and run.state.is_cancelling():
            return Cancelled(message=f"Cancelled: {seen.words}; found {at(now)}")
        if status == "completed":
            return Completed(message=f"It was done when {seen.words}; found {at(now)}")
        if seen.log and status in OVER:
            error = (seen.log.last("closed") or {}).get("error") or {}
            return Failed(message=f"{status}: {error.get('message', '')} (it could not tell Prefect; found {at(now)})")
        return Crashed(message=f"Crashed: {seen.words}; found {at(now)}. {self._what_next(run, queued)}")

    def _what_next(self, run: FlowRun, queued: int) -> str:
        if run.deployment_id is None:
            return "The same command goes on after the last finished stage."
        if self.config.on_crash == "mark":
            return "Retry goes on after the last finished stage."
        if queued >= self.config.max_resumes:
            return f"It was taken up again {queued} times already. See its logs; Retry goes on after the last finished stage."
        return "It is taken up again."

    def _crashed(self, client: SyncPrefectClient, now: float) -> list[FlowRun]:
        """Runs that the worker marked as crashed: it tells twice, so the first seconds are left to it."""
        since = FlowRunFilterEndTime(after_=datetime.fromtimestamp(now, UTC) - RESUME_WITHIN)
        found = flow_runs(client, StateType.CRASHED, end_time=since)
        return [
            run
            for run in found
            if run.state is not None and abs(now - run.state.timestamp.timestamp()) >= CONFIRM_SECONDS
        ]

    def _resume(self, client: SyncPrefectClient, run: FlowRun, now: float) -> None:
        """Queue a crashed run of a deployment again, as the same flow run, unless that was done often enough."""
        ours = run.work_pool_name == POOL and run.deployment_id is not None
        if not ours or run.state_id is None or run.state_id in self._settled:
            return
        seen = look(self.home, run, lambda: taken_up(history(client, run.id)))
        queued = self._resumes(client, run)
        if queued >= self.config.max_resumes or (seen.log and seen.log.status in OVER):
            self._settled.add(run.state_id)
        elif seen.verdict not in ("alive", "elsewhere") and claim(client, run.id, run.state_id, now):
            _end_tasks(client, run)
            often = f"{queued + 1} of {self.config.max_resumes}"
            _set(client, run, AwaitingRetry(message=f"{RESUMED} ({often}): goes on after the last finished stage"))

    def _resumes(self, client: SyncPrefectClient, run: FlowRun) -> int:
        return sum(1 for state in history(client, run.id) if (state.message or "").startswith(RESUMED))

    def _safely(self, act: Any, client: SyncPrefectClient, run: FlowRun, *told: Any) -> None:
        """One run that the server refuses to change, or that somebody deleted, does not keep the others from being looked at."""
        try:
            act(client, run, *told)
        except (httpx.HTTPStatusError, ObjectNotFound) as error:
            logging.warning("flow run %s: %s", run.id, error)


def taken_up(states: list[State[Any]]) -> float:
    """When the newest attempt began: a worker took the run up, or, without a worker, it started to run."""
    pending = [state.timestamp for state in states if state.is_pending()]
    running = [state.timestamp for state in states if state.is_running()]
    return float(max(pending).timestamp() if pending else min(running).timestamp() if running else 0.0)


def _set(client: SyncPrefectClient, run: FlowRun, state: State[Any]) -> bool:
    """Propose a state. Not forced: of a run that ended meanwhile the server says so, and its end stands."""
    answer = client.set_flow_run_state(run.id, state)
    done = bool(answer.status == SetStateStatus.ACCEPT)
    logging.info(
        "flow run %s (%s): %s %s", run.name, run.id, state.message, "" if done else f"[refused: {answer.details}]"
    )
    return done


def _end_tasks(client: SyncPrefectClient, run: FlowRun) -> None:
    """Task runs of a dead flow run are dead as well."""
    types = TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING])
    for task in client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=types)),
    ):
        client.set_task_run_state(task.id, Crashed(message="The process of its flow run is gone."), force=True)
