"""A run of the platform that waits for a person, on a real Prefect server with a real worker: it has no process until then.

The flow below asks as those of the product do, with `approve`. What the watch does is done here, with a time that is handed in.
"""

import importlib
import json
import secrets
import sys
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from live_prefect import environment, live, until
from persons import policy_of
from prefect.states import Cancelling
from support import Home

from deployments.catalogue.flows import Deployment
from deployments.configuration.platform import PlatformConfig
from deployments.platform.state import state
from deployments.publishing.datasets import make_dataset
from deployments.services import registration
from deployments.services.parts import worker
from deployments.watch.dead_runs import DeadRuns
from deployments.watch.waiting import UNWATCHED_SECONDS, Waiting
from tasks.common import process
from tasks.config.flows import ApprovalConfig
from tasks.orchestration.run_log import read_question, read_run, suspended, write_question
from tasks.storage import open_store

FLOW = """
import json, os
from pathlib import Path
from prefect import flow
from flows.support.approval import approve, using
from flows.support.prefect_run import cancelled, flow_run, started_by
from tasks.config.flows import ApprovalConfig
from tasks.orchestration.run import current, lifecycle, pinned


def note(folder, name, told):
    with open(folder / name, "a") as file:
        file.write(json.dumps(told) + "\\n")


@flow(name="suspended", persist_result=False)
def suspended(folder: str):
    folder, hours = Path(folder), Path(folder) / "hours"
    more = {"valid_hours": float(hours.read_text())} if hours.exists() else {}
    config = ApprovalConfig(expire_minutes=60.0, remind_minutes=10.0, **more)
    with (
        started_by("run", "suspended"),
        lifecycle("suspended", config, subject=folder.name, stages=(), cancelled=cancelled, flow_run=flow_run()),
    ):
        dataset = pinned(current().store, "corpus", kind="dataset")
        note(folder, "starts", {"pid": os.getpid(), "dataset": dataset.ref})
        stands = lambda: {"champion": (folder / "champion").read_text()}
        given = approve(
            "Go on?", "Because.", config, kind="test", subject=dataset.ref, terms={"in": folder.name}, stands=stands
        )
        with using(given):
            note(folder, "ends", {"person": given.person, "dataset": dataset.ref, "hours": given.valid_hours})
"""
HOUR = 3600.0


def publish(home, text):
    path = home.parent / "corpus.txt"
    path.write_text(text)
    make_dataset(open_store(home), home / "work", "corpus", [path])


ANSWER = {"decision": "approve", "reason": "it is good", "person": "anna", "token": ""}


class Asking(Deployment):
    """A deployment of the catalogue, of the flow above."""

    @property
    def entrypoint(self):
        return "suspending.suspended"


ASKING = Asking(name="asks", flow="suspended", description="Asks.", overlap="queue", parameters={"folder": ""})


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suspended")
    with live(folder / "home") as made, pytest.MonkeyPatch.context() as patch:
        (folder / "modules" / "suspending.py").write_text(FLOW)
        patch.syspath_prepend(str(folder / "modules"))
        patch.setitem(sys.modules, "flows.suspended", importlib.import_module("suspending"))
        publish(made.home, "some words")
        with made.client() as client:
            registration.register(client, [ASKING])
        made.start_worker()
        yield made


@pytest.fixture
def client(platform):
    with platform.client() as made, environment(platform.environment):
        yield made


class Run:
    """A run that waits, in a folder of its own."""

    def __init__(self, platform, client, folder):
        self.home, self.client, self.folder = platform.home, client, folder
        (folder / "champion").write_text("model/a")
        self.deployment = client.read_deployment_by_name(ASKING.full_name).id
        self.id = client.create_flow_run_from_deployment(self.deployment, parameters={"folder": str(folder)}).id
        self.log = self.home / "runs" / str(self.id)

    @property
    def state(self):
        return self.client.read_flow_run(self.id).state

    def noted(self, name):
        path = self.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def waits(self, starts=1):
        """Until the run is suspended, with no process left of its start of this number."""

        def gone():
            noted = self.noted("starts")
            return len(noted) == starts and process.process_started(noted[-1]["pid"]) is None

        until(lambda: self.state.name == "Suspended" and gone(), why=lambda: self.state)

    def form(self):
        keys = self.state.state_details.run_input_keyset
        return json.loads(self.client.read_flow_run_input(self.id, keys["description"]))

    def answer(self, **answer):
        question = self.state.state_details.pause_key.split("-")[-2]
        result = self.client.resume_flow_run(self.id, run_input={**ANSWER, "question": question, **answer})
        assert result.status.value == "ACCEPT", result

    def answers(self):
        found = self.client.filter_flow_run_input(self.id, key_prefix="paused-", limit=200, exclude_keys=set())
        return [one.key for one in found if one.key.endswith("-response")]

    def ended(self):
        until(lambda: self.state.is_final(), why=lambda: self.state)
        return self.state


@pytest.fixture
def start(platform, client, tmp_path):
    def begin(name=""):
        folder = tmp_path / (name or secrets.token_hex(3))
        folder.mkdir()
        return Run(platform, client, folder)

    return begin


def events(client, run):
    wanted = {"resource": {"id": [f"headway.approval.{run.id}"]}, "event": {"name": ["headway.approval.needed"]}}
    wanted["occurred"] = {"until": (datetime.now(UTC) + timedelta(days=1)).isoformat()}
    return client.request("POST", "/events/filter", json={"filter": wanted}).json()["events"]


