"""The table of docs/platform.md, "Whatever happens": each state of a flow run against each thing that happens to the platform.

On a real Prefect server with a real worker. Each test has a run in every state, lets one thing happen to all of them, or two that
do not hide each other, and lets everything come to its end. A flow writes down each start, each end, and whether another process
of its deployment was at work beside it; so a run that was lost, or was at work twice, is seen. What was told is read where people
read it: in the states of the run, which notifications are made of, and in the alerts. A day passes by making all that Prefect and
the home wrote down a day older.
"""

import importlib
import re
import sqlite3
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from live_prefect import environment, kill, lines, live, until
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilterDeploymentId
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_WORKER_PREFETCH_SECONDS
from prefect.states import AwaitingRetry, Paused, Scheduled
from waiting import limit

from deployments.catalogue.flows import POOL, Deployment, Schedule, slug_of
from deployments.configuration.platform import PlatformConfig, ScheduleConfig
from deployments.platform import start_stop
from deployments.services import registration
from deployments.services.flow_runs import flow_runs, history
from deployments.services.parts import worker
from deployments.watch.alerts import parts_down
from deployments.watch.dead_runs import PATIENCE_SECONDS, RESUMED, DeadRuns
from deployments.watch.schedules import Schedules
from flows.support.prefect_run import STOPPED
from tasks.common import process

FLOW = """
import os, time
from pathlib import Path
from types import SimpleNamespace
from prefect import flow
from prefect.runtime import flow_run
from flows.support.pause import Pause
from flows.support.prefect_run import cancelled, started_by
from tasks.common.errors import Cancelled, Suspended
from tasks.common.process import process_started
from tasks.orchestration.run_log import RunLog
from tasks.config.base import home


def note(folder, name, identity):
    with open(folder / name, "a") as file:
        file.write(f"{identity} {os.getpid()} {time.time()}\\n")


def rows(folder, name):
    return [line.split() for line in (folder / name).read_text().splitlines()] if (folder / name).exists() else []


@flow(name="staged")
def staged(folder: str, asks: bool = False):
    folder, me = Path(folder), str(flow_run.get_id())
    over = {row[1] for row in rows(folder, "ends")}
    if any(row[1] not in over and process_started(int(row[1])) is not None for row in rows(folder, "starts")):
        note(folder, "doubled", me)
    note(folder, "starts", me)
    run = SimpleNamespace(flow="staged", subject=folder.name, flow_run={"id": me}, config_digest="")
    log = RunLog(home(), me)
    with started_by("run", "staged"):
        log.opened(run)
        if asks:
            try:
                while Pause("test", "question", home()).turn("Go on?", time.time() + 86400) is None:
                    time.sleep(0.2)
            except Suspended:
                log.write("closed", status="waiting", seconds=1.0, error=None)
                raise
        while not asks and not (folder / "go").exists():
            if cancelled():
                raise Cancelled("the flow run was cancelled")
            time.sleep(0.1)
    note(folder, "ends", me)
    log.write("closed", status="completed", seconds=1.0, error=None)
"""
DAY, MINUTES = 86_400.0, 180.0
"""How long a `down` lasts. Three minutes: a time of a schedule, minutes ahead, passes meanwhile by less than the two of grace."""
PREFETCHED = int(PREFECT_WORKER_PREFETCH_SECONDS.value())
"""A worker starts a run so many seconds before its time: what is due sooner is at work already."""
STATES = ("running", "approval", "queued", "scheduled", "retrying", "paused", "deleted")
ANSWER = {"decision": "approve", "reason": "it is good", "person": "anna", "token": "", "question": "question"}


class Staged(Deployment):
    """A deployment of the catalogue, of the flow above."""

    @property
    def entrypoint(self):
        return "staged.staged"


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    with live(folder / "home") as made, pytest.MonkeyPatch.context() as patch:
        (folder / "modules" / "staged.py").write_text(FLOW)
        patch.syspath_prepend(str(folder / "modules"))
        patch.setitem(sys.modules, "flows.staged", importlib.import_module("staged"))
        made.start_worker()
        yield made


def at_minute(ahead, **told):
    """Settings with one schedule: every hour, first so many minutes from now."""
    minute = (datetime.now(UTC) + timedelta(minutes=ahead)).minute
    return PlatformConfig(schedules=(ScheduleConfig(deployment="staged/scheduled", cron=f"{minute} * * * *"),), **told)


