"""Schedules on a real Prefect server: delayed by chance, missed, late, and with a real worker: fired, one run at a time.

Runs of times that are over are made by Prefect itself, by the call that its own scheduler makes for times to come.
"""

import sys
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from live_prefect import lines, live, until
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilterDeploymentId
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.context import _deployment_id
from prefect.exceptions import PrefectHTTPStatusError
from prefect.server.schemas.schedules import CronSchedule as ServerCron
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Paused, Pending, Running, Scheduled
from prefect.workers.process import ProcessWorker

from deployments.catalogue.flows import POOL, catalogue, parameters, slug_of
from deployments.configuration.platform import PlatformConfig, ScheduleConfig
from deployments.services import registration
from deployments.services.flow_runs import flow_runs, history
from deployments.services.prefect_server import password
from deployments.watch.schedules import AHEAD_SECONDS, GRACE_SECONDS, PUT_OFF, Schedules, chance
from flows.support.inputs import configured
from tasks.common import process
from tasks.config.flows import RetrainConfig

EVERY_STATE = tuple(StateType)


@cache
def hourly():
    """Half an hour from the first test that asks: no run becomes due while these tests look, which may be long after import."""
    return f"{(datetime.now(UTC).minute + 30) % 60} * * * *"


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with live(tmp_path_factory.mktemp("schedules") / "home") as made:
        yield made


@pytest.fixture
def client(platform):
    """A client; the deployments that a test made go with their scheduled runs, so that no other test's look reads them."""
    with platform.client() as made:
        yield made
        while platform.made:
            made.delete_deployment(platform.made.popitem()[1])


def scheduled(platform, client, name, *, rule=None, slug=None, parameters=None, **told):
    """A deployment with one schedule, and the settings that belong to it."""
    rule = rule or CronSchedule(cron=hourly(), timezone="UTC")
    settings = ScheduleConfig(deployment=f"probe/{name}", cron=hourly(), **told)
    made = DeploymentScheduleCreate(schedule=rule, slug=slug or slug_of(settings), parameters=parameters or {})
    client.create_deployment_schedules(platform.deployment(client, name), [made])
    return PlatformConfig(schedules=(settings,))


def passed(platform, client, name, hours=5):
    """Let hours have passed in which nothing ran; returns the ids of their runs, oldest first."""
    until_now = datetime.now(UTC)
    make_runs(platform, client, name, until_now - timedelta(hours=hours), until_now, 100)
    return [run.id for run in runs(platform, client, name) if run.expected_start_time <= until_now]


def coming(platform, client, name):
    """The ids of the next three runs: as Prefect's scheduler makes them, which looks only every few seconds."""
    now = datetime.now(UTC)
    make_runs(platform, client, name, now, now + timedelta(hours=3), 3)
    return [run.id for run in runs(platform, client, name) if run.expected_start_time > now]


def make_runs(platform, client, name, start, end, count):
    told = {"start_time": start.isoformat(), "end_time": end.isoformat(), "min_runs": count, "max_runs": count}
    client.request("POST", f"/deployments/{platform.made[name]}/schedule", json=told).raise_for_status()


def runs(platform, client, name):
    """All runs of a deployment, in the order of their times."""
    of = FlowRunFilterDeploymentId(any_=[platform.made[name]])
    return sorted(flow_runs(client, *EVERY_STATE, deployment_id=of), key=lambda run: run.expected_start_time)


def names(client, ids):
    return [client.read_flow_run(run).state.name for run in ids]


def tended(platform, client, config, now=None):
    """One turn of a watch of its own."""
    Schedules(platform.home, config).tick(client, now or time.time())


def test_a_deployment_that_is_deleted_while_its_runs_are_looked_at_ends_no_look(platform, client, monkeypatch):
    config = scheduled(platform, client, "deleted", missed="skip")
    passed(platform, client, "deleted")
    read = client.read_deployment_schedules

    def read_too_late(deployment):
        if deployment == platform.made["deleted"]:
            client.delete_deployment(deployment)
        return read(deployment)

    monkeypatch.setattr(client, "read_deployment_schedules", read_too_late)
    tended(platform, client, config)
    assert runs(platform, client, "deleted") == []
    del platform.made["deleted"]


