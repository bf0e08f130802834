"""What a spool wrote down arrives in a real MLflow, once, whatever dies and whatever is away meanwhile."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlflow
import pytest
from support import python_path
from waiting import limit, until

from tasks.common.process import boot_id, locked, process_started, read_json, stop, write_json
from tasks.lineage.messages import RUN_PAGE, TRAINING, as_input, output_tags, run_page, surroundings_tags
from tasks.lineage.publish import Publisher
from tasks.lineage.spool import Spool, refused, sync, unpublished

ROOT = Path(__file__).parents[4]
DATASET = {
    "name": "corpus",
    "digest": "d" * 64,
    "uri": "file:///d",
    "ref": "dataset/corpus@" + "d" * 64,
    "kind": "dataset",
}
FORKS = """# fork: commands
import json, os, signal, sys
from pathlib import Path
import mlflow.store.model_registry.sqlalchemy_store, mlflow.store.tracking.sqlalchemy_store
from tasks.lineage.publish import Publisher

def dying_at(count):
    left = [count]
    def hook(event, args):
        if event == "os.rename" and str(args[1]).endswith("published.json"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

for line in sys.stdin:
    folder, count = json.loads(line)
    child = os.fork()
    if child == 0:
        dying_at(count)
        Publisher(Path(folder)).follow()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
ORCHESTRATOR = """
import os, sys
from pathlib import Path
from tasks.lineage.spool import Spool
spool = Spool(Path(sys.argv[1]), sys.argv[2])
flow = spool.start_run("retrain", tags={}, params={})
done = spool.start_run("validate", parent=flow, tags={}, params={})
spool.end_run(done, "FINISHED", tags={})
spool.start_run("train", parent=flow, tags={}, params={})
print(flow, flush=True)
os.write(os.open(spool.folder / "events.jsonl", os.O_WRONLY | os.O_APPEND), b'{"event": "metr')
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    """The URI of one database file; its folder does not exist yet."""
    return f"sqlite:///{tmp_path_factory.mktemp('tracking') / 'mlflow' / 'mlflow.db'}"


def tell(spool, report, model="coder"):
    """A flow of two stages, with everything that stages tell."""
    told = {"headway.flow": "retrain", "mlflow.note.content": f"[Report]({RUN_PAGE}/artifacts/report.html)"}
    flow = spool.start_run("retrain", tags=told, params={"config_digest": "c" * 64})
    train = spool.start_run("train", parent=flow, tags={"headway.reused": "false"}, params={"config.steps": 800})
    spool.log_inputs(train, [DATASET, {**DATASET, "name": "other", "digest": "e" * 64}])
    spool.log_metrics(train, [("loss", 6.0 - step / 1000, step) for step in range(1100)])
    spool.log_metrics(train, [])
    spool.log_file(train, report)
    spool.log_file(train, report.parent / "not-there")
    spool.register(train, name=model, uri="file:///one", alias="champion", tags={"headway.ref": "one"})
    spool.register(
        train, name=model, uri="file:///two", alias="champion", tags={"headway.ref": "two"}, note="two", about="a model"
    )
    spool.end_run(train, "FINISHED", tags={"headway.output.0": "checkpoint/coder@1"})
    spool.end_run(flow, "FAILED", tags={})
    spool.close()
    return flow, train


@pytest.fixture(scope="module")
def published(tracking, tmp_path_factory):
    """Home, MLflow's client, the spool, and our and MLflow's identities of its two runs."""
    home = tmp_path_factory.mktemp("home")
    (home / "report.html").write_text("<p>done</p>")
    spool = Spool(home, tracking)
    ours = tell(spool, home / "report.html")
    known = spool.published(timeout=limit(60))
    return home, mlflow.MlflowClient(tracking), spool, ours, [known[run]["id"] for run in ours]


def runs_of(client, ours):
    experiment = client.get_experiment_by_name("headway").experiment_id
    found = client.search_runs([experiment], max_results=1000)
    return [run for run in found if run.data.tags["headway.run"] in ours]


def assert_whole(client, ours, model, sources=("file:///one", "file:///two")):
    """Everything that `tell` told is there, once."""
    flow, train = (next(r for r in runs_of(client, ours) if r.data.tags["headway.run"] == run) for run in ours)
    assert len(runs_of(client, ours)) == 2
    assert (flow.info.run_name, train.info.run_name) == ("retrain", "train")
    assert (flow.info.status, train.info.status) == ("FAILED", "FINISHED")
    assert train.data.tags["mlflow.parentRunId"] == flow.info.run_id
    assert train.data.tags["headway.output.0"] == "checkpoint/coder@1"
    assert train.data.params == {"config.steps": "800"}
    history = client.get_metric_history(train.info.run_id, "loss")
    assert sorted((point.step, point.value) for point in history) == [(n, 6.0 - n / 1000) for n in range(1100)]
    inputs = {item.dataset.name: item for item in train.inputs.dataset_inputs}
    assert len(train.inputs.dataset_inputs) == 2
    assert inputs["corpus"].dataset.digest == "d" * 36
    assert json.loads(inputs["corpus"].dataset.source)["ref"] == DATASET["ref"]
    assert [tag.value for tag in inputs["corpus"].tags] == ["dataset"]
    assert [file.path for file in client.list_artifacts(train.info.run_id)] == ["report.html"]
    versions = client.search_model_versions(f"name='{model}'")
    assert sorted(version.source for version in versions) == list(sources)
    champion = client.get_model_version_by_alias(model, "champion")
    assert (champion.source, champion.run_id) == (sources[1], train.info.run_id)
    assert champion.tags == {"headway.ref": "two", "headway.uri": "file:///two"} and champion.description == "two"
    assert client.get_model_version_by_alias(model, "previous").source == sources[0]
    page = f"#/experiments/{flow.info.experiment_id}/runs/{flow.info.run_id}"
    assert flow.data.tags["mlflow.note.content"] == f"[Report]({page}/artifacts/report.html)"


def test_everything_that_was_told_is_in_mlflow(published):
    home, client, spool, ours, _ = published
    assert_whole(client, ours, "coder")
    assert (spool.folder / "done").exists()
    assert unpublished(home) == []
    assert read_json(spool.folder / "published.json")["open"] == []


def test_what_a_run_read_and_made_is_told_with_its_blob_versions(published, tracking, tmp_path):
    """Short in the tags and sources, whole in the file."""
    _, client, *_ = published
    blobs = {f"part-{n}": f"2026-11-21T09:00:0{n}.0000000Z" for n in range(3)}
    read = {
        "ref": DATASET["ref"],
        "kind": "dataset",
        "name": "corpus",
        "digest": "d" * 64,
        "uri": "az://a/c/d",
        "files": 3,
        "bytes": 9,
    }
    made = {**read, "ref": "tokens/corpus@" + "e" * 64, "kind": "tokens", "blob_versions": {}}
    read["blob_versions"] = blobs
    spool = Spool(tmp_path, tracking, experiment="blobs")
    run = spool.start_run("train", tags=surroundings_tags({"host": "here", "sku": "small"}), params={})
    spool.log_inputs(run, [as_input(read)])
    spool.log_json(run, "lineage.json", {"inputs": [read], "outputs": [made, read]})
    spool.end_run(run, "FINISHED", tags=output_tags([made, read]))
    spool.close()
    found = client.get_run(spool.published(timeout=limit(60))[run]["id"])
    (dataset,) = (each.dataset for each in found.inputs.dataset_inputs)
    short = json.loads(dataset.source)["blob_versions"]
    assert re.fullmatch(r"3 files, sha256 [0-9a-f]{64}", short) and json.loads(dataset.profile) == {
        "files": 3,
        "bytes": 9,
    }
    tags = {key: value for key, value in found.data.tags.items() if key.startswith("headway.") and key != "headway.run"}
    assert tags == {
        "headway.host": "here", "headway.sku": "small",
        "headway.output.0": made["ref"], "headway.output.0.uri": "az://a/c/d",
        "headway.output.1": read["ref"], "headway.output.1.uri": "az://a/c/d", "headway.output.1.blob_versions": short,
    }  # fmt: skip
    file = client.download_artifacts(found.info.run_id, "lineage.json", str(tmp_path))
    assert json.loads(Path(file).read_text())["inputs"][0]["blob_versions"] == blobs


def test_the_unused_experiment_is_out_of_the_way_and_not_in_the_working_directory(published, tracking):
    _, client, *_ = published
    default = client.get_experiment("0")
    assert default.lifecycle_stage == "deleted"
    assert default.artifact_location.startswith(Path(tracking.removeprefix("sqlite:///")).parent.as_uri())


def test_an_event_that_mlflow_refuses_is_laid_aside_and_the_rest_is_told(published, tracking, tmp_path):
    """A run that was never started, and a name that no metric may have: both come back however often they are told."""
    _, client, *_ = published
    spool = Spool(tmp_path, tracking)
    flow = spool.start_run("retrain", tags={}, params={"steps": 1})
    spool.log_metrics("0" * 32, [("loss", 1.0, 1)])
    spool.log_metrics(flow, [("loss!", 1.0, 1)])
    spool.log_metrics(flow, [("loss", 2.0, 1)])
    spool.end_run(flow, "FINISHED", tags={})
    spool.close()
    known = spool.published(timeout=limit(60))
    assert (spool.folder / "done").exists()
    run = client.get_run(known[flow]["id"])
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 2.0})
    aside = [json.loads(line) for line in (spool.folder / "refused.jsonl").read_text().splitlines()]
    assert [one["event"]["metrics"] for one in aside] == [[["loss", 1.0, 1]], [["loss!", 1.0, 1]]]
    assert aside[0]["why"] == "the start of its run was refused" and "loss!" in aside[1]["why"]
    assert refused(tmp_path) == {spool.folder / "refused.jsonl": 2}


def test_many_small_events_become_few_calls_and_every_point_is_there(published, tmp_path, monkeypatch):
    """A server that was away for minutes is told thousands of them: one call each would take it minutes again."""
    _, client, spool, *_ = published
    folder = tmp_path / "lineage" / "many"
    folder.mkdir(parents=True)
    begin = [json.loads(line) for line in (spool.folder / "events.jsonl").read_text().splitlines()[:2]]
    flow = {**begin[1], "run": "7" * 32}
    points = [
        {
            "event": "metrics",
            "time": 1000 + step,
            "run": "7" * 32,
            "metrics": [["loss", float(step), step], ["x", 1.0, step]],
        }
        for step in range(1200)
    ]
    told = [begin[0], flow, *points, {"event": "close", "time": 9999}]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
    batches = []
    log_batch = mlflow.MlflowClient.log_batch
    monkeypatch.setattr(
        mlflow.MlflowClient,
        "log_batch",
        lambda self, *args, **kwargs: (
            batches.append(len(kwargs.get("metrics", ()))),
            log_batch(self, *args, **kwargs),
        )[1],
    )
    publisher = Publisher(folder)
    publisher.follow()
    assert [count for count in batches if count] == [1000, 1000, 400]
    run = publisher.runs["7" * 32]["id"]
    for name in ("loss", "x"):
        found = client.get_metric_history(run, name)
        assert [(point.step, point.timestamp) for point in found] == [(step, 1000 + step) for step in range(1200)]


@pytest.mark.long
def test_a_short_flow_whose_working_directory_is_deleted_is_told_at_once(tracking, tmp_path, monkeypatch):
    """Prefect gives each flow run a temporary one, and deletes it when the run has ended."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    spool = Spool(tmp_path / "home", tracking)
    monkeypatch.chdir(tmp_path)
    gone.rmdir()
    run = spool.start_run("validate", tags={}, params={})
    spool.end_run(run, "FINISHED", tags={})
    spool.close()
    assert run in spool.published(timeout=limit(60.0))
    assert (spool.folder / "done").exists()


def test_a_locked_database_is_waited_for(published, tracking, tmp_path):
    """MLflow waits for 20 s by itself, and gives up; the publisher does not."""
    _, client, *_ = published
    spool = Spool(tmp_path, tracking)
    flow = spool.start_run("retrain", tags={}, params={})
    spool.published(timeout=0)
    until(lambda: flow in (read_json(spool.folder / "published.json") or {}).get("runs", {}))
    with sqlite3.connect(tracking.removeprefix("sqlite:///"), timeout=60, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        spool.log_metrics(flow, [("loss", 2.0, 1)])
        spool.end_run(flow, "FINISHED", tags={})
        spool.close()
        until(lambda: "database is locked" in (spool.folder / "publish.log").read_text())
        other.execute("ROLLBACK")
    known = spool.published(timeout=limit(60))
    run = client.get_run(known[flow]["id"])
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"loss": 2.0})
    assert refused(tmp_path) == {}


