"""`headway events` as people type it: what came, what was refused, one made by hand; without any server."""

import json
import subprocess
import sys
import time

import pytest
import yaml
from support import publish_tiny

from deployments.services.parts import bridge
from tasks.common import process
from tasks.events import batches
from tasks.events.event import Event
from tasks.events.ledger import Ledger

TRIGGER = {"event": "dataset.published", "start": "revalidate/tiny", "cooldown_minutes": 60}
NAME = "dataset.published-revalidate-tiny"
FIELDS = {
    "number", "received", "occurred", "channel", "name", "subject", "object", "source", "identity", "status", "reason",
    "duplicate_of", "became", "batches", "waits", "looked_at",
}  # fmt: skip


@pytest.fixture
def ledger(fresh):
    fresh.path.mkdir()
    (fresh.path / "platform.yaml").write_text(yaml.safe_dump({"events": {"triggers": [TRIGGER]}}))
    return Ledger(fresh.path)


def event(identity, **said):
    said = {"name": "dataset.published", "subject": "dataset/web", "source": "here", "channel": "store", **said}
    return Event(identity=str(identity), occurred=said.pop("occurred", 1_700_000_000.0), **said)


def route(ledger):
    batches.route(ledger, lambda name, subject: [NAME] if name == "dataset.published" else [], [NAME])


def start(ledger, now=None):
    told = {"deployment": "revalidate/tiny", "dataset": lambda row: row["object"], "cooldown": 0.0}
    return batches.make_batch(ledger, NAME, "dataset/web", now=now or time.time(), **told)