@pytest.mark.parametrize(("missed", "kept"), [("skip", 0), ("run_once", 1), ("run_all", 5)])
def test_what_was_missed(platform, client, missed, kept):
    """None, the newest, or all remain; the next ones, whose time is to come, always do; another look changes nothing."""
    config = scheduled(platform, client, missed, missed=missed)
    over = passed(platform, client, missed)
    later = coming(platform, client, missed)
    tended(platform, client, config)
    first = names(client, over)
    assert [name == "Cancelled" for name in first] == [True] * (len(over) - kept) + [False] * kept
    assert len(later) == 3 and set(names(client, later)) == {"Scheduled"}
    tended(platform, client, config)
    assert names(client, over).count("Cancelled") == len(over) - kept
    if missed != "run_all":
        assert f"(missed: {missed})" in client.read_flow_run(over[0]).state.message


def test_a_missed_run_that_a_worker_was_quicker_to_start_is_the_one(platform, client):
    config = scheduled(platform, client, "quicker", missed="run_once")
    over = passed(platform, client, "quicker")
    client.set_flow_run_state(over[0], Pending())
    client.set_flow_run_state(over[0], Running())
    tended(platform, client, config)
    assert names(client, over) == ["Running"] + ["Cancelled"] * 4
    client.delete_flow_run(over[0])


def test_runs_that_wait_for_their_turn_were_not_missed(platform, client):
    """One was looked at in time, and waits behind another; one was looked at hours too late, for nothing ran."""
    config = scheduled(platform, client, "turn", missed="skip")
    over = passed(platform, client, "turn", hours=3)
    busy = platform.taken_up(client, "turn", platform.home)
    client.set_flow_run_state(busy, Running())
    client.set_flow_run_state(over[0], Scheduled(scheduled_time=datetime.now(UTC)))
    for run in over[:2]:
        client.set_flow_run_state(run, Pending())
    assert names(client, over[:2]) == ["AwaitingConcurrencySlot"] * 2
    tended(platform, client, config, time.time() + 3 * 3600)
    assert names(client, over) == ["AwaitingConcurrencySlot", "Cancelled", "Cancelled"]
    client.delete_flow_run(busy)


def test_of_more_queued_runs_than_may_wait_the_newest_are_cancelled(platform, client):
    config = scheduled(platform, client, "cap").model_copy(update={"queued_runs": 2})
    over = passed(platform, client, "cap", hours=4)
    busy = platform.taken_up(client, "cap", platform.home)
    client.set_flow_run_state(busy, Running())
    for run in over:
        client.set_flow_run_state(run, Scheduled(scheduled_time=datetime.now(UTC)))
        client.set_flow_run_state(run, Pending())
    tended(platform, client, config)
    assert names(client, over) == ["AwaitingConcurrencySlot"] * 2 + ["Cancelled"] * 2
    assert "queued_runs: 2" in client.read_flow_run(over[-1]).state.message
    client.delete_flow_run(busy)


def test_prefects_database_forgets_flow_runs_too(client):
    """By default it forgets events alone."""
    told = client.request("GET", "/admin/settings").json()["server"]["services"]["db_vacuum"]
    assert "flow_runs" in told["enabled"]


def test_while_as_many_are_at_work_as_may_be_none_was_missed(platform, client):
    config = scheduled(platform, client, "full", missed="skip").model_copy(update={"parallel_runs": 1})
    over = passed(platform, client, "full", hours=2)
    busy = platform.taken_up(client, "full", platform.home)
    tended(platform, client, config)
    assert "Cancelled" not in names(client, over)
    assert Schedules(platform.home, config).late_runs(client, time.time()) == []
    client.set_flow_run_state(busy, Running())
    client.set_flow_run_state(busy, Paused(timeout_seconds=600))
    assert Schedules(platform.home, config).late_runs(client, time.time()), "who waits for a person is not at work"
    client.delete_flow_run(busy)
    tended(platform, client, config)
    assert names(client, over) == ["Cancelled"] * 2


def test_schedules_of_people_are_left_alone(platform, client):
    scheduled(platform, client, "theirs", slug="by-hand", missed="skip")
    over = passed(platform, client, "theirs", hours=2)
    config = PlatformConfig(schedules=(ScheduleConfig(deployment="probe/theirs", cron=hourly(), missed="skip"),))
    tended(platform, client, config)
    assert "Cancelled" not in names(client, over)