class Table:
    """One run in every state, all in one home."""

    def __init__(self, platform, folder, *, minutes):
        self.platform, self.home, self.folder = platform, platform.home, folder
        self.runs, self.settings = {}, at_minute(minutes)
        self.happened = datetime.now(UTC)
        with platform.client() as client:
            self.register(client)
            self.arrange(client)

    def deployments(self):
        (schedule,) = self.settings.schedules
        made = Schedule(slug_of(schedule), schedule.cron, schedule.timezone, active=True)
        plain = {"flow": "staged", "description": "Waits.", "overlap": self.settings.overlap}
        for name in ("running", "approval", "scheduled", "retrying", "paused", "deleted"):
            told = {"folder": str(self.folder / name), "asks": name == "approval"}
            yield Staged(name=name, parameters=told, schedules=(made,) if name == "scheduled" else (), **plain)

    def register(self, client):
        """What `headway up` does before it starts the worker."""
        registration.register(client, list(self.deployments()))
        worker.allow(client, self.settings.parallel_runs)
        for one in self.deployments():
            self.platform.made[one.name] = client.read_deployment_by_name(one.full_name).id
        Schedules(self.home, self.settings).tick(client, time.time())

    def start(self, client, name, **told):
        return client.create_flow_run_from_deployment(self.platform.made[name], **told).id

    def starts(self, name):
        return lines(self.folder / name / "starts")

    def arrange(self, client):
        for name in self.platform.made:
            (self.folder / name).mkdir(parents=True)
        for name in ("scheduled", "retrying", "paused"):
            (self.folder / name / "go").touch()
        at_work = ("running", "approval", "deleted")
        self.runs = {name: self.start(client, name) for name in at_work}
        until(lambda: all(self.starts(name) for name in at_work))
        until(lambda: self.state(client, "approval").is_paused())
        client.delete_flow_run(self.runs["deleted"])
        self.runs["queued"] = self.start(client, "running")
        later = Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=1))
        for name in ("retrying", "paused"):
            self.runs[name] = self.start(client, name, state=later)
        week = Paused(timeout_seconds=int(7 * DAY), reschedule=True)
        week.name = "Suspended"
        client.set_flow_run_state(self.runs["paused"], week, force=True)
        until(lambda: self.state(client, "queued").name == "AwaitingConcurrencySlot")
        soon = datetime.now(UTC) + timedelta(seconds=PREFETCHED + 5)
        client.set_flow_run_state(
            self.runs["retrying"], AwaitingRetry(scheduled_time=soon, message=f"{RESUMED} (1 of 3)")
        )

    def state(self, client, name):
        return client.read_flow_run(self.runs[name]).state

    def of_schedule(self, client):
        of = FlowRunFilterDeploymentId(any_=[self.platform.made["scheduled"]])
        return sorted(flow_runs(client, *StateType, deployment_id=of), key=lambda run: run.expected_start_time)

    def end(self):
        """Let everything come to its end, with a watch that looks every two seconds; what is seen then, by state."""
        dead = DeadRuns(self.home, self.settings, patience=limit(PATIENCE_SECONDS))
        schedules = Schedules(self.home, self.settings)
        for name in ("running", "approval"):
            (self.folder / name / "go").touch()
        with self.platform.client() as client:

            def ended():
                dead.tick(client, time.time())
                schedules.tick(client, time.time())
                self.people(client)
                due = [run for run in self.of_schedule(client) if run.expected_start_time <= datetime.now(UTC)]
                final = all(self.state(client, name).is_final() for name in self.runs.keys() - {"deleted"})
                return final and all(run.state.is_final() for run in due) and not self.alive("deleted")

            until(ended, every=2.0, why=lambda: self.seen(client))
            return self.seen(client)

    def people(self, client):
        """Somebody approves what waits, and resumes what was paused."""
        for name, answer in (("approval", ANSWER), ("paused", None)):
            if self.state(client, name).is_paused():
                client.resume_flow_run(self.runs[name], run_input=answer)

    def alive(self, name):
        return any(process.process_started(int(row[1])) is not None for row in self.starts(name))

    def seen(self, client):
        return {name: self.cell(client, name) for name in STATES}

    def cell(self, client, name):
        """Of one state: starts and ends of its runs, whether any was at work beside another one, their ends, what was told."""
        if name == "scheduled":
            runs = [
                run
                for run in self.of_schedule(client)
                if run.expected_start_time <= self.happened or run.state.is_scheduled()
            ]
        else:
            runs = [run for run in flow_runs(client, *StateType) if run.id == self.runs[name]]
        mine, folder = {str(self.runs.get(name)), *(str(run.id) for run in runs)}, self.place(name)
        starts, ends, doubled = (
            sum(1 for row in lines(folder / file) if row[0] in mine) for file in ("starts", "ends", "doubled")
        )
        names = sorted({run.state.name for run in runs}) or ["gone"]
        told = sorted({word for run in runs for word in self.told(client, run.id)})
        words = [f"{starts} start(s), {ends} end(s)", *(["AT WORK TWICE"] if doubled else []), *names]
        return ", ".join(words) + (f" [{', '.join(told)}]" if told else "")

    def place(self, name):
        return self.folder / ("running" if name == "queued" else name)

    def told(self, client, run):
        """What the states of a run tell a reader of its page, and whoever is notified of crashes and failures."""
        for state in history(client, run):
            said = state.message or ""
            if state.type in (StateType.CRASHED, StateType.FAILED):
                yield "notified"
            for words, label in ((STOPPED, "stopped"), (RESUMED, "resumed"), ("Missed: ", "missed")):
                if said.startswith(words):
                    yield label


