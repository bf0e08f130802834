"""A run that waits for a person: the form, who may answer it, reminders, the end of waiting, and what is kept of the token."""

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from persons import policy_of
from support import everything_reused
from waiting import limit, until

from tasks.common.process import locked
from tasks.common.seal import opened, sealed
from tasks.config.base import digest
from tasks.orchestration.run_log import write_question
from tasks.security import audit_chain
from tasks.security.audit import acting, audit, entries
from tasks.storage import open_store

ASKING = Path(__file__).parent / "asking.py"
CAUSED = Path(__file__).parents[2] / "support" / "caused.py"
ANSWER = {"decision": "approve", "reason": "it is good", "person": "anna", "token": ""}


@pytest.fixture(scope="module")
def server(home):
    """The Prefect server of the home, and nothing more: no run that another test might count."""
    code = "from deployments.services import prefect_server as s; from tasks.config.base import home; s.wait(s.prepare(home()))"
    subprocess.run([sys.executable, "-c", code], env=home.environment(), check=True, timeout=limit(120))
    return json.loads((home.path / "prefect" / "server.json").read_text())


@pytest.fixture
def start(home, server):
    """Starts a flow that asks; every flow asks about a subject of its own, unless one is given."""
    started = []

    def begin(policy=None, **arguments):
        wanted = {"subject": f"model/{secrets.token_hex(4)}@{secrets.token_hex(32)}", "expire_minutes": 5.0}
        started.append(Asking(home, server, {**wanted, "remind_minutes": 5.0, **arguments}, policy))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