def test_jitter_is_given_once(platform, client):
    """Every coming run is delayed by its own chance; another watch, or another look, delays it no further."""
    config = scheduled(platform, client, "jitter", jitter_seconds=600)
    coming(platform, client, "jitter")
    for _ in range(2):
        tended(platform, client, config)
    for run in runs(platform, client, "jitter"):
        delay = (run.next_scheduled_start_time - run.expected_start_time).total_seconds()
        assert delay == chance(run.id, 600) or (run.expected_start_time.timestamp() - time.time()) < AHEAD_SECONDS
        assert len(history(client, run.id)) == (2 if delay else 1)
    late = max(run.next_scheduled_start_time for run in runs(platform, client, "jitter")).timestamp()
    told = Schedules(platform.home, config).late_runs(client, late + config.alerts.schedule_missed_minutes * 60 - 1)
    assert len(told) == len(runs(platform, client, "jitter")) - 1, "lateness counts from the delayed time"


def test_chance_is_even():
    delays = [chance(uuid4(), 9) for _ in range(2000)]
    assert {min(delays), max(delays)} == {0, 9}
    assert all(120 < delays.count(value) < 280 for value in range(10))


def test_late_runs(platform, client):
    """What is told to alerts: missed by more than the limit, and still to start."""
    config = scheduled(platform, client, "late", missed="run_once")
    over = passed(platform, client, "late", hours=2)
    newest = client.read_flow_run(over[-1])
    duty, due = Schedules(platform.home, config), newest.expected_start_time.timestamp()
    duty.tick(client, time.time() + GRACE_SECONDS)
    assert duty.late_runs(client, due + 599) == []
    (told,) = duty.late_runs(client, due + 601)
    assert (told.deployment, told.name, told.expected) == ("probe/late", newest.name, due)


def test_the_clock_jumped(platform, client):
    """Forwards, the hours that were skipped are missed like others. Back again, nothing happens."""
    config = scheduled(platform, client, "clock", missed="run_once")
    later = coming(platform, client, "clock")
    tended(platform, client, config, time.time() - 86400)
    assert set(names(client, later)) == {"Scheduled"}
    tended(platform, client, config, time.time() + 86400 * 5)
    assert names(client, later) == ["Cancelled"] * 2 + ["Scheduled"]
    tended(platform, client, config)
    assert names(client, later)[-1] == "Scheduled"


def test_all_times_of_a_long_silence(platform, client):
    """Prefect made three runs ahead; the others of the silence are made afterwards, once, and only where all are wanted."""
    config = scheduled(platform, client, "silence", missed="run_all")
    coming(platform, client, "silence")
    process.write_json(platform.home / "platform" / "watch" / "looked.json", {"time": time.time() - 12 * 3600})
    now = datetime.now(UTC)
    for _ in range(2):
        tended(platform, client, config)
        over = [run for run in runs(platform, client, "silence") if run.expected_start_time <= now]
        assert len(over) == 12
        assert {run.created_by.display_value for run in over} == {slug_of(config.schedules[0])}


BERLIN = ZoneInfo("Europe/Berlin")
NO_HALF_PAST_TWO = "2027-03-28T03:30:00+02:00" if sys.version_info >= (3, 13) else "2027-03-28T01:30:00+01:00"


@pytest.mark.parametrize(
    ("day", "fires"),
    [
        pytest.param(datetime(2027, 3, 28, tzinfo=BERLIN), NO_HALF_PAST_TWO, id="there is no 02:30"),
        pytest.param(datetime(2026, 10, 25, tzinfo=BERLIN), "2026-10-25T02:30:00+02:00", id="02:30 comes twice"),
    ],
)
def test_days_when_clocks_change(day, fires):
    """As docs/schedules.md says: once on each of the days, whenever Prefect's scheduler looks ahead."""
    rule = ServerCron(cron="30 2 * * *", timezone="Europe/Berlin")
    looks = [day.astimezone(UTC) + timedelta(minutes=15 * step) for step in range(-40, 60)]
    found = {next(iter(rule._get_dates_generator(n=1, start=look))).astimezone(BERLIN) for look in looks}
    assert [when.isoformat() for when in sorted(found) if when.date() == day.date()] == [fires]


