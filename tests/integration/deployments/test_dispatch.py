"""From events to flow runs, on a real Prefect server with a real worker: each event is covered by one run, whatever is killed."""

import random
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
import pytest
from caused import make_batch
from caused_flow import deploy, install
from live_prefect import kill, lines, live, until
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments.bridge.dispatch import AGAIN_SECONDS, CRASH_SECONDS, Dispatch, forward
from deployments.catalogue.flows import POOL, catalogue
from deployments.catalogue.routes import routes
from deployments.catalogue.triggers import apply, switched
from deployments.configuration.events import EventsConfig, TriggerConfig
from deployments.configuration.platform import PlatformConfig
from deployments.services import prefect_server
from tasks.common import process
from tasks.events import batches
from tasks.events.batches import Now, told
from tasks.events.event import Event
from tasks.events.ledger import Ledger


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with live(tmp_path_factory.mktemp("dispatch") / "home") as made:
        install(made)
        made.start_worker()
        there = {PREFECT_API_URL: f"{made.url}/api", PREFECT_API_AUTH_STRING: prefect_server.password(made.home)}
        with temporary_settings(there):
            yield made


class Stand:
    """A trigger of one deployment, its events, and the dispatch that looks after it."""

    def __init__(self, platform, client, name, folder, **told):
        self.client, self.name, self.folder, self.home = client, name, folder, platform.home
        self.collision = told.pop("collision", "ENQUEUE")
        self.deployment = deploy(client, name, folder, collision=self.collision)
        trigger = {"event": "dataset.published", "subject": f"dataset/{name}", "start": f"caused/{name}", **told}
        trigger.setdefault("cooldown_minutes", 0)
        self.config = EventsConfig(triggers=(TriggerConfig(**trigger),))
        self.trigger = routes(self.config)[0].name
        self.ledger = Ledger(platform.home)
        with self.ledger.transaction() as db:
            for table in ("events", "batches", "wanted", "covered", "marks"):
                db.execute(f"DELETE FROM {table}")
        self.dispatch = Dispatch(platform.home, self.config, self.ledger)
        apply(client, self.config)

    def event(self, version, **told):
        told = {"name": "dataset.published", "subject": f"dataset/{self.name}", "occurred": time.time(), **told}
        told = {"object": f"dataset/{self.name}@{version:064x}", "identity": str(version), **told}
        return Event(source="test", channel="hand", **told)

    def tick(self, ahead=0.0):
        self.dispatch.tick(time.time() + ahead)

    def runs(self):
        only = DeploymentFilter(id=DeploymentFilterId(any_=[self.deployment]))
        return self.client.read_flow_runs(deployment_filter=only, limit=200)

    def works(self):
        return lines(self.folder / "works")

    def until(self, reached, **told):
        def turn():
            self.tick()
            return reached()

        return until(turn, **told)

    def over(self):
        """Every batch has ended, and nothing waits; returns what the ledger tells."""
        self.until(lambda: not batches.open_batches(self.ledger) and not batches.waiting(self.ledger))
        return self.told()

    def told(self):
        return told(self.ledger, Now(time.time(), {}, lambda trigger: ""), limit=10_000)

    def batches(self):
        return batches.open_batches(self.ledger)


@pytest.fixture
def client(platform):
    with platform.client() as made:
        yield made


@pytest.fixture
def stand(platform, client, tmp_path, request):
    made = []

    def make(**told):
        name = request.node.name.removeprefix("test_").replace("_", "-")[:50]
        made.append(Stand(platform, client, name, tmp_path / "counts", **told))
        return made[-1]

    yield make
    apply(client, EventsConfig())
    for one in made:
        client.delete_deployment(one.deployment)


@contextmanager
def nothing_started(client):
    """Runs are made, and no worker takes them up."""
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        yield
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))


def cancel(client, one):
    """Cancel the runs that were made and not started; what the ledger tells when their batches have ended."""
    for run in one.runs():
        client.set_flow_run_state(run.id, State(type=StateType.CANCELLED))
    return one.over()


