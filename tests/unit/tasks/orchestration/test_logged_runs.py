"""Which runs of a home are read: those that are asked for, however many others lie there."""

import json
import os
import socket
from types import SimpleNamespace

import pytest

from tasks.common import process
from tasks.orchestration import run_log
from tasks.orchestration.run_log import RunLog, logged_runs, runs_at_work, suspended

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Five runs, the newest first: of a living process, of another host, one that waits, one that died, one that was closed."""
    me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
    host = {"host": socket.gethostname()}
    handles = {
        "lives": {**me, **host},
        "elsewhere": {**me, "started": 1, "host": "another"},
        "waits": {**me, "started": 1, **host},
        "died": {**me, "boot_id": "before", **host},
        "closed": {**me, "started": 1, **host},
    }
    for age, (name, handle) in enumerate(handles.items()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "handle.json").write_text(json.dumps(handle))
        (folder / "events.jsonl").write_text(json.dumps({"event": "opened", "time": 1.0}) + "\n")
        for file in ("handle.json", "events.jsonl"):
            os.utime(folder / file, (1000.0 - age, 1000.0 - age))
    (tmp_path / "runs" / "waits" / "question.json").write_text("{}")
    (tmp_path / "runs" / ".strange").touch()
    read = []
    original = run_log.read_run
    monkeypatch.setattr(run_log, "read_run", lambda folder: read.append(folder.name) or original(folder))
    return tmp_path, read


def test_all_come_newest_first_and_each_is_read_when_its_turn_comes(home):
    path, read = home
    runs = logged_runs(path)
    assert next(runs).identity == "lives" and read == ["lives"]
    assert [run.identity for run in runs] == ["elsewhere", "waits", "died", "closed"]


def test_since_a_time_only_those_with_something_new_are_read(home):
    path, read = home
    assert [run.identity for run in logged_runs(path, since=998.5)] == read == ["lives", "elsewhere"]


def test_at_work_are_living_processes_and_those_of_other_hosts(home):
    path, read = home
    assert {run.identity for run in runs_at_work(path)} == set(read) == {"lives", "elsewhere"}
    assert [folder.name for folder in suspended(path)] == ["waits"]


def test_a_log_that_has_ended_is_not_at_work_until_its_run_goes_on(home):
    path, read = home
    log, run = RunLog(path, "lives"), SimpleNamespace(flow="f", subject="s", flow_run="", config_digest="", error=None)
    run.status, run.seconds, run.result = "completed", 1.0, SimpleNamespace(dataset="", report="")
    log.closed(run)
    assert {each.identity for each in runs_at_work(path)} == set(read) == {"elsewhere"}
    assert {each.identity for each in runs_at_work(path, closed=True)} == {"lives", "elsewhere"}
    RunLog(path, "lives").opened(run)
    assert {each.identity for each in runs_at_work(path)} == {"lives", "elsewhere"}


def test_a_home_without_runs_has_none(tmp_path):
    assert not list(logged_runs(tmp_path)) and not list(runs_at_work(tmp_path)) and not suspended(tmp_path)