def registered(platform, client, *schedules):
    """Register one deployment of the catalogue with these schedules, as `headway up` does; returns when that began."""
    config = PlatformConfig(schedules=tuple(ScheduleConfig(deployment="watch/tiny", **told) for told in schedules))
    began = datetime.now(UTC)
    registration.register(client, [one for one in catalogue(config) if one.full_name == "watch/tiny"])
    platform.made["registered"] = client.read_deployment_by_name("watch/tiny").id
    return config, began


def test_changed_and_removed_schedules_cost_no_run_of_any_other_and_say_what_became_of_theirs(platform, client):
    """What was missed is settled by the settings of now; what is delayed by chance stays; what is to come is there at once."""
    minute = datetime.now(UTC).minute
    edited, same = ({"cron": f"{(minute + ahead) % 60} * * * *"} for ahead in (20, 30))
    registered(platform, client, edited, same)
    over = passed(platform, client, "registered", hours=3)
    mine = {run.id: run.created_by.display_value for run in runs(platform, client, "registered")}
    of_same = [run for run in over if mine[run] == slug_of(ScheduleConfig(deployment="watch/tiny", **same))]
    of_edited = [run for run in over if run not in of_same]
    assert (len(of_edited), len(of_same)) == (3, 3)
    later = datetime.now(UTC) + timedelta(minutes=9)
    client.set_flow_run_state(of_same[-1], Scheduled(scheduled_time=later))

    changed = {"cron": f"{(minute + 40) % 60} * * * *", "missed": "skip"}
    config, began = registered(platform, client, same, changed)
    assert [run.id for run in runs(platform, client, "registered") if run.id in over] == over
    assert client.read_flow_run(of_same[-1]).state.state_details.scheduled_time == later
    coming = [run.expected_start_time for run in runs(platform, client, "registered") if run.id not in over]
    hour = began + timedelta(minutes=60)
    minutes = {when.minute for when in coming if when < hour}
    assert minutes - {(minute + 20) % 60} == {
        (minute + 30) % 60,
        (minute + 40) % 60,
    }  # Prefect may just be making the old one
    tended(platform, client, config)
    assert names(client, of_edited) == ["Cancelled"] * 3
    assert names(client, of_same) == ["Cancelled", "AwaitingConcurrencySlot", "AwaitingConcurrencySlot"]

    registered(platform, client, changed)
    gone = [client.read_flow_run(run).state for run in of_same[1:]]
    assert {(state.name, state.message) for state in gone} == {("Cancelled", "Its schedule is gone from the settings")}
    assert [one.slug for one in client.read_deployment(platform.made["registered"]).schedules] == [
        slug_of(config.schedules[1])
    ]


def test_a_schedule_that_is_made_now_starts_in_the_next_minute_already(platform, client):
    """Prefect's scheduler looks for new schedules once a minute."""
    _, began = registered(platform, client, {"cron": "* * * * *"})
    times = [run.expected_start_time for run in runs(platform, client, "registered")]
    assert min(when for when in times if when >= began) - began <= timedelta(minutes=1)


def test_a_schedule_that_an_earlier_release_named_by_its_place_is_the_same_one(platform, client):
    registered(platform, client, {"cron": "* * * * *"})
    (known,) = client.read_deployment(platform.made["registered"]).schedules
    client.update_deployment_schedule(platform.made["registered"], known.id, slug="headway-0")
    registered(platform, client, {"cron": "* * * * *"})
    (now,) = client.read_deployment(platform.made["registered"]).schedules
    assert (now.id, now.slug) == (known.id, known.slug) and now.slug != "headway-0"


def test_what_prefect_deploy_said_of_another_home_and_pool_ends_with_up(platform, client):
    registered(platform, client)
    elsewhere = WorkPoolCreate(
        name="headway-docker", type="process", base_job_template=ProcessWorker.get_default_base_job_template()
    )
    client.create_work_pool(elsewhere)
    variables = {"env": {"HEADWAY_HOME": "/srv/another"}}
    update = DeploymentUpdate(work_pool_name=elsewhere.name, job_variables=variables)
    client.update_deployment(platform.made["registered"], update)
    registered(platform, client)
    deployment = client.read_deployment(platform.made["registered"])
    assert (deployment.work_pool_name, deployment.job_variables) == ("headway", {})