def test_who_started_a_run_is_what_prefect_noted_and_not_what_the_run_was_told(stand, client, platform):
    """Tags and parameters are whatever somebody wrote there; a batch of events that another run has gives no name either.

    One event starts one run with its version, and a repetition none.
    """
    one, actors = stand(), {}

    def actor_of(run):
        until(lambda: run.id in {UUID(line[0]) for line in lines(one.folder / "actors")})
        return next(line[2] for line in lines(one.folder / "actors") if UUID(line[0]) == run.id)

    assert [one.ledger.receive(one.event(n)).status for n in (7, 7, 7)] == ["accepted", "duplicate", "duplicate"]
    first, *again = one.over()
    for _ in range(5):
        one.tick()
    (work,) = one.works()
    (run,) = one.runs()
    assert (work[0], work[2]) == (str(run.id), f"dataset/{one.name}@{7:064x}") and run.parameters["cause"] == work[1]
    (batch,) = first["batches"]
    ended = (str(run.id), f"caused/{one.name}", "completed")
    assert (batch["flow_run"], batch["deployment"], batch["outcome"]) == ended
    assert [(event["status"], event["batches"]) for event in again] == [("duplicate", [])] * 2
    actors["by an event"] = actor_of(run)
    told = {"scheduled": {"tags": ["auto-scheduled"]}, "by a batch": {"parameters": {"cause": run.parameters["cause"]}}}
    fresh = make_batch(platform.home, "model.degraded", "model/tiny", deployment=f"caused/{one.name}")
    told["by a batch that nobody has"] = {"parameters": {"cause": fresh}}
    for name, said in told.items():
        actors[name] = actor_of(client.create_flow_run_from_deployment(one.deployment, **said))
    client.create_deployment_schedules(one.deployment, [(IntervalSchedule(interval=timedelta(days=1)), True)])
    now = datetime.now(UTC)
    between = {"start_time": str(now - timedelta(days=1)), "end_time": str(now), "min_runs": 1, "max_runs": 1}
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": one.deployment}, json=between)
    (planned,) = [each for each in one.runs() if each.auto_scheduled and each.expected_start_time <= now]
    assert {**actors, "scheduled in truth": actor_of(planned)} == {
        "by an event": "bridge",
        **dict.fromkeys(told, "prefect"),
        "scheduled in truth": "schedule",
    }


@pytest.mark.parametrize("events", [250, pytest.param(1000, marks=pytest.mark.long)])
def test_shuffled_events_with_duplicates_are_each_covered_by_a_named_run(stand, events):
    one = stand()
    numbers = [n for n in range(events) for _ in range(1 + n % 3)]
    random.Random(6).shuffle(numbers)
    stop = threading.Event()

    def take_in():
        for start in range(0, len(numbers), 32):
            one.ledger.receive_all([one.event(n, identity=f"{start}/{n}") for n in numbers[start : start + 32]])
            time.sleep(0.05)
        stop.set()

    threading.Thread(target=take_in, daemon=True).start()
    until(lambda: one.tick() or stop.is_set(), every=0.5)
    found = one.over()
    accepted = [event for event in found if event["status"] == "accepted"]
    assert len(found) == len(numbers) and len({event["object"] for event in accepted}) == len(accepted) == events
    assert all(len(event["batches"]) == 1 and event["batches"][0]["outcome"] == "completed" for event in accepted)
    named = {event["batches"][0]["flow_run"] for event in accepted}
    assert {work[0] for work in one.works()} == named and len(one.works()) == len(named) <= 20


@pytest.mark.long
def test_what_comes_during_a_run_is_covered_by_one_more(stand):
    one = stand()
    (one.folder / "hold").touch()
    one.ledger.receive(one.event(1))
    one.until(one.works)
    one.ledger.receive_all([one.event(n) for n in (3, 2)])
    one.ledger.receive(one.event(0, occurred=1.0))  # older than all, and late
    for _ in range(3):
        one.tick()
    assert len(one.runs()) == 1 and one.told()[1]["waits"] == [
        {"trigger": one.trigger, "why": "run in progress", "until": None}
    ]
    (one.folder / "hold").unlink()
    one.over()
    assert [work[2].rpartition("@")[2] for work in one.works()] == [f"{1:064x}", f"{2:064x}"]


