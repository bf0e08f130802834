"""`mlflow.pyfunc.load_model("models:/NAME@champion")` from a plain MLflow server: without Headway, and only what was signed."""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import mlflow
import pytest
from serving_stand import flip
from tiny_model import PROMPTS, export_tiny, files_of
from waiting import limit

from deployments.cli.registry.models import tell
from tasks.lineage.messages import MODEL_NOTE
from tasks.lineage.spool import Spool
from tasks.registry.logged_model import logged_model
from tasks.registry.refs import move_ref
from tasks.registry.versions import publish
from tasks.security.signatures import sign
from tasks.serving import open_endpoint
from tasks.serving.client import Sampling, complete
from tasks.signing.keys import ensure_key, public_key_of
from tasks.storage import open_store
from tasks.storage.manifest import Provenance

PLAIN = """
import importlib.util, json, os, sys
from concurrent.futures import ThreadPoolExecutor
sys.path.append(sys.argv[1])
assert importlib.util.find_spec("tasks") is None and importlib.util.find_spec("deployments") is None
import mlflow, mlflow.pyfunc

answered = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library prints is no answer

def answer(tracking, config, prompts):
    mlflow.set_tracking_uri(tracking)
    model, params = mlflow.pyfunc.load_model("models:/tiny@champion", model_config=config), {"max_tokens": 12}
    answers = model.predict(prompts, params=params)
    with ThreadPoolExecutor(4) as pool:  # as MLflow's own server calls it
        assert [*pool.map(lambda prompt: model.predict([prompt], params=params)[0], 3 * prompts)] == 3 * answers
    return answers

for line in sys.stdin:  # a fork for each: mlflow is imported once, and no model is loaded into another one's process
    child = os.fork()
    if child == 0:
        try:
            output = {"answers": answer(*json.loads(line))}
        except Exception as error:
            output = {"refused": str(error)}
        print(json.dumps(output), file=answered, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def load():
    """Loads the champion and asks it: an interpreter with installed packages, and nothing of ours (`-S`: no editable install)."""
    argv = [sys.executable, "-I", "-S", "-c", PLAIN, sysconfig.get_paths()["purelib"]]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HEADWAY_HOME")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd="/", env=kept, **pipes) as plain:

        def ask(tracking, *, config=None, prompts=PROMPTS):
            print(json.dumps([tracking, config or {}, prompts]), file=plain.stdin, flush=True)
            return json.loads(plain.stdout.readline())

        yield ask
        plain.stdin.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a plain `mlflow server`, in a folder of its own."""
    folder = tmp_path_factory.mktemp("mlflow-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(folder / "server.log", "wb") as log:
        child = subprocess.Popen(
            argv, cwd=folder, stdout=log, stderr=log, env={**os.environ, **quiet}, start_new_session=True
        )
    deadline = time.monotonic() + limit(120)
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=limit(2))
            break
        except OSError:
            assert child.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    os.killpg(child.pid, 15)
    child.wait(limit(20))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Home, store, and the published and signed model of it, with an evaluation that allowed it."""
    home = tmp_path_factory.mktemp("home")
    store, folder = open_store(home), export_tiny(tmp_path_factory.mktemp("export"))
    text = tmp_path_factory.mktemp("text")
    (text / "scores.json").write_text("{}")
    tokens = publish(store, text, kind="tokens", inputs=(), provenance=Provenance(name="tiny"))
    scores = publish(
        store,
        text,
        kind="evaluation",
        inputs=(tokens.version,),
        provenance=Provenance(name="tiny", inputs=(tokens.ref,), metrics={"bits_per_byte": 1.75}),
    )
    (folder / "variants" / "int8").mkdir(parents=True)
    (folder / "variants" / "int8" / "model.onnx").write_bytes(b"for endpoints")
    model = publish(
        store,
        folder,
        kind="model",
        inputs=(),
        provenance=Provenance(name="tiny", context=(scores.ref,), metrics={"greedy_equal": 5.0}),
    )
    sign(store, home, model)
    move_ref(store, "tiny/champion", model.ref, inputs=(), reason="test")
    return home, store, model


def crown(exported, tracking, monkeypatch, *, weights=""):
    """Tell MLflow that the model is the champion, as `headway promote` does, and wait until it is known."""
    home, store, model = exported
    monkeypatch.setenv("HEADWAY_HOME", str(home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    monkeypatch.setenv("HEADWAY_MLFLOW_WEIGHTS", weights)
    before = set((home / "lineage").glob("*"))
    tell(store, "promote", "better", model)
    (spool,) = set((home / "lineage").glob("*")) - before
    deadline = time.monotonic() + limit(240)
    while not (spool / "done").exists():
        assert time.monotonic() < deadline, (spool / "publish.log").read_text()
        time.sleep(0.1)
    assert not (spool / "refused.jsonl").exists(), (spool / "refused.jsonl").read_text()
    return mlflow.MlflowClient(tracking)


def model_of(version):
    """The LoggedModel's identity; of a version, a server tells it in the source alone."""
    return version.source.removeprefix("models:/")