def test_it_waits_without_process_place_or_slot_and_goes_on_with_what_it_asked_about(platform, client, start):
    """And people are told at once, and again after a while."""
    worker.allow(client, 1)
    try:
        run, duty, now = start(), Waiting(platform.home), time.time()
        run.waits()
        other = start()
        other.waits()  # with one place for both
    finally:
        worker.allow(client, None)
    assert client.read_deployment(run.deployment).global_concurrency_limit.active_slots == 0
    listed = {one["run"]: one for one in state(platform.home)["waiting"]}
    assert listed[str(run.id)]["question"] == "Go on?"
    waiting = Home(platform.home).ok("approve").said["waiting"]
    assert listed[str(run.id)]["name"] in {one["name"] for one in waiting}
    assert {str(run.id), str(other.id)} <= {one["flow_run"] for one in waiting}
    DeadRuns(platform.home, PlatformConfig()).tick(client, now)
    for later in (0.0, 60.0, 700.0, 760.0):  # reminded every ten minutes
        duty.tick(client, now + later)
    told = until(lambda: len(found := events(client, run)) == 2 and found)
    assert {event["payload"]["question"] for event in told} == {"Go on?"}
    publish(platform.home, "other words")
    (run.folder / "hours").write_text("87600")
    run.answer()
    assert run.ended().is_completed(), run.state
    assert len({one["dataset"] for one in run.noted("starts")}) == 1 and run.noted("ends")[0]["person"] == "anna"
    assert run.noted("ends")[0]["hours"] == ApprovalConfig().valid_hours, "as the form said"
    assert run.answers() == [] and run.log not in suspended(platform.home)
    assert read_run(run.log).status == "completed"
    client.delete_flow_run(other.id)
    assert_cancelled(platform, client, other)


def assert_cancelled(platform, client, run):
    """What the next look writes down of a run that somebody ended in Prefect's page."""
    Waiting(platform.home).tick(client, time.time() + 100.0)
    assert read_run(run.log).status == "cancelled" and run.log not in suspended(platform.home)
    assert str(run.id) not in {one["run"] for one in state(platform.home)["waiting"]}


def test_an_answer_that_does_not_count_opens_nothing_and_the_run_waits_on(platform, client, start, tmp_path):
    """One of somebody who may not decide is refused; one to what has changed meanwhile has the run ask anew."""
    run = start()
    run.waits()
    policy, tokens = policy_of(Home(platform.home), tmp_path, ("root", []), ("anna", ["approve"]), ("bert", ["run"]))
    asked = platform.home / "policy.yaml"
    asked.write_text(policy.read_text())
    asked.chmod(0o600)
    try:
        run.answer(person="bert", token=tokens["bert"])
        run.waits(starts=2)
        assert "bert may not" in run.form()
        (run.folder / "champion").write_text("model/b")
        run.answer(token=tokens["anna"])
        run.waits(starts=3)
        assert "What was asked has changed" in run.form() and "model/b" in run.form() and run.answers() == []
        run.answer(decision="reject", reason="not now", token=tokens["anna"])
        assert run.ended().is_failed() and "not now" in run.state.message and run.noted("ends") == []
    finally:
        asked.unlink()
    database = platform.home / "prefect" / "prefect.db"
    assert run.answers() == [] and not any(token.encode() in database.read_bytes() for token in tokens.values())


def test_the_time_to_answer_ends_but_not_while_the_platform_is_down(platform, client, start):
    run, now = start(), time.time()
    run.waits()
    Waiting(platform.home).tick(client, now)
    Waiting(platform.home).tick(client, now + 24 * HOUR)  # a watch that starts after a day
    assert run.state.name == "Suspended"
    question = json.loads((run.log / "question.json").read_text())
    assert now + 25 * HOUR <= question["expires"] < now + 25.1 * HOUR
    (run.log / "question.json").write_text(json.dumps({**question, "expires": time.time() - 1}))
    Waiting(platform.home).tick(client, now + 24 * HOUR + UNWATCHED_SECONDS / 2)
    ended = run.ended()
    assert ended.is_failed() and "nobody answered" in ended.message
    assert read_run(run.log).status == "gate_closed" and run.log not in suspended(platform.home)


def test_one_that_is_cancelled_in_prefects_page_is_written_down_as_cancelled(platform, client, start):
    run = start()
    run.waits()
    client.set_flow_run_state(run.id, Cancelling())
    assert run.state.is_cancelled()
    assert_cancelled(platform, client, run)


class Away:
    """A Prefect that does not answer."""

    def read_flow_run(self, run):
        raise ConnectionError("away")


def test_time_in_which_nobody_looked_is_given_once_though_prefect_does_not_answer_after_it(tmp_path):
    folder, now = tmp_path / "runs" / str(uuid4()), 1_000_000.0
    folder.mkdir(parents=True)
    told = dict.fromkeys(("kind", "subject", "text", "details", "flow", "flow_run", "url"), "x")
    times = {"asked": now, "expires": now + HOUR, "valid_hours": 1.0, "remind_seconds": 600.0}
    write_question(folder, {**told, **times, "terms": {}, "before": {}, "right": "approve", "exercises": "promote"})
    Waiting(tmp_path)._note(now)
    for _ in range(2):  # a watch, and one that is started after it
        watch = Waiting(tmp_path)
        for later in (HOUR, HOUR + 2.0):
            with pytest.raises(ConnectionError):
                watch.tick(Away(), now + later)
    assert read_question(folder)["expires"] == now + 2 * HOUR