@pytest.mark.long
def test_the_cool_down_holds_events_back_from_the_last_start_on(stand):
    one = stand(cooldown_minutes=5)
    one.ledger.receive(one.event(1))
    one.until(lambda: one.works() and not one.batches())
    one.ledger.receive_all([one.event(n) for n in (2, 3)])
    one.tick()
    one.tick(ahead=250.0)
    assert len(one.runs()) == 1 and batches.waiting(one.ledger) == [(one.trigger, f"dataset/{one.name}")]
    one.tick(ahead=301.0)
    one.until(lambda: len(one.works()) == 2 and not one.batches())


def test_an_automation_that_is_switched_off_starts_nothing_and_up_leaves_it_off(stand, client):
    one = stand()
    (automation,) = client.read_automations_by_name(f"headway.trigger.{one.trigger}")
    client.pause_automation(automation.id)
    apply(client, one.config)
    one.ledger.receive(one.event(1))
    for _ in range(3):
        one.tick()
    assert one.runs() == [] and one.batches() == [] and switched(client, [one.trigger]) == {one.trigger: "off"}
    said = process.read_json(one.dispatch.home / "platform" / "bridge" / "triggers.json")
    assert said == {one.trigger: {"automation": "off", "problem": ""}}
    with nothing_started(client):
        client.resume_automation(automation.id)
        one.until(one.runs)
        cancel(client, one)
        assert len(one.runs()) == 1


def test_two_flow_runs_of_one_batch_do_its_work_once(stand, client):
    one = stand()
    (one.folder / "wait").touch()
    one.ledger.receive(one.event(1))
    one.until(lambda: lines(one.folder / "starts"))
    (batch,) = one.batches()
    second = client.create_flow_run_from_deployment(
        deploy(client, f"{one.name}-2", one.folder), parameters={"cause": batch.id}
    )
    until(lambda: len(lines(one.folder / "starts")) == 2)
    (one.folder / "wait").unlink()
    until(lambda: client.read_flow_run(second.id).state.is_completed())
    (event,) = one.over()
    assert len(one.works()) == 1 and one.works()[0][0] == event["batches"][0]["flow_run"]


def test_a_batch_that_was_made_and_never_sent_is_sent(stand, client):
    """As a kill between the two leaves it."""
    one = stand()
    one.ledger.receive(one.event(1))
    batches.route(one.ledger, lambda name, subject: [one.trigger], [one.trigger])
    made = batches.make_batch(
        one.ledger,
        one.trigger,
        f"dataset/{one.name}",
        deployment=f"caused/{one.name}",
        dataset=lambda event: event["object"],
        cooldown=0.0,
        now=time.time(),
    )
    with nothing_started(client):
        (run,) = one.until(one.runs)
        (event,) = cancel(client, one)
    assert event["batches"][0]["id"] == made.id == run.parameters["cause"] and len(one.runs()) == 1


@pytest.mark.long
def test_a_batch_that_prefect_lost_is_sent_again_and_only_after_a_while(stand, client):
    """As a kill of Prefect's server leaves it, when it had taken the event and not acted on it yet."""
    one = stand()
    (automation,) = client.read_automations_by_name(f"headway.trigger.{one.trigger}")
    one.ledger.receive(one.event(1))
    one.tick()
    (batch,) = one.batches()
    until(one.runs)
    client.delete_flow_run(one.runs()[0].id)
    one.tick()
    time.sleep(2)
    assert one.runs() == []
    one.tick(ahead=AGAIN_SECONDS + 1)
    one.until(lambda: one.works() or None)
    one.over()
    assert [work[1] for work in one.works()] == [batch.id] and automation.enabled


@pytest.mark.long
def test_a_killed_server_loses_no_event_and_doubles_none(stand, platform):
    one = stand()
    (one.folder / "hold").touch()
    one.ledger.receive(one.event(0))
    one.until(one.works)
    for n in range(1, 4):
        one.ledger.receive(one.event(n))
        kill(server_pid(platform))
        if n == 2:
            (one.folder / "hold").unlink()
        for _ in range(3):
            with suppress(httpx.HTTPError):
                one.tick()
        until(lambda: answers(platform))
    found = one.over()
    assert all(len(event["batches"]) == 1 and event["batches"][0]["outcome"] == "completed" for event in found)
    assert {work[1] for work in one.works()} == {event["batches"][0]["id"] for event in found}
    assert len(one.works()) == len({work[1] for work in one.works()})


