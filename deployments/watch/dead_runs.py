"""Flow runs that stopped before their end: they are given their true end, and resumed where the settings say so.

When a worker dies with them, Prefect leaves such runs Running, Cancelling or Pending for ever. This file judges whether a run's
process lives, and corrects the slots of deployments; which watch acts when several see the same run is `claim` of
deployments/services/flow_runs.py. Finished stages do not run again: their records are reused (tasks/orchestration/stage.py).
Dead jobs are handled by the compute backends.

A run is resumed a limited number of times. Not counted are runs that `headway down` stopped, runs that a worker had only taken
up when the platform stopped, and runs that were at work before and lost their slot to another run meanwhile: these always go
on.

Only runs of this platform are touched: those of our work pool whose worker was on this host, or on a host of the same store that
is gone (hosts.py), and those of this home's command line. A run from the command line that dies before it opened its folder
(runs/ID) cannot be attributed to a home, and is left alone.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Completed, Crashed, Failed, Scheduled

from deployments.catalogue.flows import POOL, REFUSED
from deployments.configuration.platform import PlatformConfig
from deployments.services.flow_runs import AT_WORK, KEPT, at, claim, flow_runs, history
from deployments.services.parts import LAST_LOOK, WORKER
from deployments.watch.hosts import Hosts
from flows.support.prefect_run import STOPPED
from tasks.common import process
from tasks.orchestration.run_log import LoggedRun, read_run


@dataclass(frozen=True)
class Sighting:
    """What is seen of a flow run's process."""

    verdict: Literal["alive", "gone", "unclear", "elsewhere"]
    """unclear: none was found, but one may be about to start. elsewhere: another host's, or nobody can tell whose."""
    words: str = ""
    log: LoggedRun | None = None
    """What this very attempt wrote down; None when it did not come so far."""
    host: str | None = None
    """The other host where it was."""


def look(home: Path, run: FlowRun, began: Callable[[], float]) -> Sighting:
    """Look for the process of a flow run, from this host. `began` tells when its newest attempt was taken up; it is asked
    only when needed. Nothing is changed.

    Prefect stores a bare process number and no host (`infrastructure_pid`). So three things are combined: `handle.json` of the
    run's folder (process, start time, boot, host), which is certain; the worker's name on the flow run, which holds the host
    (deployments/services/parts.py); and the environment of the process with Prefect's number, which names the flow run. A
    handle that is older than that belongs to an earlier attempt of the same flow run, and says nothing about this one.
    """
    hostname = socket.gethostname()
    log = read_run(home / "runs" / str(run.id))
    logged_here = log.handle.get("host") == hostname
    host = worker_host(run) or log.handle.get("host")
    if host not in (None, hostname):
        return Sighting("elsewhere", f"it ran on {host}", host=host)
    if logged_here and process.alive(log.handle):
        return Sighting("alive")
    opened = log.last("opened")
    if logged_here and opened and opened["time"] >= began():
        started, ended = log.last("started"), log.last("ended")
        at_work = started is not None and (not ended or ended["time"] < started["time"])
        where = f", in {started['stage']}" if started and at_work else ""
        sign = f"last sign of life {at(log.events[-1]['time'])}{where}"
        return Sighting("gone", f"its process {log.handle['pid']} on {hostname} is gone ({sign})", log)
    if run.infrastructure_pid and _works_on(run.infrastructure_pid, run):
        return Sighting("alive")
    if host is None and not (run.state and run.state.is_pending()):
        return Sighting("elsewhere", "nobody knows where it ran")
    if run.infrastructure_pid:
        return Sighting("unclear", f"its process {run.infrastructure_pid} on {hostname} is gone")
    return Sighting("unclear", "the worker died before it started a process")


def worker_host(run: FlowRun) -> str | None:
    """The host of the worker that took the flow run up; None when none of ours did."""
    name = str((run.labels or {}).get("prefect.worker.name", ""))
    return name.removeprefix(WORKER) if name.startswith(WORKER) else None