def words(home, *more):
    ran = subprocess.run(home.command("events", *more), env=home.environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_home_without_events_says_so_and_makes_nothing(fresh):
    assert words(fresh) == f"No event yet in {fresh.path}.\n" and fresh.ok("events").said["events"] == []
    assert not (fresh.path / "events").exists()


def test_each_event_says_what_came_of_it_newest_last(fresh, ledger):
    ledger.receive(event(1, object="dataset/web@" + "a" * 64))
    ledger.receive(event(2, object="dataset/web@" + "a" * 64))
    ledger.refuse("webhook", "the signature is not right", source="somebody")
    ledger.receive(event(4, name="model.stale", subject="model/tiny"))
    route(ledger)
    batch = start(ledger)
    batches.note_seen(ledger, batch, "11111111-2222-3333-4444-555555555555")
    published, repeated, refused, stale = fresh.ok("events").said["events"]
    assert published.keys() == FIELDS and published["occurred"] == "2023-11-14T22:13:20+00:00"
    assert published["batches"] == [
        {
            "id": batch.id,
            "trigger": NAME,
            "deployment": "revalidate/tiny",
            "outcome": "",
            "flow_run": "11111111-2222-3333-4444-555555555555",
            "state": "starting",
            "url": "/runs/flow-run/11111111-2222-3333-4444-555555555555",
        }
    ]
    assert (repeated["status"], repeated["duplicate_of"]) == ("duplicate", published["number"])
    assert (refused["status"], refused["reason"]) == ("refused", "the signature is not right")
    assert (stale["status"], stale["batches"], stale["waits"]) == ("accepted", [], [])
    ledger.claim(batch.id, "11111111-2222-3333-4444-555555555555")
    assert "-> revalidate/tiny: running" in words(fresh).splitlines()[0]
    batches.note_ended(ledger, batches.open_batches(ledger)[0], "gate_closed", 1.0)
    lines = words(fresh).splitlines()
    ends = ["-> revalidate/tiny: gate_closed", "duplicate  of 1", "refused  (the signature is not right)", "no trigger"]
    assert [end in line for end, line in zip(ends, lines, strict=True)] == [True] * 4, lines
    assert words(fresh, "--limit", 1).splitlines() == lines[-1:]


def test_files_that_arrived_tell_what_they_became_and_the_run_of_that(fresh, ledger):
    ledger.receive(event(1, name="data.arrived", channel="folder", object="file:a"))
    assert "waits until all of it has landed" in words(fresh)
    receipt = ledger.receive(event(2, object="dataset/web@" + "b" * 64))
    with ledger.transaction() as db:
        db.execute("UPDATE events SET became = ? WHERE number = 1", (receipt.number,))
    route(ledger)
    batch = start(ledger)
    arrived = fresh.ok("events").said["events"][0]
    assert arrived["became"] == "dataset/web@" + "b" * 64 and arrived["batches"][0]["id"] == batch.id
    assert f"-> dataset/web@{'b' * 12}" in words(fresh).splitlines()[0]


def test_what_waits_says_for_what(fresh, ledger):
    ledger.receive(event(1))
    assert fresh.ok("events").said["events"][0]["looked_at"] is False and "waits for the bridge" in words(fresh)
    route(ledger)
    assert "the bridge does not run: `headway up`" in words(fresh)
    pretend_that_the_bridge_runs(fresh.path)
    assert waits(fresh) == {"trigger": NAME, "why": "about to start", "until": None}
    first = start(ledger)
    ledger.receive(event(2))
    route(ledger)
    assert waits(fresh)["why"] == "run in progress"
    batches.note_ended(ledger, first, "completed", time.time())
    told = waits(fresh)
    assert told["why"] == "cool-down" and told["until"] > fresh.ok("events").said["events"][1]["received"]
    says = fresh.path / "platform" / "bridge" / "triggers.json"
    says.write_text(json.dumps({NAME: {"automation": "off", "problem": ""}}))
    assert "switched off in Prefect's page" in waits(fresh)["why"]
    says.write_text(json.dumps({NAME: {"automation": "on", "problem": "there is no deployment"}}))
    assert waits(fresh)["why"] == "there is no deployment"


def pretend_that_the_bridge_runs(home):
    """The command looks for a living process, and asks it nothing; `headway down` ends it."""
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    folder = home / "platform" / "bridge"
    handle = {"pid": idle.pid, "started": process.process_started(idle.pid), "boot_id": process.boot_id()}
    process.write_json(folder / "handle.json", handle)
    process.write_json(folder / "part.json", {"pid": idle.pid, "since": 1.0})
    assert bridge.status(home)


def waits(home):
    (one,) = home.ok("events").said["events"][-1]["waits"]
    return one


def test_control_characters_of_strangers_are_written_out_and_secrets_are_not_shown(fresh, ledger):
    ledger.refuse("webhook", "\x1b]0;owned\x07 \u202e x", source="\x1b[2J", about="Bearer abcdefghijklmnopqrstuvwxyz")
    shown = words(fresh)
    assert not {"\x1b", "\x07", "\u202e"} & set(shown) and "\\x1b]0;owned\\x07" in shown
    assert "abcdefghijkl" not in shown + json.dumps(fresh.ok("events").said) and "[redacted]" in shown


def test_a_time_that_is_none_does_not_keep_the_others_from_being_shown(fresh, ledger):
    ledger.receive_all([event(1, occurred=1e300), event(2, occurred=float("inf"))])
    assert [one["occurred"] for one in fresh.ok("events").said["events"]] == [None, None]


def test_follow_tells_what_comes_and_what_changes(fresh, ledger):
    ledger.receive(event(1))
    following = fresh.start("events", "-f", "--json")
    try:
        first = json.loads(following.stdout.readline())
        assert first["looked_at"] is False
        route(ledger)
        assert json.loads(following.stdout.readline())["waits"][0]["trigger"] == NAME
        start(ledger)
        changed = json.loads(following.stdout.readline())
        assert (changed["number"], changed["waits"], changed["batches"][0]["state"]) == (1, [], "starting")
        ledger.receive(event(2))
        assert json.loads(following.stdout.readline())["identity"] == "2"
    finally:
        following.terminate()
        assert following.wait() == 0


def test_one_made_by_hand_is_in_the_ledger_and_in_the_audit_log(fresh):
    publish_tiny(fresh)
    ref = fresh.ok("dataset", "list").said["datasets"][0]["ref"]
    sent = ("events", "send", "dataset.published", "dataset/tiny", "--object", ref[: len("dataset/tiny@") + 10])
    said = fresh.ok(*sent, "--data", "why=a look", "--reason", "to try").said["event"]
    assert (said["status"], said["object"], said["duplicate_of"]) == ("accepted", ref, None)
    again = fresh.ok(*sent).said["event"]
    assert (again["status"], again["duplicate_of"]) == ("duplicate", said["number"])
    assert fresh.ok("events", "send", "dataset.published", "dataset/tiny").said["event"]["status"] == "accepted"
    newest = fresh.ok("audit-log").said["entries"][0]
    assert (newest["action"], newest["what"], newest["right"]) == (
        "send event",
        "dataset.published of dataset/tiny",
        "run",
    )
    with Ledger(fresh.path).snapshot() as db:
        first = db.execute("SELECT data, source FROM events ORDER BY number").fetchone()
    assert json.loads(first["data"]) == {"why": "a look", "reason": "to try"} and first["source"].startswith("hand/")


ABSENT = (
    (("model.eaten", "model/tiny"), "there is no event 'model.eaten'"),
    (("dataset.published", "dataset/nothing"), "dataset/nothing is not in"),
    (("model.stale", "model/nothing"), "model/nothing is not in"),
    (("endpoint.anomaly", "endpoint/nothing"), "nothing"),
    (("dataset.published", "tokens/web"), "cannot be a subject"),
    (("dataset.published", "../../etc"), "is not a reference"),
    (("data.arrived", "dataset/web"), "no watched folder or container makes dataset/web"),
)


def test_what_is_not_there_is_refused_before_anything_is_written(fresh):
    for words, why in ABSENT:
        ran = fresh.run("events", "send", *words)
        assert ran.code == 2 and why in ran.said["error"]["message"], (words, ran.said)
    assert not (fresh.path / "events").exists()
    assert [entry for entry in fresh.ok("audit-log").said["entries"] if entry["action"] == "send event"] == []


def test_a_wrong_object_or_pair_or_a_secret_is_refused(fresh):
    publish_tiny(fresh)
    for more in (
        ("--object", "dataset/tiny@" + "0" * 64),
        ("--data", "nothing"),
        ("--data", "say=Bearer abcdefghijklmnopqrstuvwxyz"),
    ):
        assert fresh.run("events", "send", "dataset.published", "dataset/tiny", *more).code == 2
    assert fresh.ok("events").said["events"] == []


def test_who_may_not_run_may_not_send(fresh):
    publish_tiny(fresh)
    fresh.ok("person", "add", "ada")
    ran = fresh.run("events", "send", "dataset.published", "dataset/tiny", "--as", "eve")
    assert ran.code == 2 and ran.said["error"]["type"] == "Refused"
    assert fresh.ok("events").said["events"] == []