class Asking:
    """A running flow that asks, and the page that it shows its form in. Whether it waits, its folder says: no server is asked."""

    def __init__(self, home, server, arguments, policy):
        self.home, self.server, self.arguments = home, server, arguments
        self.before = {folder: len(self.questions(folder)) for folder in self.folders()}
        self.shown = 0
        environment = home.environment() | ({"HEADWAY_POLICY": str(policy)} if policy else {})
        command = [sys.executable, str(ASKING), json.dumps(arguments)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def folders(self):
        return {path.name for path in self.home.path.glob("runs/*")}

    def questions(self, run):
        """What the run wrote down each time that it showed its form."""
        path = self.home.path / "runs" / run / "events.jsonl"
        return [line for line in path.read_text().splitlines() if '"event": "waiting"' in line] if path.exists() else []

    def waits(self, *, again_after=None):
        """The flow run, once it is paused with a form (another one than before)."""
        resumed = self.arguments.get("resume")

        def paused():
            for folder in [resumed] if resumed else self.folders() - self.before.keys():
                if (count := len(self.questions(folder))) > max(self.shown, self.before.get(folder, 0)):
                    run = self.call(f"flow_runs/{folder}")
                    key = run["state"]["state_details"]["pause_key"]
                    if run["state_type"] == "PAUSED" and (again_after is None or key != again_after):
                        self.shown = count
                        return run
            assert self.process.poll() is None, self.process.communicate()
            return None

        return until(paused, every=0.1)

    def form(self, run):
        """What the page reads of a paused run: the text above the form, and the schema of its fields."""
        keys = run["state"]["state_details"]["run_input_keyset"]
        return [self.call(f"flow_runs/{run['id']}/input/{keys[key]}") for key in ("description", "schema")]

    def form_when_it_waits(self):
        return self.form(self.waits())[0]

    def answer(self, run, **answer):
        """Submit the form as the page does."""
        given = {**ANSWER, "question": self.form(run)[1]["properties"]["question"]["default"], **answer}
        return self.call(f"flow_runs/{run['id']}/resume", {"run_input": given})["status"]

    def name(self, run):
        """What `headway approve` calls its question."""
        (name,) = [one["name"] for one in self.home.ok("approve").said["waiting"] if one["flow_run"] == run["id"]]
        return name

    def said(self):
        out, err = self.process.communicate(timeout=limit(90))
        assert out, err
        return json.loads(out.splitlines()[-1])

    def call(self, path, body=None, method=None):
        return page(self.home, self.server, path, body, method)

    def state(self, run):
        return self.call(f"flow_runs/{run['id']}")["state"]

    def events(self, run):
        """Events that tell others of the question, oldest first."""
        wanted = {
            "filter": {
                "resource": {"id": [f"headway.approval.{run['id']}"]},
                "event": {"name": ["headway.approval.needed"]},
            }
        }
        return self.call("events/filter", wanted)["events"]


def page(home, server, path, body=None, method=None):
    """What Prefect's page asks its server."""
    login = b64encode((home.path / "prefect" / "credentials").read_bytes()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server['url']}/api/{path}", data, headers, method=method)
    deadline = time.monotonic() + limit(60)
    while True:
        try:
            with urllib.request.urlopen(request, timeout=limit(20)) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:  # Prefect's database was busy, as it says
            if error.code != 503 or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def audited(home, subject):
    """Newest first."""
    return [entry.model_dump() for entry in entries(open_store(home.path)) if subject in entry.what]


def test_the_form_asks_and_an_approval_lets_the_run_go_on_until_it_is_used(home, start):
    asking = start()
    run = asking.waits()
    text, schema = asking.form(run)
    assert text.startswith("**Go on?**") and "Because of **this**." in text
    assert set(schema["required"]) == {"decision", "reason", "person", "question"}
    assert schema["properties"]["token"]["format"] == "password"
    assert all(field["title"] and field["description"] for field in schema["properties"].values())
    for wrong in (
        {"reason": ""},
        {"decision": "maybe"},
        {"question": "0" * 12},
    ):  # the last one: a form of an earlier question
        assert asking.answer(run, **wrong) == "REJECT"
    for name in (run["id"][:8], f"{run['id'][:8]}.{'0' * 12}"):
        late = home.run("approve", name, "--approve", "--reason", "it was good an hour ago")
        assert late.code == 2 and asking.name(run) in late.stderr
    waiting = home.ok("approve").said["waiting"]
    assert [one["question"] for one in waiting if one["flow_run"] == run["id"]] == ["Go on?"]
    assert asking.answer(run) == "ACCEPT"
    approval = asking.said()["approval"]
    assert (approval["person"], approval["reason"]) == ("anna", "it is good")
    subject = asking.arguments["subject"]
    again = start(subject=subject, use=True).said()
    assert again["approval"] == approval
    assert "Go on?" in start(subject=subject).form_when_it_waits()  # what was approved is done
    used, entry = audited(home, subject)
    assert used["action"] == "use approval"
    assert (entry["action"], entry["claimed"], entry["reason"]) == ("approve", "anna", "it is good")
    assert asking.state(run)["type"] == "COMPLETED"
    elsewhere = start(subject=subject, terms={"endpoint": "other"})
    text = elsewhere.form_when_it_waits()  # it is asked, and says what about
    assert f"An approval counts once, within 72 hours, for exactly this: `test {subject} (endpoint other)`." in text


@pytest.mark.long
def test_others_are_told_at_first_and_again_until_it_is_too_late(start):
    asking = start(expire_minutes=0.2, remind_minutes=0.05)
    run = asking.waits()
    told = asking.said()
    assert told["error"] == "GateFailed" and told["stage"] == "approve" and "nobody answered" in told["message"]
    events = until(lambda: len(found := asking.events(run)) >= 2 and found)
    assert {event["payload"]["question"] for event in events} == {"Go on?"}
    assert all(event["payload"]["url"].endswith(run["id"]) for event in events)
    assert len({event["payload"]["minutes_left"] for event in events}) > 1
    state = asking.state(run)
    assert state["type"] == "FAILED" and "nobody answered" in state["message"]
    log = (asking.home.path / "runs" / run["id"] / "events.jsonl").read_text().splitlines()
    waiting = [event for event in map(json.loads, log) if event["event"] == "waiting"]
    assert len(waiting) >= 2 and {event["for"] for event in waiting} == {"approval"}
    assert json.loads(log[-1])["status"] == "gate_closed"


def test_a_rejection_closes_the_gate_with_the_reason_and_is_shown_the_next_time(home, start):
    asking = start()
    assert asking.answer(asking.waits(), decision="reject", reason="too slow") == "ACCEPT"
    told = asking.said()
    assert told["error"] == "GateFailed" and "anna" in told["message"] and "too slow" in told["message"]
    again = start(subject=asking.arguments["subject"])
    run = again.waits()
    text, _ = again.form(run)
    assert "Rejected before" in text and "too slow" in text
    again.answer(run)
    assert again.said()["approval"]["person"] == "anna"
    assert [entry["action"] for entry in audited(home, asking.arguments["subject"])] == ["approve", "reject"]


def test_who_may_not_decide_is_refused_as_somebody_unknown_and_asked_again_and_no_token_is_kept(home, start, tmp_path):
    """A wrong answer is of whoever sent it, not of the run's person; and who started a deploy does not approve it alone."""
    persons = (("root", []), ("anna", ["approve"]), ("bert", ["run"]), ("rita", ["run", "approve"]))
    policy, tokens = policy_of(home, tmp_path, *persons)
    asking = start(policy=policy, person="rita", exercises="promote")
    run = asking.waits()
    wrong = "hwt_" + secrets.token_urlsafe(32)
    tries = [("anna", wrong, "do not belong together"), ("bert", tokens["bert"], "bert may not")]
    tries += [("rita", tokens["rita"], "rita started the run")]
    for person, token, why in tries:
        assert asking.answer(run, person=person, token=token) == "ACCEPT"
        run = asking.waits(again_after=run["state"]["state_details"]["pause_key"])
        text, _ = asking.form(run)
        assert "Not accepted" in text and why in text
    assert asking.answer(run, person="anna", token=tokens["anna"]) == "ACCEPT"
    assert asking.said()["approval"]["person"] == "anna"
    entries = audited(home, asking.arguments["subject"])
    assert [entry["outcome"] for entry in entries] == ["done", "refused", "refused", "refused"]
    assert entries[0]["who"] == "anna" and [entry["claimed"] for entry in entries[1:]] == ["rita", "bert", "anna"]
    assert {(entry["who"], entry["identity"]) for entry in entries[1:]} == {("unknown", "unknown")}
    assert holding(home.path, [wrong, *tokens.values()]) == []


def hand_over(monkeypatch, home, key, name=""):
    """What `headway run` writes down in this home, and in the log of the test's store; returns the entry's number."""
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    with acting(name) if name else nullcontext():
        what = f"asking/one on the platform, under the key {key}"
        return audit(open_store(home), "start run", what=what).number


def handed_over(home, server, start, key, policy):
    """A run that `headway run` made under this key, as the platform takes it up."""
    flow = page(home, server, "flows/", {"name": "asking"})
    made = {"flow_id": flow["id"], "idempotency_key": key, "parameters": {}, "state": {"type": "PENDING"}}
    run = page(home, server, "flow_runs/", made)
    return start(resume=run["id"], policy=policy, person="prefect", exercises="promote")


def test_who_handed_a_run_to_the_platform_does_not_approve_its_deploy_alone(home, server, start, tmp_path, monkeypatch):
    """It goes on there as `prefect`; the audit log has who handed it over, under the key of the flow run.

    An entry of a machine whose clock is wrong hides none of those before it.
    """
    policy, tokens = policy_of(home, tmp_path, ("root", []), ("anna", ["approve"]), ("rita", ["run", "approve"]))
    key = secrets.token_hex(8)
    hand_over(monkeypatch, home.path, key, "rita")
    with monkeypatch.context() as patched:
        patched.setattr(audit_chain, "time", SimpleNamespace(time=lambda: 0.0))
        audit(open_store(home.path), "lease", what="model/tiny")
    asking = handed_over(home, server, start, key, policy)
    run = asking.waits()
    assert asking.answer(run, person="rita", token=tokens["rita"]) == "ACCEPT"
    run = asking.waits(again_after=run["state"]["state_details"]["pause_key"])
    assert "rita started the run" in asking.form(run)[0]
    assert asking.answer(run, person="anna", token=tokens["anna"]) == "ACCEPT"
    assert asking.said()["approval"]["person"] == "anna"


@pytest.mark.parametrize(
    ("where", "why"), [("elsewhere", "nobody knows who started the run"), ("here", "rita started the run")]
)
def test_where_the_log_of_who_handed_a_run_over_was_changed_only_who_may_promote_approves_its_deploy(
    home, server, start, tmp_path, monkeypatch, where, why
):
    """In the home where it was handed over, the home itself knows who did, whatever became of the log."""
    policy, tokens = policy_of(home, tmp_path, ("root", []), ("anna", ["approve"]), ("rita", ["run", "approve"]))
    key = secrets.token_hex(8)
    number = hand_over(monkeypatch, home.path, key, "rita")
    if where == "elsewhere":
        (home.path / "keys" / "decisions.jsonl").unlink()
    path = home.path / "store" / "documents" / "audit" / f"{number:08}.json"
    path.write_text(path.read_text().replace('"who": "rita"', '"who": "anna"'))
    asking = handed_over(home, server, start, key, policy)
    run = asking.waits()
    assert asking.answer(run, person="rita", token=tokens["rita"]) == "ACCEPT"
    run = asking.waits(again_after=run["state"]["state_details"]["pause_key"])
    assert why in asking.form(run)[0]
    path.write_text(path.read_text().replace('"who": "anna"', '"who": "rita"'))


def test_a_rejection_counts_though_somebody_approved_the_same_for_another_run(start):
    first = start()
    run, subject = first.waits(), first.arguments["subject"]
    first.process.kill()
    second = start(subject=subject)
    assert second.answer(second.waits()) == "ACCEPT" and second.said()["approval"]
    assert first.answer(run, decision="reject", reason="it leaks names") == "ACCEPT"
    assert "it leaks names" in start(subject=subject, resume=run["id"]).said()["message"]
    assert "it leaks names" in start(subject=subject).form_when_it_waits()  # the approval does not count either


def test_an_answer_that_somebody_adds_hides_no_rejection(start):
    first = start()
    run, subject = first.waits(), first.arguments["subject"]
    first.process.kill()
    question = first.form(run)[1]["properties"]["question"]["default"]
    assert first.answer(run, decision="reject", reason="it leaks names") == "ACCEPT"
    key = run["state"]["state_details"]["run_input_keyset"]["response"].rsplit("-", 2)[0] + "-999-response"
    first.call(f"flow_runs/{run['id']}/input", {"key": key, "value": json.dumps({**ANSWER, "question": question})})
    assert "it leaks names" in start(subject=subject, resume=run["id"]).said()["message"]


def test_a_rejection_of_a_later_question_outlives_the_earlier_ones_that_are_gone_through_again(home, start):
    """A run that was suspended begins anew: its first question is not the one that it was suspended with."""
    first = start(earlier=["begin"])
    run, subject = first.waits(), first.arguments["subject"]
    assert first.answer(run) == "ACCEPT"
    run = first.waits(again_after=run["state"]["state_details"]["pause_key"])
    first.process.kill()
    asked = {"asked": time.time(), "expires": time.time() + 300, "valid_hours": 72, "remind_seconds": 300}
    about = {"kind": "test", "subject": subject, "terms": {}, "before": {}, "right": "approve", "exercises": "approve"}
    kept = {**about, **asked, "text": "Go on?", "details": "", "flow": "asking", "flow_run": run["id"], "url": ""}
    write_question(home.path / "runs" / run["id"], kept)
    assert first.answer(run, decision="reject", reason="it leaks names") == "ACCEPT"
    resumed = start(subject=subject, earlier=["begin"], resume=run["id"])
    assert "it leaks names" in resumed.said()["message"]
    assert [entry["action"] for entry in audited(home, subject)] == ["reject", "approve"]


def test_an_approval_ends_with_its_giver_while_the_run_waits_for_its_place(home, start, tmp_path):
    policy, tokens = policy_of(home, tmp_path, ("root", []), ("anna", ["approve"]))
    asking = start(policy=policy, person="root")
    run, subject = asking.waits(), asking.arguments["subject"]
    with locked(home.path / "locks" / f"run-asking-{subject.split('/')[1].partition('@')[0]}"):
        assert asking.answer(run, person="anna", token=tokens["anna"]) == "ACCEPT"
        until(lambda: [entry["action"] for entry in audited(home, subject)] == ["approve"], every=0.1)
        known = yaml.safe_load(policy.read_text())
        del known["persons"]["anna"]
        policy.write_text(yaml.safe_dump(known))
    told = asking.said()
    assert told["error"] == "Refused" and "approval that anna gave does not count any more" in told["message"]


def test_where_nobody_was_asked_who_hands_a_run_over_only_who_may_promote_approves_its_deploy(
    home, server, start, tmp_path, monkeypatch
):
    policy, tokens = policy_of(home, tmp_path, ("root", ["approve", "promote"]), ("anna", ["approve"]))
    policy.write_text(policy.read_text().replace("- run\n", "", 1))
    key = secrets.token_hex(8)
    hand_over(monkeypatch, home.path, key)
    asking = handed_over(home, server, start, key, policy)
    run = asking.waits()
    assert asking.answer(run, person="anna", token=tokens["anna"]) == "ACCEPT"
    run = asking.waits(again_after=run["state"]["state_details"]["pause_key"])
    assert "nobody knows who started the run" in asking.form(run)[0]
    assert asking.answer(run, person="root", token=tokens["root"]) == "ACCEPT"
    assert asking.said()["approval"]["person"] == "root"


def test_where_promote_is_asked_for_and_approve_is_not_who_decides_a_deploy_shows_a_token(
    home, start, tmp_path, monkeypatch
):
    policy, tokens = policy_of(home, tmp_path, ("root", []), ("anna", ["run"]))
    policy.write_text(policy.read_text().replace("- approve\n", "", 1))
    monkeypatch.setenv("HEADWAY_POLICY", str(policy))
    asking = start(policy=policy, person="root", exercises="promote")
    run = asking.waits()
    words = ("approve", asking.name(run), "--approve", "--as", "anna", "--reason", "it is good")
    refused = home.run(*words)
    assert refused.code == 2 and "who you are" in refused.stderr
    assert asking.answer(run, person="anna") == "ACCEPT"  # the form, without a token
    asking.waits(again_after=run["state"]["state_details"]["pause_key"])
    monkeypatch.setenv("HEADWAY_TOKEN", tokens["anna"])
    home.ok(*words)
    approval = asking.said()["approval"]
    assert (approval["person"], approval["proven"]) == ("anna", True)


def holding(folder, tokens):
    """Files, and tables of Prefect's database, that hold a text. A freed page of the database counts, and its log."""
    files = ((path, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
    found = [path for path, data in files if any(token.encode() in data for token in tokens)]
    with sqlite3.connect(f"file:{folder / 'prefect' / 'prefect.db'}?mode=ro", uri=True) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            rows = map(str, database.execute(f'SELECT * FROM "{table}"'))
            if any(token in row for row in rows for token in tokens):
                found.append(table)
    return found


@pytest.mark.long
def test_cancelling_a_run_that_waits_ends_it(start):
    asking = start()
    run = asking.waits()
    wanted = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": True}
    asking.call(f"flow_runs/{run['id']}/set_state", wanted)
    told = asking.said()
    assert told["error"] == "Cancelled" and "waited for an approval" in told["message"]


def test_a_run_that_is_deleted_in_the_page_while_it_waits_ends_and_an_answer_says_why_it_does_not_count(home, start):
    """It waited on for its whole time, with its lock and place; an answer was HTTP 500, a bug of ours."""
    asking = start()
    run = asking.waits()
    name, pid = asking.name(run), json.loads((home.path / "runs" / run["id"] / "handle.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    asking.call(f"flow_runs/{run['id']}", method="DELETE")
    ran = home.run("approve", name, "--approve", "--reason", "it is good")
    assert ran.code == 6 and "somebody deleted it" in ran.said["error"]["message"]
    os.kill(pid, signal.SIGCONT)
    asking.process.communicate(timeout=limit(60))
    events = (home.path / "runs" / run["id"] / "events.jsonl").read_text().splitlines()
    closed = json.loads(events[-1])
    assert (closed["event"], closed["status"]) == ("closed", "cancelled") and "deleted" in closed["error"]["message"]


@pytest.mark.long
def test_a_run_that_died_while_it_waited_asks_again_and_takes_an_answer_that_came_meanwhile(start):
    first = start()
    run = first.waits()
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    second = start(subject=first.arguments["subject"], resume=run["id"])
    again = second.waits(again_after=run["state"]["state_details"]["pause_key"])
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait()
    assert second.answer(again, person="carl") == "ACCEPT"
    third = start(subject=first.arguments["subject"], resume=run["id"])
    assert third.said()["approval"]["person"] == "carl"
    assert third.state(run)["type"] == "COMPLETED"


def test_another_run_of_the_same_flow_and_subject_goes_on_while_one_waits(start):
    """Both ask about versions of one model; the second is answered, and ends, while the first still waits."""
    name = secrets.token_hex(4)
    first = start(subject=f"model/{name}@{secrets.token_hex(32)}")
    waiting = first.waits()
    second = start(subject=f"model/{name}@{secrets.token_hex(32)}")
    assert second.answer(second.waits()) == "ACCEPT"
    assert second.said()["approval"]["person"] == "anna"
    assert first.state(waiting)["type"] == "PAUSED"
    assert first.answer(waiting) == "ACCEPT"
    assert first.said()["approval"]["person"] == "anna"


def waits_for_a_person(home, *words):
    """A retraining, once it waits for an approval; and the question."""
    before = set(home.path.glob("runs/*"))
    process = home.start("retrain", "-c", "tiny", *words, "--json")

    def waiting():
        assert process.poll() is None, process.communicate()
        logs = [folder / "events.jsonl" for folder in set(home.path.glob("runs/*")) - before]
        return any(log.exists() and '"event": "waiting"' in log.read_text() for log in logs)

    until(waiting, timeout=180, every=0.1)
    [asked] = [one for one in home.ok("approve").said["waiting"] if one["flow"] == "retrain"]
    return process, asked


def test_training_waits_for_a_person_who_sees_its_plan(home, done):
    changed = ("--set", "approval.before_train=true", "--set", "training.seed=77")
    plan = {stage["name"]: stage["why"] for stage in home.retrain("--dry-run", *changed).said["stages"]}
    assert "approval required" in plan["train"] and "approval required" not in plan["deploy"]
    command, waiting = waits_for_a_person(home, *changed)
    assert waiting["question"].startswith("Train tiny for about")
    assert home.ok("approve", waiting["name"], "--reject", "--reason", "too dear").said["decision"] == "reject"
    out, err = command.communicate(timeout=limit(60))
    said = json.loads(out)
    assert command.returncode == 3 and "too dear" in said["error"]["message"], err
    assert {stage["name"]: stage["status"] for stage in said["stages"]}["train"] == "not_run"
    # The plan's record is copied to another training's key: the question is not the one that was answered.
    forged = ("--set", "approval.before_train=true", "--set", "training.seed=78")
    records = home.path / "store" / "documents" / "records" / "plan"
    newest = max(records.glob("*.json"), key=lambda path: path.stat().st_mtime)
    record = json.loads(opened(newest.read_bytes(), where=newest.name))
    record["arguments"]["arguments"]["training"]["seed"] = 78
    record["key"] = digest(record["arguments"])
    place = f"records/plan/{record['key']}.json"
    (records.parents[1] / place).write_bytes(sealed(json.dumps(record).encode(), key=place))
    command, other = waits_for_a_person(home, *forged)
    plan = {stage["name"]: stage["why"] for stage in home.retrain("--dry-run", *forged).said["stages"]}
    assert plan["plan"].startswith("recorded")
    assert other["question"] == waiting["question"] and other["name"].split(".")[1] != waiting["name"].split(".")[1]
    assert home.ok("approve", other["name"], "--reject", "--reason", "another one").said["decision"] == "reject"
    command.communicate(timeout=limit(60))


@pytest.fixture
def shown(home, done, tmp_path, monkeypatch):
    """Who acts from now on, by a role policy: ben, who may run; anna, who may approve; or root."""
    root = ("root", ["override", "roll_back", "approve"])
    path, tokens = policy_of(home, tmp_path, root, ("ben", ["run"]), ("anna", ["approve"]))
    monkeypatch.setenv("HEADWAY_POLICY", str(path))
    return lambda name: monkeypatch.setenv("HEADWAY_TOKEN", tokens[name])


OTHER = ("--set", "deployment.degrade=false")


def test_who_may_only_run_gives_the_champion_to_no_endpoint_and_no_settings_that_it_does_not_have(home, shown):
    shown("ben")
    before = home.ok("endpoint", "list").said["endpoints"]
    assert home.retrain("--as", "ben").statuses() == everything_reused()  # nothing would change: nobody is asked
    for changed in (("--set", "deployment.endpoint=elsewhere"), OTHER):
        refused = home.retrain("--as", "ben", *changed)
        assert refused.code == 2 and "ben may not promote" in refused.stderr, refused.stderr
        plan = home.retrain("--dry-run", *changed, "--set", "approval.before_deploy=true").said["stages"]
        assert "approval required" in plan[-1]["why"]
    assert home.ok("endpoint", "list").said["endpoints"] == before


@pytest.mark.long
def test_an_approver_who_is_removed_while_the_waits_for_a_person_for_its_endpoint_counts_no_more(home, shown):
    before = home.ok("endpoint", "list").said["endpoints"]
    asked = ("--as", "ben", "--set", "deployment.start_timeout_seconds=61", "--set", "approval.before_deploy=true")
    shown("ben")
    with locked(home.path / "endpoints" / "tiny.lock"):
        process, waiting = waits_for_a_person(home, *asked)
        shown("anna")
        home.ok("approve", waiting["name"], "--approve", "--as", "anna", "--reason", "it is the champion")
        log = home.path / "runs" / waiting["flow_run"] / "events.jsonl"
        until(lambda: '"stage": "deploy", "estimate"' in log.read_text(), timeout=60)
        shown("root")
        home.ok("person", "remove", "anna", "--as", "root")
    out, err = process.communicate(timeout=limit(120))
    assert process.returncode == 2 and "the approval that anna gave does not count any more" in err, out
    assert home.ok("endpoint", "list").said["endpoints"] == before


@pytest.mark.long
def test_other_settings_are_deployed_in_the_name_of_who_approved_them_and_the_first_ones_again_after_that(
    home, shown, monkeypatch
):
    shown("ben")
    assert home.retrain("--as", "ben", "--from", "deploy").code == 2
    asked = ("--as", "ben", *OTHER, "--set", "approval.before_deploy=true")
    process, waiting = waits_for_a_person(home, *asked)
    assert "to endpoint/tiny under settings " in waiting["question"]
    shown("anna")
    home.ok("approve", waiting["name"], "--approve", "--as", "anna", "--reason", "it is the champion")
    out, err = process.communicate(timeout=limit(120))
    assert process.returncode == 0 and json.loads(out)["stages"][-1]["status"] == "ran", err
    deployed, *_ = home.ok("audit-log", "--what", "endpoint/tiny").said["entries"]
    assert (deployed["action"], deployed["who"]) == ("deploy", "anna")
    shown("ben")
    assert home.retrain(*asked).statuses() == everything_reused()
    shown("root")
    home.ok("endpoint", "stop", "tiny", "--as", "root", "--reason", "bad")
    shown("ben")
    replayed, waiting = waits_for_a_person(home, *asked)  # the approval was used, and somebody decided otherwise
    shown("root")
    home.ok("approve", waiting["name"], "--reject", "--as", "root", "--reason", "it was stopped")
    assert replayed.communicate(timeout=limit(120)) and replayed.returncode == 3
    shown("ben")
    elsewhere = home.retrain("--dry-run", *asked, "--set", "deployment.endpoint=elsewhere")
    assert "approval required" in elsewhere.said["stages"][-1]["why"]
    monkeypatch.delenv("HEADWAY_POLICY")
    back = home.retrain()  # it was deployed under these settings before, and does not serve under them now
    assert back.statuses() == {**everything_reused(), "deploy": "ran"}


@pytest.mark.long
def test_a_new_model_waits_before_it_takes_the_endpoint(home, done):
    before = home.ok("endpoint", "list").said["endpoints"][0]["model"]
    changed = ("--set", "approval.before_deploy=true", "--set", "export.golden_tokens=6")
    plan = home.retrain("--dry-run", *changed).said["stages"][-1]
    assert plan["name"] == "deploy" and "approval required" in plan["why"]
    command, waiting = waits_for_a_person(home, *changed)
    assert "endpoint/tiny" in waiting["question"]
    assert home.run("approve", "--approve").code == 2  # without a reason
    unnamed = home.run("approve", "--approve", "--reason", "not read")
    assert unnamed.code == 2 and "name the question" in unnamed.stderr
    assert home.ok("endpoint", "list").said["endpoints"][0]["model"] == before
    assert home.ok("approve", waiting["name"], "--reject", "--reason", "not today").said["decision"] == "reject"
    out, err = command.communicate(timeout=limit(60))
    said = json.loads(out)
    assert command.returncode == 3 and said["status"] == "gate_closed", err
    assert said["error"]["stage"] == "approve" and "not today" in said["error"]["message"]
    assert "headway approve" in err and waiting["url"] in err
    assert home.ok("endpoint", "list").said["endpoints"][0]["model"] == before
    assert home.ok("approve").said["waiting"] == []


def test_what_the_platform_may_deploy_is_not_deployed_for_a_person_who_may_not(home, done, tmp_path, monkeypatch):
    """`automatic` lets runs of Prefect's page promote; ben made one of them by `headway run`, and may run."""
    policy, _ = policy_of(home, tmp_path, ("root", ["promote"]), ("ben", ["run"]))
    told = yaml.safe_load(policy.read_text())
    policy.write_text(yaml.safe_dump({**told, "automatic": {**told["automatic"], "prefect": ["run", "promote"]}}))
    before, key = home.ok("endpoint", "list").said["endpoints"], secrets.token_hex(8)
    hand_over(monkeypatch, home.path, key, "ben")
    arguments = {"flow": "retrain", "dataset": "tiny", "cause": "", "set": [OTHER[1]], "person": "prefect", "key": key}
    ran = subprocess.run(
        [sys.executable, "-P", str(CAUSED), json.dumps(arguments)],
        env=home.environment() | {"HEADWAY_POLICY": str(policy)},
        capture_output=True,
        text=True,
        timeout=limit(240),
    )
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["type"] == "FAILED" and "ben may not promote" in said["message"], (said, ran.stderr)
    assert home.ok("endpoint", "list").said["endpoints"] == before