def _works_on(pid: str, run: FlowRun) -> bool:
    """Whether the process works on this flow run; process numbers are reused, so its environment is asked where it can be."""
    if not pid.isdecimal() or process.process_started(int(pid)) is None:
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return not Path("/proc/self/environ").exists()
    return f"PREFECT__FLOW_RUN_ID={run.id}".encode() in environment.split(b"\0")


Seen = dict[UUID, tuple[int, frozenset[UUID]]]
"""Of each deployment whose count is wrong: the count, and the states of the runs at work."""


class Slots:
    """Corrects the slots of deployments: as many are taken as runs are at work.

    Prefect counts slots up and down as states change, and can miscount: a run whose lease ran out gives its slot back once when
    it runs out and once more when the run ends; a run that goes on after a pause takes none. Then a run waits for a slot that
    nobody holds, or two are at work at once. State: what was wrong at the last look; only what is still wrong in the same way
    at the next look is corrected.
    """

    def __init__(self) -> None:
        self._seen: Seen = {}

    def tick(self, client: SyncPrefectClient) -> None:
        """Correct the counts."""
        states = defaultdict(set)
        for run in flow_runs(client, *AT_WORK):
            states[run.deployment_id].add(run.state_id)
        seen: Seen = {}
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
        for deployment in client.read_deployments(work_pool_filter=pool):
            limit, holders = deployment.global_concurrency_limit, frozenset(states[deployment.id])
            if limit is None or limit.active_slots == len(holders):
                continue
            seen[deployment.id] = (limit.active_slots, holders)
            if self._seen.get(deployment.id) == seen[deployment.id]:
                client.update_global_concurrency_limit(
                    name=limit.name, concurrency_limit=GlobalConcurrencyLimitUpdate(active_slots=len(holders))
                )
                logging.info("%s: %s slots were taken, by %s runs", limit.name, limit.active_slots, len(holders))
        self._seen = seen


CONFIRM_SECONDS = 2.0
"""A death is acted on when it is still seen so long after the first look: a worker that lives tells of it itself, in 0.2 s."""
PATIENCE_SECONDS = 45.0
"""A run without a process may still be about to get one for so long."""
RESUME_SECONDS = 3600.0
"""Runs that crashed before this are history: a changed setting does not bring them back. Time in which nobody watched is none."""
NOTED_EVERY_SECONDS = 30.0
RESUMED = "Taken up again"
"""How the message of every state begins that this duty queued; they are counted."""
WAITS = "AwaitingSlot"
"""The state of a run that was at work before, and waits until nobody holds the slot of its deployment."""
SOME_DAY = timedelta(days=3650)
"""No worker takes up what is scheduled for then."""
OVER = ("failed", "gate_closed")
"""Ends that a flow wrote down itself, and that come back however often it is started."""


