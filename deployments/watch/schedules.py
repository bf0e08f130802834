"""Runs that schedules made: delayed by chance, and those that were missed. Prefect makes and starts them; this tends them.

Which schedule of the settings a run belongs to says the name that the schedule that made it has at Prefect now, so one that was
changed answers for the times before, too (deployments/services/registration.py). Runs of schedules that people made in Prefect's
page are left alone, and so is every run that was ever started.

**Missed** is a run that no worker looked at within two minutes of its time. One that a worker did look at in time waits for its
turn, however long: another run of its deployment is at work, or as many as may be at once. It is never cancelled. A worker's
first look is known from the run's states: it made the run Pending, or had it wait for a slot.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilterStartTime
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled

from deployments.catalogue.flows import OURS, POOL, by_slug
from deployments.configuration.platform import PlatformConfig, ScheduleConfig
from deployments.services.flow_runs import AT_WORK, at, flow_runs, history, untried
from tasks.common import process

MOST = 100
"""Times made up for after one silence."""
NOTED_EVERY_SECONDS = 30.0


class Backfill:
    """Times of schedules that passed while nothing ran, for schedules that make up for all of them (`missed: run_all`).

    Prefect makes a schedule's runs ahead of their time, three at least and one hour at least, and never for a time that is
    over. So after a longer silence there are fewer runs than times. The server is asked for the rest; it makes no run twice.
    State: a file that says when this was last called, so that a silence is known after it.
    """

    def __init__(self, home: Path, deployments: list[str]) -> None:
        self.path = home / "platform" / "watch" / "looked.json"
        self.deployments = sorted(set(deployments))

    def tick(self, client: SyncPrefectClient, now: float, grace: float) -> None:
        """Ask for the runs of a silence that just ended, if there was one."""
        last = float((process.read_json(self.path) or {}).get("time", now))
        if now - last > grace:
            start, end = (datetime.fromtimestamp(seconds, UTC).isoformat() for seconds in (last, now))
            between = {"start_time": start, "end_time": end, "min_runs": MOST, "max_runs": MOST}
            for name in self.deployments:
                made = client.read_deployment_by_name(name)
                # Prefect makes them for all schedules of a deployment: so not where a person added one that we know
                # nothing about.
                foreign = any(one.active and not (one.slug or "").startswith(OURS) for one in made.schedules)
                if not made.paused and not foreign:
                    path = {"id": made.id}
                    answer = client.request("POST", "/deployments/{id}/schedule", path_params=path, json=between)
                    answer.raise_for_status()
        if not self.path.exists() or abs(now - last) >= NOTED_EVERY_SECONDS:
            process.write_json(self.path, {"time": now})


GRACE_SECONDS = 120.0
"""A run that a worker looks at so long after its time was not missed."""
AHEAD_SECONDS = 15.0
"""A worker may take a run up ten seconds ahead of its time; one that is nearer is not delayed any more."""


PUT_OFF_SECONDS = 600.0
PUT_OFF = "Waits for an older time that is made up for first (missed: run_all)"


@dataclass(frozen=True)
class LateRun:
    """A scheduled run that should have started long ago."""

    deployment: str
    name: str
    expected: float
    """Its time, in seconds since the epoch."""


@dataclass(frozen=True)
class Waiting:
    """A run that has not started yet, with when it was due and when a worker first looked at it (None: none did)."""

    run: FlowRun
    schedule: str
    due: float
    tried: float | None

    def missed_by(self, now: float) -> float:
        """Seconds between its time and a worker's first look, or now."""
        return (now if self.tried is None else self.tried) - self.due