def test_a_run_that_names_a_part_of_the_configuration_has_the_rest_of_its_deployment(platform, client):
    """As `prefect deployment run --param config=...` or a person's schedule starts it: Prefect replaces all of `config`."""
    (tiny,) = (one for one in catalogue(PlatformConfig()) if one.full_name == "retrain/tiny")
    registration.register(client, [tiny])
    deployment = platform.made["tiny"] = client.read_deployment_by_name("retrain/tiny").id
    part = {"training": {"learning_rate": 0.01, "mixture": {}}, "approval": {"before_deploy": True}}
    run = client.create_flow_run_from_deployment(deployment, parameters={"config": part}, state=Cancelled())
    assert run.parameters["config"] == part
    named = _deployment_id.set(deployment)
    try:
        with temporary_settings(
            {PREFECT_API_URL: f"{platform.url}/api", PREFECT_API_AUTH_STRING: password(platform.home)}
        ):
            found = configured(RetrainConfig, run.parameters["config"])
            with pytest.raises(ValueError, match="training.learning_rat"):
                configured(RetrainConfig, {"training": {"learning_rat": 0.01}})
    finally:
        _deployment_id.reset(named)
    whole = parameters("retrain", "tiny", overrides=("training.learning_rate=0.01", "approval.before_deploy=true"))
    assert found.model_dump(mode="json") == whole["config"] != RetrainConfig().model_dump(mode="json")
    assert configured(RetrainConfig, whole["config"]) == found, "one that names all asks nobody"


@pytest.fixture(scope="module")
def worker(platform):
    """With a worker, and without what the tests above left waiting."""
    platform.clear()
    platform.start_worker()
    return platform


@pytest.mark.long
def test_a_schedule_fires_and_two_never_overlap(worker, client, tmp_path):
    """It fires every 8 s and its runs want 10 s: each waits for the end of the one before it.

    Every run that waits asks Prefect's server for its slot again and again; of more, a slow machine's answers nobody any more.
    """
    rule = IntervalSchedule(interval=timedelta(seconds=8), anchor_date=datetime.now(UTC))
    scheduled(worker, client, "overlap", rule=rule, parameters={"folder": str(tmp_path), "seconds": 10.0})
    (known,) = client.read_deployment(worker.made["overlap"]).schedules
    until(lambda: len(lines(tmp_path / "starts")) >= 2)
    until(lambda: unscheduled(client, worker.made["overlap"], known.id))
    starts = lines(tmp_path / "starts")
    until(lambda: len(lines(tmp_path / "ends")) >= len(starts))
    spans = sorted(zip((float(s[2]) for s in starts), (float(e[2]) for e in lines(tmp_path / "ends")), strict=False))
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def unscheduled(client, deployment, schedule):
    """Whether the schedule is deleted; 503: the server's database was locked for longer than the client tries again."""
    try:
        client.delete_deployment_schedule(deployment, schedule)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 503:
            raise
        return False
    return True


def test_a_run_that_may_not_wait_is_refused(worker, client, tmp_path):
    worker.deployment(client, "refused", collision="CANCEL_NEW")
    first = worker.run(client, "refused", tmp_path / "first")
    until(lambda: lines(tmp_path / "first" / "starts"))
    second = worker.run(client, "refused", tmp_path / "second")
    state = until(lambda: (now := client.read_flow_run(second.id).state).is_final() and now)
    assert (state.name, state.message) == ("Cancelled", "Deployment concurrency limit reached.")
    (tmp_path / "first" / "go").touch()
    until(lambda: client.read_flow_run(first.id).state.is_completed())


def test_all_that_was_missed_runs_oldest_first(worker, client, tmp_path):
    """Prefect gives a slot that is free to whichever run asks next."""
    told = {"folder": str(tmp_path), "seconds": 0.1}
    config = scheduled(worker, client, "in-order", parameters=told, missed="run_all")
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    over = passed(worker, client, "in-order", hours=4)
    tended(worker, client, config)
    assert [client.read_flow_run(run).state.message == PUT_OFF for run in over] == [False, True, True, True]
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))

    def all_ended():
        tended(worker, client, config)
        return len(lines(tmp_path / "ends")) == len(over)

    until(all_ended, every=1.5)
    assert [start[0] for start in lines(tmp_path / "starts")] == [str(run) for run in over]
