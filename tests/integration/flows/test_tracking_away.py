"""A tracking server, with a login, that goes away during training: the run goes on, and afterwards nothing is missing there.

Reads the spool's events one by one and asks the server for each. Five minutes, by hand: AWAY_SECONDS=300 and STAGES= before it.
"""

import json
import os
import subprocess
import time
from pathlib import Path

import mlflow
import pytest
from support import HEADWAY
from waiting import limit

from deployments.services import mlflow_server
from deployments.services.prefect_server import password
from tasks.lineage.messages import RUN_PAGE
from tasks.lineage.spool import unpublished

AWAY_SECONDS = float(os.environ.get("AWAY_SECONDS", "20"))
UP_TO = os.environ.get("STAGES", "--to train").split()
STEPS = 600 if AWAY_SECONDS < 60 else 5000


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Home of a tracking server of somebody's, and the environment that names it."""
    home = tmp_path / "elsewhere"
    server = mlflow_server.start(home)
    mlflow_server.wait(server)
    user, _, word = password(home).partition(":")
    named = {"MLFLOW_TRACKING_URI": server["url"], "MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": word}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    yield home, named
    mlflow_server.down(home)


def missing(client, folder):
    """What the events of a spool tell and the server does not know."""
    known = json.loads((folder / "published.json").read_text())["runs"]
    runs = {run: client.get_run(where["id"]) for run, where in known.items()}
    found = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        kind, run = event["event"], runs.get(event.get("run"))
        if kind not in ("open", "close") and not HELD[kind](client, event, run, runs):
            found.append(event)
    return found


def tags_held(event, run):
    page = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    return all(run.data.tags.get(key) in (value.replace(RUN_PAGE, page), None) for key, value in event["tags"].items())


def start_held(client, event, run, runs):
    """What the end says later may stand in the place of a tag."""
    parent = runs[event["parent"]].info.run_id if event["parent"] else None
    params = {key: str(value) for key, value in event["params"].items()}
    named = (run.info.run_name, run.data.tags.get("mlflow.parentRunId")) == (event["name"], parent)
    return named and run.data.params == params and event["tags"].keys() <= run.data.tags.keys()


def inputs_held(client, event, run, runs):
    there = {(one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs}
    return {(one["name"], one["digest"][:36]) for one in event["inputs"]} <= there


def metrics_held(client, event, run, runs):
    names = {name for name, _, _ in event["metrics"]}
    there = {(name, point.value, point.step) for name in names for point in history(client, run.info.run_id, name)}
    return {(name, value, step) for name, value, step in event["metrics"]} <= there


def history(client, run, name, cache={}):  # noqa: B006
    if (run, name) not in cache:
        cache[run, name] = client.get_metric_history(run, name)
    return cache[run, name]


def file_held(client, event, run, runs):
    name = Path(event["path"]).name
    there = client.download_artifacts(run.info.run_id, name)
    with open(there, "rb") as got, open(event["path"], "rb") as told:
        return got.read() == told.read()


def end_held(client, event, run, runs):
    return run.info.status == event["status"] and tags_held(event, run)


def register_held(client, event, run, runs):
    version = client.get_model_version_by_alias(event["name"], event["alias"])
    return version.tags.items() >= event["tags"].items() and version.run_id == run.info.run_id


HELD = {
    "start_run": start_held,
    "inputs": inputs_held,
    "metrics": metrics_held,
    "file": file_held,
    "end_run": end_held,
    "register": register_held,
}


@pytest.mark.long
def test_nothing_is_missing_after_the_tracking_server_was_away_during_training(home, done, elsewhere):
    theirs, named = elsewhere
    known = set(home.path.glob("jobs/train-*")), set(home.path.glob("lineage/*"))
    changed = ["--set", f"training.steps={STEPS}", "--set", f"training.seed={int(time.time()) % 10_000}"]
    command = subprocess.Popen(
        [str(HEADWAY), "retrain", "-c", "tiny", *changed, *UP_TO],
        env=home.environment() | named, cwd=home.path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + limit(200)
    while not any(
        path.stat().st_size for path in home.path.glob("jobs/train-*/metrics.jsonl") if path.parent not in known[0]
    ):
        assert time.monotonic() < deadline and command.poll() is None, command.communicate()
        time.sleep(0.1)
    assert mlflow_server.down(theirs)
    gone = time.monotonic()
    _, err = command.communicate(timeout=limit(280) + 2 * AWAY_SECONDS)
    took = time.monotonic() - gone
    assert command.returncode == 0, err
    (spool,) = set(home.path.glob("lineage/*")) - known[1]
    time.sleep(max(0.0, AWAY_SECONDS - took))
    assert spool in unpublished(home.path)
    away = time.monotonic() - gone
    mlflow_server.wait(mlflow_server.start(theirs))
    back = time.monotonic()
    while not (spool / "done").exists():
        assert time.monotonic() < back + limit(120)
        time.sleep(0.1)
    events = (spool / "events.jsonl").read_text().splitlines()
    points = sum(len(event.get("metrics", ())) for event in map(json.loads, events))
    print(
        f"away {away:.0f} s, run over after {took:.0f} s of it; {len(events)} events, {points} points; "
        f"told {time.monotonic() - back:.1f} s after it was back"
    )
    assert points > 3 * STEPS and not (spool / "refused.jsonl").exists()
    assert missing(mlflow.MlflowClient(named["MLFLOW_TRACKING_URI"]), spool) == []