@pytest.fixture(scope="module")
def crowned(exported, server):
    with pytest.MonkeyPatch.context() as patch:
        return crown(exported, server, patch)


def test_a_plain_interpreter_answers_as_the_endpoint_does(exported, server, crowned, load, tmp_path):
    _, store, model = exported
    endpoint = open_endpoint(tmp_path / "endpoints", "api")
    folder = store.fetch(model)
    golden = json.loads((folder / "golden.json").read_text())
    try:
        candidate = endpoint.start(folder, model.ref, files=files_of(folder), golden=golden, timeout=limit(60))
        at = endpoint.switch(candidate)
        expected = [complete(at.url, prompt, Sampling(12))["choices"][0]["text"] for prompt in PROMPTS]
    finally:
        endpoint.stop()
    assert load(server) == {"answers": expected} and len(set(expected)) > 1


def test_the_logged_model_is_linked_to_the_run_and_carries_what_was_measured(exported, crowned):
    version = crowned.get_model_version_by_alias("tiny", "champion")
    assert version.source.startswith("models:/m-") and version.tags["headway.ref"] == exported[2].ref
    logged, run = crowned.get_logged_model(model_of(version)), crowned.get_run(version.run_id)
    assert (logged.status, logged.source_run_id) == ("READY", version.run_id)
    assert [output.model_id for output in run.outputs.model_outputs] == [model_of(version)]
    measured = {metric.key: (metric.value, metric.run_id, metric.dataset_name) for metric in logged.metrics}
    assert measured == {
        "bits_per_byte": (1.75, version.run_id, "tiny"),
        "greedy_equal": (5.0, version.run_id, None),
    }
    names = {file.path for file in crowned.list_logged_model_artifacts(model_of(version))}
    assert {"MLmodel", "requirements.txt", "code", "data"} <= names
    inside = {file.path for file in crowned.list_logged_model_artifacts(model_of(version), "data/headway")}
    assert inside == {
        f"data/headway/{name}"
        for name in ("key.pub", "manifest.json", "places.json", "signature.json", "statement.json")
    }


def test_telling_it_twice_makes_no_second_version_and_no_second_model(exported, server, crowned, monkeypatch):
    before = crowned.get_model_version_by_alias("tiny", "champion")
    crown(exported, server, monkeypatch)
    after = crowned.get_model_version_by_alias("tiny", "champion")
    assert (after.version, after.source) == (before.version, before.source)
    assert len(crowned.search_model_versions("name='tiny'")) == 1
    experiment = crowned.get_run(before.run_id).info.experiment_id
    assert [one.model_id for one in crowned.search_logged_models([experiment])] == [model_of(before)]


def test_a_flipped_byte_of_the_weights_or_of_what_was_signed_is_refused_by_name(exported, server, crowned, load):
    _, store, model = exported
    weights = next(Path(store.location(model, file)) for file in model.content.files if file.path == "model.onnx.data")
    flip(weights)
    try:
        ran = load(server)
    finally:
        flip(weights)
    assert all(word in ran["refused"] for word in (model.ref, "model.onnx.data", "is not what was signed")), ran