def answers(platform):
    try:
        with platform.client() as client:
            return client.read_work_pool(POOL)
    except httpx.HTTPError:
        return None


def server_pid(platform):
    parent = process.read_json(platform.home / "prefect" / "handle.json")["pid"]
    return until(lambda: next(iter(process.descendants(parent)), None))


def test_a_run_that_is_cancelled_before_it_starts_ends_its_batch(stand, client):
    one = stand()
    with nothing_started(client):
        one.ledger.receive(one.event(1))
        (run,) = one.until(one.runs)
        (event,) = cancel(client, one)
    (batch,) = event["batches"]
    assert (batch["flow_run"], batch["outcome"], one.works()) == (str(run.id), "cancelled", [])
    assert one.ledger.claim(batch["id"], "too late") == str(run.id)


@pytest.mark.long
def test_a_run_that_was_turned_away_because_another_is_at_work_comes_again(stand, client):
    """`overlap: refuse` cancels it; the event is not lost for that."""
    one = stand(collision="CANCEL_NEW")
    (one.folder / "hold").touch()
    theirs = client.create_flow_run_from_deployment(one.deployment)
    until(one.works)
    one.ledger.receive(one.event(1))
    one.until(lambda: [run for run in one.runs() if run.id != theirs.id and run.state.is_cancelled()])
    one.tick()
    assert len(one.batches()) == 1
    (one.folder / "hold").unlink()
    until(lambda: client.read_flow_run(theirs.id).state.is_completed())
    one.tick(ahead=AGAIN_SECONDS + 1)
    one.over()
    assert len(one.works()) == 2


@pytest.mark.long
def test_a_run_that_crashed_before_its_claim_comes_again_when_the_watch_had_its_time(stand, client):
    one = stand()
    client.update_work_pool(POOL, WorkPoolUpdate(is_paused=True))
    try:
        one.ledger.receive(one.event(1))
        (first,) = one.until(one.runs)
        client.set_flow_run_state(first.id, State(type=StateType.CRASHED), force=True)
        one.tick(ahead=AGAIN_SECONDS + 1)
        assert len(one.batches()) == 1 and len(one.runs()) == 1, "the watch may take it up"
        one.tick(ahead=CRASH_SECONDS + AGAIN_SECONDS)
        until(lambda: len(one.runs()) == 2)
    finally:
        client.update_work_pool(POOL, WorkPoolUpdate(is_paused=False))
    (event,) = one.over()
    assert event["batches"][0]["outcome"] == "completed" and event["batches"][0]["flow_run"] != str(first.id)
    assert len(one.works()) == 1


def test_a_run_that_fails_is_the_outcome(stand):
    one = stand()
    (one.folder / "fail").touch()
    one.ledger.receive(one.event(1))
    assert one.over()[0]["batches"][0]["outcome"] == "failed"


def test_an_event_without_a_version_gets_the_trigger_s_dataset_or_the_deployment_s(stand, client):
    one = stand(event="model.stale", subject="model/*")
    one.ledger.receive(one.event(1, name="model.stale", subject="model/a", object=""))
    told = {"dataset": "dataset/named@" + "a" * 64, "other": "x"}
    one.ledger.receive(one.event(2, name="model.stale", subject="model/b", object="", data=told))
    with nothing_started(client):
        one.until(lambda: len(one.runs()) == 2)
        assert sorted(run.parameters["dataset"] for run in one.runs()) == [told["dataset"], "standard"]
        cancel(client, one)


