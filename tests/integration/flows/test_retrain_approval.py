"""A retraining that events asked for waits for a person, with the evidence beside the form; nothing is spent before."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from caused import make_batch
from persons import policy_of
from waiting import limit, until

CAUSED = Path(__file__).parents[2] / "support" / "caused.py"
ASKING = ["approval.before_retrain=true"]


@pytest.fixture
def revalidation(home, done):
    """The newest revalidation of the champion, and a batch of events that asks for a retraining because of it."""
    ran = home.run("revalidate", "tiny", "--set", f"revalidation.drift.seed={time.time_ns() % 10**6}")
    assert ran.code == 0, ran.stderr
    return ran.said["revalidation"]


def start(home, revalidation, **arguments):
    cause = make_batch(home.path, "model.degraded", "model/tiny", dataset=revalidation["ref"])
    told = {"flow": "retrain", "dataset": "tiny", "cause": cause, "set": ASKING, **arguments}
    return subprocess.Popen(
        [sys.executable, "-P", str(CAUSED), json.dumps(told)],
        env=home.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def waiting(home, process):
    """The question of a run that was started just now, once it waits for the answer; its folder says when."""

    def asks():
        assert process.poll() is None, process.communicate()
        newest = max(home.path.glob("runs/*/handle.json"), key=lambda path: path.stat().st_mtime)
        log = newest.with_name("events.jsonl").read_text()
        return '"event": "waiting"' in log and not newest.with_name("closed").exists()

    until(asks, timeout=120.0, every=0.1)
    [asked] = [each for each in home.ok("approve").said["waiting"] if each["flow"] == "retrain"]
    return asked


def ended(process):
    out, err = process.communicate(timeout=limit(240))
    assert out, err
    return json.loads(out.splitlines()[-1])


def form(home, flow_run):
    """The text above the form, as Prefect keeps it."""
    with sqlite3.connect(home.path / "prefect" / "prefect.db") as database:
        query = "SELECT value FROM flow_run_input WHERE flow_run_id = ? AND key LIKE '%-description'"
        [*_, (text,)] = database.execute(query, (flow_run,)).fetchall()
    return json.loads(text)


@pytest.mark.long
def test_the_form_shows_the_evidence_and_a_rejection_spends_nothing(home, revalidation):
    process = start(home, revalidation)
    asked = waiting(home, process)
    assert "Retrain model/tiny" in asked["question"]
    text = form(home, asked["flow_run"])
    assert "valid" in text and "performance" in text and "evidence.html" in text
    assert "model.degraded" in text and "model/tiny" in text
    stages = [event for event in log(home, asked["flow_run"]) if event["event"] == "started"]
    assert stages == []
    home.ok("approve", asked["name"], "--reject", "--reason", "the data is broken")
    said = ended(process)
    assert said["type"] == "FAILED" and "the data is broken" in said["message"]
    assert [event for event in log(home, asked["flow_run"]) if event["event"] == "started"] == []


def test_an_approved_one_runs_and_mlflow_and_the_audit_log_say_who_and_why(home, revalidation):
    process = start(home, revalidation)
    asked = waiting(home, process)
    home.ok("approve", asked["name"], "--approve", "--reason", "it drifted")
    said = ended(process)
    assert said["type"] == "COMPLETED", said
    [used, entry, *_] = [e for e in home.ok("audit-log").said["entries"] if revalidation["ref"] in e["what"]]
    assert used["action"] == "use approval"
    assert (entry["action"], entry["reason"]) == ("approve", "it drifted") and entry["what"].startswith("retrain ")
    home.ok("lineage", "--sync")
    with sqlite3.connect(home.path / "mlflow" / "mlflow.db") as database:
        query = "SELECT run_uuid FROM tags WHERE key = 'headway.prefect_flow_run' AND value = ?"
        [(run,)] = database.execute(query, (asked["flow_run"],)).fetchall()
        tags = dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,)).fetchall())
    assert tags["headway.approval_reason"] == "it drifted" and tags["headway.approved_by"]
    again = start(home, revalidation)  # what was agreed to is done
    asked = waiting(home, again)
    home.ok("approve", asked["name"], "--reject", "--reason", "it is done")
    assert ended(again)["type"] == "FAILED"


def test_agreeing_to_a_training_gives_no_right_to_deploy(home, revalidation, tmp_path, monkeypatch):
    """The whole run went on in the name of who agreed; the form told of neither the endpoint nor the settings."""
    policy, tokens = policy_of(home, tmp_path, ("root", ["approve", "promote"]))
    monkeypatch.setenv("HEADWAY_POLICY", str(policy))
    monkeypatch.setenv("HEADWAY_TOKEN", tokens["root"])
    process = start(home, revalidation, set=[*ASKING, "deployment.degrade=false"], person="bridge")
    asked = waiting(home, process)
    text = form(home, asked["flow_run"])
    assert "for endpoint/tiny?" in text and "deployment.degrade" in text
    home.ok("approve", asked["name"], "--approve", "--as", "root", "--reason", "it drifted")
    said = ended(process)
    assert said["type"] == "FAILED" and "bridge may not promote" in said["message"], said


@pytest.mark.long
def test_nobody_is_asked_without_events_or_where_it_is_not_wanted(home, revalidation):
    assert home.retrain("--set", ASKING[0]).code == 0
    assert ended(start(home, revalidation, set=[]))["type"] == "COMPLETED"


@pytest.mark.long
def test_events_that_another_run_covers_start_no_second_retraining(home, revalidation):
    cause = make_batch(home.path, "model.degraded", "model/tiny", dataset=revalidation["ref"])
    assert ended(start(home, revalidation, cause=cause, set=[]))["type"] == "COMPLETED"
    before = sorted(path.name for path in (home.path / "reports").iterdir())
    said = ended(start(home, revalidation, cause=cause, set=[]))
    assert said["type"] == "COMPLETED" and "covers the same events" in said["message"]
    assert sorted(path.name for path in (home.path / "reports").iterdir()) == before


def log(home, flow_run):
    lines = (home.path / "runs" / flow_run / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