def test_another_key_than_the_one_that_the_user_names_is_refused(exported, server, crowned, load, tmp_path):
    other = public_key_of(ensure_key(tmp_path / "keys"))
    ran = load(server, config={"key": str(other)})
    assert exported[2].ref in ran["refused"] and "not signed by the key" in ran["refused"]
    own = load(server, config={"key": str(exported[0] / "keys" / "signing.pub"), "threads": 1}, prompts=PROMPTS[:1])
    assert len(own["answers"]) == 1, own


def test_weights_that_were_copied_answer_without_the_store(exported, load, tmp_path, monkeypatch):
    """In a database file of its own; the copy of the weights is checked as the store's files are."""
    _, store, model = exported
    tracking = f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}"
    client = crown(exported, tracking, monkeypatch, weights="copy")
    version = client.get_model_version_by_alias("tiny", "champion")
    place = Path(client.get_logged_model(model_of(version)).artifact_location.removeprefix("file://"))
    assert {path.name for path in (place / "data" / "headway" / "weights").iterdir()} == {
        file.path for file in model.content.files if "/" not in file.path
    }
    assert json.loads((place / "data" / "headway" / "places.json").read_text()) == {}
    ran = load(tracking, prompts=PROMPTS[:1])
    golden = json.loads((store.fetch(model) / "golden.json").read_text())["prompts"][0]["completion"]
    assert golden.startswith(ran["answers"][0])
    flip(place / "data" / "headway" / "weights" / "tokenizer.json")
    ran = load(tracking)
    assert model.ref in ran["refused"] and "tokenizer.json" in ran["refused"]


def test_a_version_that_mlflow_cannot_open_gets_one_beside_it_that_it_can(exported, server, monkeypatch):
    """What an earlier release registered is left as it was; the alias moves to the version that can be loaded."""
    home, store, model = exported
    client = mlflow.MlflowClient(server)
    client.create_registered_model("tiny-old")
    old = client.create_model_version("tiny-old", f"headway:///{model.ref}", tags={"headway.ref": model.ref})
    client.set_registered_model_alias("tiny-old", "champion", old.version)
    spool = Spool(home, server, experiment="old")
    run = spool.start_run("promote", tags={}, params={})
    told = {"name": "tiny-old", "uri": store.uri_of(model), "tags": {"headway.ref": model.ref}, "about": MODEL_NOTE}
    spool.register(
        run, alias="champion", model=logged_model(store, home, model, spool.folder / "models", measuring={}), **told
    )
    spool.end_run(run, "FINISHED", tags={})
    spool.close()
    spool.published(timeout=limit(240))
    sources = {one.version: one.source for one in client.search_model_versions("name='tiny-old'")}
    now = client.get_model_version_by_alias("tiny-old", "champion")
    assert now.source.startswith("models:/m-") and sources == {
        old.version: f"headway:///{model.ref}",
        now.version: now.source,
    }


def test_what_cannot_be_made_a_model_of_is_registered_by_its_place(exported, server, tmp_path):
    home, store, model = exported
    spool = Spool(home, server, experiment="gone")
    run = spool.start_run("promote", tags={}, params={})
    gone = {"path": str(tmp_path / "gone"), "weights": "", "measured": []}
    told = {"name": "tiny-gone", "uri": store.uri_of(model), "tags": {"headway.ref": model.ref}}
    spool.register(run, alias="champion", model=gone, **told)
    spool.end_run(run, "FINISHED", tags={})
    spool.close()
    known = spool.published(timeout=limit(240))
    client = mlflow.MlflowClient(server)
    assert client.get_model_version_by_alias("tiny-gone", "champion").source == f"headway:///{model.ref}"
    assert client.get_run(known[run]["id"]).info.status == "FINISHED" and not (spool.folder / "refused.jsonl").exists()