def test_an_event_that_nobody_waits_for_says_so_and_reaches_prefect_once(stand, client):
    one = stand()
    odd = {"headway": "\x1b[31m\x00", "secret": "Bearer abcdefghijklmnopqrstuvwxyz"}
    one.ledger.receive(one.event(1, name="endpoint.anomaly", subject="endpoint/x", object="", data=odd))
    one.tick()
    with one.ledger.transaction() as db:
        batches.set_mark(db, "forwarded", 0)  # as a kill between the two leaves it
    forward(client, one.ledger)
    (event,) = one.told()
    assert (event["batches"], event["waits"], event["looked_at"]) == ([], [], True)
    filtered = {"event": {"name": ["headway.endpoint.anomaly"]}, "occurred": {"since": "2020-01-01T00:00:00Z"}}

    def found():
        answer = client.request("POST", "/events/filter", json={"filter": filtered})
        return [seen for seen in answer.json()["events"] if seen["payload"]["identity"] == "1"]

    (seen,) = until(found)
    time.sleep(2)
    assert len(found()) == 1 and seen["resource"]["prefect.resource.id"] == "headway.endpoint.x"
    assert "\x1b" not in str(seen) and "abcdefghij" not in str(seen) and "[redacted]" in str(seen["payload"]["data"])


def test_automations_are_what_the_settings_say_and_others_are_left_alone(stand, client):
    from prefect.events.actions import DoNothing
    from prefect.events.schemas.automations import AutomationCore, EventTrigger

    one = stand()
    theirs = client.create_automation(
        AutomationCore(name="headway-mine", trigger=EventTrigger(expect={"x"}), actions=[DoNothing()])
    )
    (before,) = client.read_automations_by_name(f"headway.trigger.{one.trigger}")
    assert apply(client, one.config) == [before.name]
    assert client.read_automation(before.id) == before, "written anew, it would forget what it waits for"
    missing = EventsConfig(triggers=(TriggerConfig(event="model.stale", start="caused/nothing"),))
    with pytest.raises(ValueError, match="caused/nothing"):
        apply(client, missing)
    assert client.read_automation(before.id) == before
    apply(client, EventsConfig())
    assert client.read_automations_by_name(before.name) == [] and client.read_automation(theirs) is not None
    client.delete_automation(theirs)


def test_settings_of_a_trigger_reach_the_run_as_they_are(client, platform, tmp_path):
    """Two braces in a setting are text, not one of Prefect's templates. The run is looked at, not run: no pool takes it."""
    flow = client.create_flow_from_name("revalidate")
    deployment = client.create_deployment(flow_id=flow, name="tiny", enforce_parameter_schema=False)
    model = "model-{{ 7 * 7 }}"
    changed = ("preprocessing.heldout_fraction=0.25",)
    trigger = TriggerConfig(event="model.stale", start="revalidate/tiny", set=changed, cooldown_minutes=0)
    config = EventsConfig(triggers=(trigger,))
    ledger = Ledger(tmp_path)
    apply(client, config)
    told = {"name": "model.stale", "subject": f"model/{model}", "source": "test", "identity": "1", "channel": "headway"}
    ledger.receive(Event(**told, occurred=datetime.now(UTC).timestamp()))
    Dispatch(tmp_path, config, ledger).tick(time.time())
    only = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
    (run,) = until(lambda: client.read_flow_runs(deployment_filter=only))
    assert run.parameters["overrides"] == list(changed)
    apply(client, EventsConfig())
    client.delete_deployment(deployment)


@pytest.mark.parametrize(
    ("trigger", "said"),
    [
        ({"start": "revalidate/none"}, "no deployment 'revalidate/none'"),
        ({"start": "backup/local"}, "not started by events"),
        ({"start": "revalidate/tiny", "set": ("no.such=1",)}, "no.such|no"),
    ],
)
def test_a_trigger_that_could_not_start_is_refused_before_anything_runs(trigger, said):
    config = EventsConfig(triggers=(TriggerConfig(event="model.stale", **trigger),))
    with pytest.raises(ValueError, match=said) as refused:
        catalogue(PlatformConfig(events=config))
    assert "events.triggers.0" in str(refused.value)


def test_names_of_triggers_are_readable_and_apart():
    told = [{}, {"subject": "dataset/web"}, {"subject": "dataset/w?b"}, {"set": ("a=1",)}, {"dataset": "x"}]
    made = [TriggerConfig(event="dataset.published", start="revalidate/local", **one) for one in told]
    names = [route.name for route in routes(EventsConfig(triggers=tuple(made)))]
    assert names[:2] == ["dataset.published-revalidate-local", "dataset.published-dataset-web-revalidate-local"]
    assert len(set(names)) == 5
    with pytest.raises(ValueError, match="twice"):
        routes(EventsConfig(triggers=(made[0], made[0])))