def worker_killed(table):
    """With its parent: else that starts it again at once. The watch tells of it, and starts it."""
    table.platform.kill_worker()
    with environment(table.platform.environment):
        assert "worker" in [part["name"] for part in parts_down(table.home)]
    table.platform.start_worker()


def machine_died(table):
    """Everything is killed at once: worker, the processes of the flow runs, the server."""
    flows = [int(row[1]) for name in ("running", "approval", "deleted") for row in table.starts(name)]
    handle = process.read_json(table.home / "prefect" / "handle.json")
    table.platform.kill_worker()
    for pid in [*flows, handle["pid"], *process.descendants(handle["pid"])]:
        kill(pid)
    until(lambda: not process.alive(handle))
    up(table)


def server_restarted(table):
    """Its parent starts it again."""
    handle = process.read_json(table.home / "prefect" / "handle.json")
    (server,) = process.descendants(handle["pid"])[:1]
    kill(server)
    until(lambda: process.descendants(handle["pid"])[:1] not in ([], [server]))
    table.platform.start_server()


def down_for(seconds, table):
    """In the day, the hour passes in which somebody was to resume a run that was paused."""
    with table.platform.client() as client:
        late = table.start(client, "paused", state=Scheduled(scheduled_time=datetime.now(UTC) + timedelta(hours=9)))
        client.set_flow_run_state(late, Paused(timeout_seconds=3600, reschedule=True), force=True)
    start_stop.down(table.home)
    older(table.home, seconds)
    up(table)
    with table.platform.client() as client:
        if seconds == DAY:
            until(lambda: set(table.told(client, late)) == {"notified"})
        else:
            assert client.read_flow_run(late).state.is_paused()


def up(table):
    """`headway up`, of what this home has."""
    table.platform.start_server()
    with table.platform.client() as client:
        table.register(client)
    table.platform.start_worker()


def older(home, seconds):
    """Make all that Prefect and the home wrote down about runs so many seconds older."""
    back = partial(STAMP.sub, lambda found: earlier(found[0], seconds))
    with sqlite3.connect(home / "prefect" / "prefect.db") as database:
        for table in ("flow_run", "flow_run_state", "task_run", "task_run_state"):
            names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            for row in database.execute(f"SELECT rowid, * FROM {table}").fetchall():
                new = {
                    name: back(v) for name, v in zip(names, row[1:], strict=True) if isinstance(v, str) and back(v) != v
                }
                if new:
                    sets = ", ".join(f'"{name}" = ?' for name in new)
                    database.execute(f"UPDATE {table} SET {sets} WHERE rowid = ?", [*new.values(), row[0]])
    database.close()
    for path in (*(home / "runs").glob("*/events.jsonl"), *(home / "platform" / "watch").glob("*.json")):
        path.write_text(SECONDS.sub(lambda found: f'"time": {float(found[1]) - seconds}', path.read_text()))


STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?")
SECONDS = re.compile(r'"time": (\d{10}\.?\d*)')


def earlier(stamp, seconds):
    """The same form: Prefect compares text."""
    form = f"%Y-%m-%d{stamp[10]}%H:%M:%S" + (".%f" if "." in stamp else "")
    return (datetime.strptime(stamp, form) - timedelta(seconds=seconds)).strftime(form)