class DeadRuns:
    """State: which deaths were seen at the last look and since when, which ended runs are settled, and when somebody last
    looked, in a file."""

    def __init__(
        self, home: Path, config: PlatformConfig, hosts: Hosts | None = None, *, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.home, self.config, self.patience, self._hosts = home, config, patience, hosts or Hosts(home)
        self._suspects: dict[UUID, float] = {}
        self._settled: set[UUID] = set()
        self._slots = Slots()
        self._looked = home / LAST_LOOK
        self._began = self._noted = 0.0
        self._unwatched = 0.0

    def tick(self, client: SyncPrefectClient, now: float) -> None:
        """Look once. A death is acted on at the second look that sees it, two seconds or more after the first."""
        # The time from which on ends are looked at: an hour ago, and the time before this watch when nobody looked is
        # none.
        if not self._began:
            last = float((process.read_json(self._looked) or {}).get("time", now))
            self._began, self._unwatched = now, max(0.0, now - last)
        if abs(now - self._noted) >= NOTED_EVERY_SECONDS:
            self._noted = now
            process.write_json(self._looked, {"time": now})
        since = now - RESUME_SECONDS - (self._unwatched if now - self._began < RESUME_SECONDS else 0.0)
        suspects: dict[UUID, float] = {}
        for run in flow_runs(client, *AT_WORK, StateType.PAUSED):
            seen = self._dead(client, run, now)
            if seen is None or run.state_id is None:
                continue
            suspects[run.state_id] = self._suspects.get(run.state_id, time.monotonic())
            if time.monotonic() - suspects[run.state_id] >= CONFIRM_SECONDS:
                self._safely(self._end, client, run, now, seen)
        self._suspects = suspects
        for run in self._ended(client, StateType.CRASHED, now, since):
            self._safely(self._resume, client, run, now)
        for run in self._ended(client, StateType.CANCELLED, now, since):
            self._safely(self._keep, client, run, now)
        for run in flow_runs(client, StateType.SCHEDULED, named="AwaitingRetry"):
            self._safely(self._hasten, client, run, now)
        for run in flow_runs(client, StateType.SCHEDULED, named=WAITS):
            self._safely(self._put_back, client, run, now)
        self._slots.tick(client)

    def _dead(self, client: SyncPrefectClient, run: FlowRun, now: float) -> Sighting | None:
        """What tells that nobody works on the run; None when somebody does, may soon, or when it is not ours to judge."""
        state = run.state
        ours = run.work_pool_name == POOL or (self.home / "runs" / str(run.id)).exists()
        if not ours or state is None or (state.is_paused() and state.state_details.pause_reschedule):
            return None
        seen = self._look(client, run)
        waited = abs(now - state.timestamp.timestamp())
        if seen.verdict == "gone" or (seen.verdict == "unclear" and waited >= self.patience):
            return seen
        return None

    def _look(self, client: SyncPrefectClient, run: FlowRun) -> Sighting:
        """What is seen of the run from this host; and of one of a host that is gone, if it is ours to act for all."""
        seen = look(self.home, run, lambda: taken_up(history(client, run.id)))
        if seen.verdict != "elsewhere" or seen.host is None or not self._hosts.act():
            return seen
        if self._hosts.gone(seen.host, str(run.id)):
            return Sighting("gone", f"its host {seen.host} is gone", host=seen.host)
        return seen

    def _end(self, client: SyncPrefectClient, run: FlowRun, now: float, seen: Sighting) -> None:
        """Give a dead run its true end: the one that it wrote down, or cancelled, queued again, or crashed."""
        assert run.state_id is not None, "a run without a state is not judged"
        if not claim(client, run.id, run.state_id, now):
            return
        queued = self._resumes(client, run)
        never_began = run.deployment_id is not None and run.state is not None and run.state.is_pending()
        if run.deployment_id is not None and _planned(seen) and not (run.state and run.state.is_cancelling()):
            state = AwaitingRetry(message=f"{STOPPED}: continues after the last finished stage")
        elif never_began and run.state is not None and run.state.timestamp.timestamp() < self._began:
            state = AwaitingRetry(message=f"Nothing had begun when the platform stopped: {seen.words}")
        elif never_began and queued < max(self.config.max_resumes, 1):
            state = AwaitingRetry(message=f"{RESUMED}: {seen.words}, so nothing had begun ({at(now)})")
        else:
            state = self._true_end(run, now, seen, queued)
        if _set(client, run, state) and state.is_final():
            _end_tasks(client, run)
        if state.is_crashed():
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
        if run.deployment_id is None:
            advice = "The same command continues after the last finished stage."
        elif self.config.on_crash == "mark":
            advice = "Retry continues after the last finished stage."
        elif queued >= self.config.max_resumes:
            again = "See its logs; Retry continues after the last finished stage."
            advice = f"It was resumed {queued} times already. {again}"
        else:
            advice = "It is resumed."
        return Crashed(message=f"Crashed: {seen.words}; found {at(now)}. {advice}")

    def _ended(self, client: SyncPrefectClient, how: StateType, now: float, since: float) -> list[FlowRun]:
        """Runs that ended so, as others said: a worker tells twice, so the first seconds are left to it."""
        after = FlowRunFilterEndTime(after_=datetime.fromtimestamp(since, UTC))
        return [
            run
            for run in flow_runs(client, how, end_time=after)
            if run.state is not None
            and run.state_id not in self._settled
            and abs(now - run.state.timestamp.timestamp()) >= CONFIRM_SECONDS
        ]

    def _resume(self, client: SyncPrefectClient, run: FlowRun, now: float) -> None:
        """Queue a crashed run of a deployment again, as the same flow run, unless that was done often enough."""
        if not _ours(run) or run.state_id is None or run.state_id in self._settled:
            return
        seen = self._look(client, run)
        queued = self._resumes(client, run)
        how = STOPPED if _planned(seen) else f"{RESUMED} ({queued + 1} of {self.config.max_resumes})"
        often_enough = self.config.on_crash == "mark" or queued >= self.config.max_resumes
        if (often_enough and not _planned(seen)) or (seen.log and seen.log.status in OVER):
            self._settled.add(run.state_id)
        elif seen.verdict not in ("alive", "elsewhere") and claim(client, run.id, run.state_id, now):
            _end_tasks(client, run)
            _set(client, run, AwaitingRetry(message=f"{how}: continues after the last finished stage"))

    def _keep(self, client: SyncPrefectClient, run: FlowRun, now: float) -> None:
        """Have a run that was at work before, and that a limit cancelled when it was to go on, wait for its slot instead."""
        assert run.state is not None and run.state_id is not None, "it was asked for by its state"
        refused = _ours(run) and (run.state.message or "").startswith(REFUSED)
        if not refused or not any(_began(state) for state in history(client, run.id)):
            self._settled.add(run.state_id)
        elif claim(client, run.id, run.state_id, now):
            waits = "another run of its deployment is active; this one continues when that one has ended"
            when = datetime.fromtimestamp(now, UTC) + SOME_DAY
            _set(client, run, Scheduled(name=WAITS, scheduled_time=when, message=f"It waits: {waits}"))

    def _put_back(self, client: SyncPrefectClient, run: FlowRun, now: float) -> None:
        """Queue a run that waits for the slot of its deployment once that is free."""
        assert run.state_id is not None, "it was asked for by its state"
        if not _ours(run):
            return
        limit = client.read_deployment(run.deployment_id).global_concurrency_limit
        if (limit is None or limit.active_slots < limit.limit) and claim(client, run.id, run.state_id, now):
            _set(client, run, AwaitingRetry(message="The slot of its deployment is free: it continues"))

    def _hasten(self, client: SyncPrefectClient, run: FlowRun, now: float) -> None:
        """A run that `headway down` put off until its worker is gone: we are there again, so it need not wait any longer."""
        state = run.state
        when = state.state_details.scheduled_time if state else None
        put_off = when is not None and when.timestamp() > now and (state.message or "").startswith(STOPPED)
        is_local = (self.home / "runs" / str(run.id)).exists()
        if is_local and put_off and run.state_id is not None and claim(client, run.id, run.state_id, now):
            _set(client, run, AwaitingRetry(message=state.message))

    def _resumes(self, client: SyncPrefectClient, run: FlowRun) -> int:
        return sum(1 for state in history(client, run.id) if (state.message or "").startswith(RESUMED))

    def _safely(self, act: Any, client: SyncPrefectClient, run: FlowRun, *payload: Any) -> None:
        """One run that the server refuses to change, or that somebody deleted, does not keep the others from being looked at."""
        try:
            act(client, run, *payload)
        except (httpx.HTTPStatusError, ObjectNotFound) as error:
            logging.warning("flow run %s: %s", run.id, error)


def _ours(run: FlowRun) -> bool:
    return bool(run.work_pool_name == POOL and run.deployment_id is not None)


def _planned(seen: Sighting) -> bool:
    """Whether it is `headway down` that the run stopped for; it may have been about to wait without a process."""
    return seen.log is not None and (
        seen.log.status == "stopped" or (seen.log.stopped and seen.log.status == "waiting")
    )


def _began(state: State[Any]) -> bool:
    """Whether a state tells that its run was at work, or was to be, or was let wait for the slot (`overlap: queue`), before."""
    queued = state.name == "AwaitingConcurrencySlot" and state.message != KEPT
    return bool(queued or state.is_running() or (state.message or "").startswith((RESUMED, STOPPED)))


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