class Schedules:
    """State: of each run when it was due and first looked at, which does not change any more."""

    def __init__(self, home: Path, config: PlatformConfig) -> None:
        self.config = config
        self.schedules = by_slug(config)
        self._backfill = Backfill(home, [s.deployment for s in config.schedules if s.missed == "run_all" and s.active])
        self._slugs: dict[UUID, dict[UUID, str | None]] = {}
        """Of each deployment the names of its schedules, as this look found them."""
        self._tries: dict[UUID, tuple[float, float]] = {}

    def tick(self, client: SyncPrefectClient, now: float) -> None:
        """Delay what is to come, and settle what was missed. Before a worker starts, it is the same with nothing at work."""
        if not self.schedules:
            return
        self._backfill.tick(client, now, GRACE_SECONDS)
        waiting = self._waiting(client)
        for one in waiting:
            self._delay(client, one, now)
        self._keep_order(client, waiting, now)
        self._cap(client, waiting)
        missed = self._missed(client, waiting, now, GRACE_SECONDS)
        for slug in {one.schedule for one in missed}:
            self._settle(client, self.schedules[slug], [one for one in missed if one.schedule == slug])

    def late_runs(self, client: SyncPrefectClient, now: float) -> list[LateRun]:
        """Runs of schedules that were missed by more than `alerts.schedule_missed_minutes` and have not started yet."""
        if not self.schedules:
            return []
        late = self._missed(client, self._waiting(client), now, self.config.alerts.schedule_missed_minutes * 60)
        return [LateRun(self.schedules[one.schedule].deployment, one.run.name, one.due) for one in late]

    def _waiting(self, client: SyncPrefectClient) -> list[Waiting]:
        """Runs of our schedules that were never started."""
        result, self._slugs = [], {}
        for run in flow_runs(client, StateType.SCHEDULED, by_schedule=True):
            slug = self._slug(client, run)
            if slug is None or run.run_count or run.state is None:
                continue
            if untried(run.state):
                when = run.state.state_details.scheduled_time or run.expected_start_time
                result.append(Waiting(run, slug, when.timestamp(), None))
            else:
                due, tried = self._tries.get(run.id) or self._first_try(client, run)
                result.append(Waiting(run, slug, due, tried))
        self._tries = {one.run.id: (one.due, one.tried) for one in result if one.tried is not None}
        return result

    def _slug(self, client: SyncPrefectClient, run: FlowRun) -> str | None:
        """Name of the schedule of ours that made the run; None for another one's, or one of former settings."""
        if run.deployment_id is None or run.created_by is None or run.created_by.id is None:
            return None
        if run.deployment_id not in self._slugs:
            try:
                existing = client.read_deployment_schedules(run.deployment_id)
            except ObjectNotFound:  # it was deleted since, and its runs go with it
                existing = []
            self._slugs[run.deployment_id] = {schedule.id: schedule.slug for schedule in existing}
        slug = self._slugs[run.deployment_id].get(run.created_by.id)
        return slug if slug in self.schedules else None

    def _first_try(self, client: SyncPrefectClient, run: FlowRun) -> tuple[float, float]:
        """When it was due, and when a worker first looked at it."""
        due = run.expected_start_time.timestamp()
        for state in history(client, run.id):
            if not untried(state):
                return due, state.timestamp.timestamp()
            due = (state.state_details.scheduled_time or run.expected_start_time).timestamp()
        return due, due

    def _missed(self, client: SyncPrefectClient, waiting: list[Waiting], now: float, grace: float) -> list[Waiting]:
        """Those that nobody looked at in time. While as many runs are at work as may be, none of the untried counts."""
        late = [one for one in waiting if one.missed_by(now) > grace]
        if all(one.tried is not None for one in late):
            return late
        busy = sum(1 for run in flow_runs(client, *AT_WORK) if run.work_pool_name == POOL)
        if (
            busy >= self.config.parallel_runs
        ):  # the worker takes no further run up; those that wait for a person do not count
            return [one for one in late if one.tried is not None]
        return late

    def _delay(self, client: SyncPrefectClient, one: Waiting, now: float) -> None:
        """Move a run by a delay that depends on nothing but the run, once: afterwards its times differ."""
        delay = chance(one.run.id, self.schedules[one.schedule].jitter_seconds)
        expected = one.run.expected_start_time.timestamp()
        if not delay or one.tried is not None or one.due != expected or expected - now < AHEAD_SECONDS:
            return
        when = one.run.expected_start_time + timedelta(seconds=delay)
        message = f"{delay} s after {at(expected)}: delayed by chance, so that schedules do not all start at once"
        client.set_flow_run_state(one.run.id, Scheduled(scheduled_time=when, message=message))

    def _keep_order(self, client: SyncPrefectClient, waiting: list[Waiting], now: float) -> None:
        """Of the times that a deployment makes up for, have only the oldest ask for its slot: Prefect gives it to any of them.

        The others are put off, for so long that they start by themselves when no watch lives.
        """
        due: dict[UUID | None, list[FlowRun]] = defaultdict(list)
        for one in waiting:
            if self.schedules[one.schedule].missed == "run_all" and one.run.expected_start_time.timestamp() <= now:
                due[one.run.deployment_id].append(one.run)
        for runs in due.values():
            first, *others = sorted(runs, key=lambda run: run.expected_start_time)
            if first.state and first.state.message == PUT_OFF:
                _put(client, first, now, "Its turn")
            for run in others:
                when = run.next_scheduled_start_time
                if when is None or when.timestamp() < now + PUT_OFF_SECONDS / 2:
                    _put(client, run, now + PUT_OFF_SECONDS, PUT_OFF)

    def _cap(self, client: SyncPrefectClient, waiting: list[Waiting]) -> None:
        """Cancel the newest of too many runs that wait for the slot of their deployment."""
        queued: dict[UUID | None, list[Waiting]] = defaultdict(list)
        for one in sorted(waiting, key=lambda one: one.due):
            if one.tried is not None and self.schedules[one.schedule].missed != "run_all":
                queued[one.run.deployment_id].append(one)
        for runs in queued.values():
            for one in runs[self.config.queued_runs :]:
                _cancel(client, one, f"As many as may be wait already (queued_runs: {self.config.queued_runs})")

    def _settle(self, client: SyncPrefectClient, schedule: ScheduleConfig, missed: list[Waiting]) -> None:
        """Cancel what the schedule's `missed` says, of the runs of one schedule."""
        if schedule.missed == "run_all":
            return
        newest = max(missed, key=lambda one: one.due)
        keep = schedule.missed == "run_once"
        if keep:
            # Not when a run of the same schedule was started after the newest time that was missed, or is being started.
            since = FlowRunFilterStartTime(after_=datetime.fromtimestamp(newest.due, UTC))
            ended = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED)
            begun = flow_runs(client, *AT_WORK, StateType.PAUSED, *ended, by_schedule=True, start_time=since)
            starting = [run for run in flow_runs(client, StateType.PENDING, by_schedule=True) if not run.run_count]
            keep = all(self._slug(client, run) != newest.schedule for run in [*begun, *starting])
        for one in missed:
            if not (keep and one is newest):
                _cancel(client, one, f"Missed: nothing ran at its time, {at(one.due)} (missed: {schedule.missed})")


def chance(run: UUID, most: int) -> int:
    """Seconds of delay of a run, from 0 to the most: even over runs, and the same however often it is asked."""
    return int.from_bytes(hashlib.sha256(run.bytes).digest()[:8], "big") % (most + 1)


def _put(client: SyncPrefectClient, run: FlowRun, when: float, message: str) -> None:
    """Give a run another time, unless a worker took it up a moment ago."""
    now = client.read_flow_run(run.id)
    if now.state is not None and now.state.is_scheduled() and not now.run_count:
        state = Scheduled(scheduled_time=datetime.fromtimestamp(when, UTC), message=message)
        client.set_flow_run_state(run.id, state)


def _cancel(client: SyncPrefectClient, one: Waiting, message: str) -> None:
    """Cancel a run, unless a worker took it up a moment ago."""
    now = client.read_flow_run(one.run.id)
    if now.state is not None and now.state.is_scheduled() and not now.run_count:
        client.set_flow_run_state(one.run.id, Cancelled(message=message))
        logging.info("flow run %s of %s: %s", one.run.name, one.schedule, message)