def configured(table):
    """Everything that runs could notice: limits, what becomes of crashes, and of runs that overlap. A watch looks at it."""
    changed = {"parallel_runs": 3, "on_crash": "mark", "max_resumes": 0, "overlap": "refuse"}
    table.settings = table.settings.model_copy(update=changed)
    with table.platform.client() as client:
        table.register(client)
        until(lambda: table.state(client, "queued").is_cancelled())  # Prefect's doing; the watch has it wait
        dead = DeadRuns(table.home, table.settings)
        until(lambda: dead.tick(client, time.time()) or not table.state(client, "queued").is_cancelled())


def schedule_edited(table):
    """One time of it was missed a moment before."""
    with table.platform.client() as client:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
        hour = {
            "start_time": (datetime.now(UTC) - timedelta(hours=1)).isoformat(),
            "end_time": datetime.now(UTC).isoformat(),
        }
        path = f"/deployments/{table.platform.made['scheduled']}/schedule"
        client.request("POST", path, json={**hour, "min_runs": 1, "max_runs": 1}).raise_for_status()
        table.settings = at_minute(40)
        table.register(client)
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
        coming = [run.expected_start_time for run in table.of_schedule(client)][1:]
        assert {f"{when.minute} * * * *" for when in coming} == {table.settings.schedules[0].cron}
        assert len(coming) == len(set(coming)) > 0


def limit_reached(table):
    """As many are at work as may be, before the time of the retry comes."""
    table.settings = table.settings.model_copy(update={"parallel_runs": 1})
    with table.platform.client() as client:
        worker.allow(client, 1)
        time.sleep(PREFETCHED + 2)
        assert not table.starts("retrying"), "one at work is as many as may be"


GOES_ON = {
    "running": "1 start(s), 1 end(s), Completed",
    "approval": "2 start(s), 1 end(s), Completed",
    "queued": "1 start(s), 1 end(s), Completed",
    "scheduled": "0 start(s), 0 end(s), Scheduled",
    "retrying": "1 start(s), 1 end(s), Completed [resumed]",
    "paused": "1 start(s), 1 end(s), Completed",
    "deleted": "1 start(s), 0 end(s), gone",
}
AFTER_DOWN = {
    "running": "2 start(s), 1 end(s), Completed [stopped]",
    "scheduled": "1 start(s), 1 end(s), Completed, Scheduled",
}
AFTER_A_DAY = {**AFTER_DOWN, "scheduled": "1 start(s), 1 end(s), Cancelled, Completed, Scheduled [missed]"}


def one_after_the_other(*events):
    def all_of_them(table):
        for event in events:
            event(table)

    return all_of_them


EVENTS = {
    "worker killed": (worker_killed, {}),
    "machine died, schedule edited": (
        one_after_the_other(machine_died, schedule_edited),
        {
            "running": "2 start(s), 1 end(s), Completed [notified, resumed]",
            "scheduled": "1 start(s), 1 end(s), Completed, Scheduled",
        },
    ),
    "server restarted": (server_restarted, {}),
    "down for minutes": (partial(down_for, MINUTES), AFTER_DOWN),
    "up --config, down for a day": (one_after_the_other(configured, partial(down_for, DAY)), AFTER_A_DAY),
    "limit reached": (limit_reached, {}),
}
ALSO = {
    (event, state): f"2 start(s), 1 end(s), Completed [{told}]"
    for event in ("down for minutes", "up --config, down for a day")
    for state, told in (("queued", "stopped"), ("retrying", "resumed, stopped"))
}
"""It may have been taken up while `down` stopped the others, and was stopped like them."""
LONG = ("worker killed", "server restarted", "down for minutes", "limit reached")


@pytest.mark.parametrize(
    "event", [pytest.param(event, marks=pytest.mark.long if event in LONG else ()) for event in EVENTS]
)
def test_no_run_is_lost_and_none_doubled_and_somebody_is_told(platform, tmp_path, event):
    happens, differs = EVENTS[event]
    table = Table(platform, tmp_path, minutes=3 if event == "down for minutes" else 30)
    try:
        happens(table)
        table.happened = datetime.now(UTC)
        seen = table.end()
    finally:
        platform.start_server()
        platform.start_worker()
        platform.clear()
    expected = {**GOES_ON, **differs}
    wrong = {state: cell for state, cell in seen.items() if cell not in (expected[state], ALSO.get((event, state)))}
    assert wrong == {}, {state: expected[state] for state in wrong}