@pytest.fixture
def make_champion(published, tmp_path):
    """Publish a spool that registers one version and gives it an alias."""

    def publish(uri, time, alias="champion", name="late", **more):
        folder = tmp_path / "lineage" / uri
        folder.mkdir(parents=True)
        events = (published[2].folder / "events.jsonl").read_text().splitlines()[:2]
        told = {"event": "register", "time": time, "name": name, "alias": alias, "tags": {"headway.ref": uri}, **more}
        told |= {"uri": f"file:///{uri}", "run": json.loads(events[1])["run"]}
        lines = [*events, json.dumps(told), json.dumps({"event": "close", "time": time})]
        (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines))
        Publisher(folder).follow()

    return publish


def test_two_publishers_at_once_do_not_undo_each_others_alias(published, make_champion, tmp_path):
    """The older event is told by a publisher that has to wait while a newer one is told: it sees what that one wrote."""
    client, older = published[1], threading.Thread(target=make_champion, args=("older", 1000), kwargs={"name": "raced"})
    with locked(tmp_path / "lineage.lock"):
        older.start()
        client.create_registered_model("raced")
        while not (tmp_path / "lineage" / "older" / "published.json").exists():
            time.sleep(0.05)
        newer = client.create_model_version("raced", "file:///newer")
        client.set_registered_model_alias("raced", "champion", newer.version)
        client.set_registered_model_tag("raced", "headway.champion_since", "2000")
    older.join()
    assert client.get_model_version_by_alias("raced", "champion").source == "file:///newer"
    assert {version.source for version in client.search_model_versions("name='raced'")} == {
        "file:///newer",
        "file:///older",
    }


def test_an_alias_is_not_moved_back_by_a_spool_that_is_told_late(published, make_champion):
    client = published[1]
    make_champion("first", 1000)
    make_champion("newest", 3000)
    make_champion("late", 2000)
    assert client.get_model_version_by_alias("late", "champion").source == "file:///newest"
    assert client.get_model_version_by_alias("late", "previous").source == "file:///first"
    assert len(client.search_model_versions("name='late'")) == 3
    make_champion("second", 4000, previous="untold")
    assert "previous" not in client.get_registered_model("late").aliases
    make_champion("untold", 3500, alias="challenger")
    assert client.get_model_version_by_alias("late", "previous").source == "file:///untold"


def test_the_page_of_a_run_is_that_of_the_server_that_shows_it(tmp_path):
    spool = tmp_path / "spool"
    told = {"runs": {"a": {"id": "1f", "experiment": "7"}}}
    ours = {**told, "tracking_uri": f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"}
    write_json(spool / "published.json", ours)
    assert run_page(tmp_path, spool, "a") is None
    write_json(tmp_path / "platform" / "mlflow" / "server.json", {"url": "http://127.0.0.1:7"})
    assert run_page(tmp_path, spool, "a") is None
    me = {"pid": os.getpid(), "started": process_started(os.getpid()), "boot_id": boot_id()}
    write_json(tmp_path / "platform" / "mlflow" / "handle.json", me)
    assert run_page(tmp_path, spool, "a") == f"http://127.0.0.1:7/#/experiments/7/runs/1f?{TRAINING}"
    assert run_page(tmp_path, spool, "b") is None
    write_json(spool / "published.json", {**told, "tracking_uri": "https://me:secret@mlflow.example.org/"})
    assert run_page(tmp_path, spool, "a") == f"https://mlflow.example.org/#/experiments/7/runs/1f?{TRAINING}"
    write_json(spool / "published.json", {**told, "tracking_uri": "azureml://somewhere"})
    assert run_page(tmp_path, spool, "a") is None


def test_ids_are_mlflows(published):
    _, client, _, _, ids = published
    assert [client.get_run(run).info.run_name for run in ids] == ["retrain", "train"]


def test_a_publisher_killed_after_every_event_before_it_could_note_it_doubles_nothing(published, tmp_path):
    """Each publisher tells one event anew and one more, and dies before it has noted that: all events are told twice."""
    _, client, spool, ours, _ = published
    text = (spool.folder / "events.jsonl").read_text().replace('"name": "coder"', '"name": "again"')
    for run in ours:
        text = text.replace(run, run[::-1])
    (tmp_path / "events.jsonl").write_text(text)
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    forks = subprocess.Popen(
        [sys.executable, "-c", FORKS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    codes = []
    for count in [1] + [2] * 100:
        print(json.dumps([str(tmp_path), count]), file=forks.stdin, flush=True)
        codes.append(int(forks.stdout.readline()))
        if codes[-1] == 0:
            break
    forks.communicate()
    assert codes == [-signal.SIGKILL] * len(text.splitlines()) + [0]
    assert_whole(client, [run[::-1] for run in ours], "again")


def test_the_runs_of_an_orchestrator_that_was_killed_end_too(published, tracking, tmp_path):
    _, client, *_ = published
    said = subprocess.run(
        [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), tracking],
        env={**os.environ, "PYTHONPATH": python_path(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "lineage").iterdir()
    until((folder / "done").exists)
    runs = runs_of(client, read_json(folder / "published.json")["runs"])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "retrain": "KILLED", "validate": "FINISHED", "train": "KILLED",
    }  # fmt: skip
    assert said.stdout.strip() in {run.data.tags["headway.run"] for run in runs}


def test_a_server_that_is_away_loses_nothing_and_is_told_when_it_is_back(published, tracking, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "report.html").write_text("<p>done</p>")
    shutil.copy(tracking.removeprefix("sqlite:///"), tmp_path / "server.db")  # which has its tables: they take seconds
    spool = Spool(tmp_path, f"http://127.0.0.1:{port}")
    server = subprocess.Popen(
        [
            sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "files"),
        ],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        ours = tell(spool, tmp_path / "report.html", "served")
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))
        assert unpublished(tmp_path) == [spool.folder]
        assert spool.published(timeout=0) == {}
        assert sync(tmp_path, timeout=limit(60)) == []
        client = mlflow.MlflowClient(f"http://127.0.0.1:{port}")
        assert_whole(client, ours, "served", sources=("headway:///one", "headway:///two"))
    finally:
        stop(spool.folder)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_sync_publishes_a_spool_whose_publisher_is_gone(published, tracking, tmp_path):
    """As after a restart of the machine: the events lie there, and nobody tells them."""
    _, client, spool, *_ = published
    left = tmp_path / "lineage" / "20260101-000000-left"
    left.mkdir(parents=True)
    events = (spool.folder / "events.jsonl").read_text().splitlines()
    start = {**json.loads(events[1]), "run": "5" * 32}
    dead = {**json.loads(events[0]), "writer": {"pid": 1, "started": "0", "boot_id": "an earlier one"}}
    (left / "events.jsonl").write_text(json.dumps(dead) + "\n" + json.dumps(start) + "\n")
    write_json(left / "handle.json", dead["writer"])
    assert unpublished(tmp_path) == [left]
    assert sync(tmp_path) == []
    (run,) = runs_of(client, ["5" * 32])
    assert run.info.status == "KILLED"
