"""What the image of an endpoint starts, started with a real model: its entry point, its command, its environment."""

import json
import shutil
import time
import urllib.error
import urllib.request

import pytest
from containers import DOCKER, environment, json_form
from stand import free_ports, launch
from tiny_model import export_tiny, whole_version
from waiting import limit

ENDPOINT = DOCKER / "endpoint.Dockerfile"


def start(folder, installed, model, **changed):
    """The container of an image, less the container. The entry point lies where the image has it copied to."""
    folder.mkdir()
    port = free_ports("endpoint")["endpoint"]
    env = {**environment(ENDPOINT), "MODEL_FOLDER": str(model), "PORT": str(port), **changed}
    env |= {"HEADWAY_SERVE": str(folder), "HOME": str(folder)}
    entry = {"/usr/local/bin/serve": str(DOCKER / "endpoint.sh")}
    argv = [*(entry[word] for word in json_form(ENDPOINT, "ENTRYPOINT")), *json_form(ENDPOINT, "CMD")]
    check = json_form(ENDPOINT, "HEALTHCHECK")
    return port, launch("endpoint", argv, env=env, path=[installed["endpoint"]], folder=folder, check=check)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The files of a model."""
    return export_tiny(tmp_path_factory.mktemp("tiny"))


def test_the_image_serves_a_model_with_the_packages_that_it_has(installed, model, tmp_path):
    port, running = start(tmp_path / "run", installed, model, MODEL_REF="model/tiny")
    try:
        running.wait(60)
        golden = json.loads((model / "golden.json").read_text())["prompts"][0]
        body = json.dumps({"prompt": golden["prompt"], "max_tokens": len(golden["tokens"])}).encode()
        told = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body, headers=told)
        with urllib.request.urlopen(request, timeout=limit(30)) as answer:
            said = json.load(answer)
        assert (said["model"], said["choices"][0]["text"]) == ("model/tiny", golden["completion"])
    finally:
        code = running.stop()
    assert code == 0, "SIGTERM ends the server, not the shell before it"
    assert (tmp_path / "run" / "serve.json").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_a_model_that_is_not_one_is_unhealthy(installed, model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    golden = json.loads((model / "golden.json").read_text())
    golden["prompts"][0]["tokens"][0] += 1
    (tmp_path / "model").chmod(0o755)
    (tmp_path / "model" / "golden.json").chmod(0o644)
    (tmp_path / "model" / "golden.json").write_text(json.dumps(golden))
    port, running = start(tmp_path / "run", installed, tmp_path / "model")
    try:
        reason = wait_for_reason(port, running)
    finally:
        running.stop()
    assert "golden prompt" in reason and not running.healthy()


def wait_for_reason(port, running):
    """Why the server will never be ready, once it says so."""
    deadline = time.monotonic() + limit(60)
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=limit(5))
        except urllib.error.HTTPError as error:
            reason = json.load(error)["reason"]
            if reason:
                return reason
        except OSError:
            pass
        assert running.process.poll() is None, running.log.read_text()
        time.sleep(0.1)
    raise AssertionError("the server says nothing")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"MODEL_REF": 'model/x", "port": 1'}, "give KIND/NAME"),
        ({"PORT": "8080; true"}, "whole numbers"),
        ({"THREADS": ""}, "whole numbers"),
        ({"MODEL_FOLDER": "/nowhere"}, "holds no exported model"),
        ({"HOST": '0.0.0.0", "open": true, "x": "'}, "an address to listen on"),
        ({"OPEN": "yes"}, "true or false"),
        ({"DEGRADE": ""}, "true or false"),
        ({"KEYS": '/a"b'}, "a quote or a backslash"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_server_starts(installed, tmp_path, changed, said):
    (tmp_path / "golden.json").touch()
    _, running = start(tmp_path / "run", installed, tmp_path, **changed)
    assert running.process.wait(limit(20)) == 2
    assert said in running.log.read_text()
    assert not (tmp_path / "run" / "serve.json").exists()


def with_a_variant(model, folder):
    """A model that does not answer as it should, with a variant in its folder that does. A real one would be smaller."""
    shutil.copytree(model, folder)
    shutil.copytree(model, folder / "variants" / "int8")
    golden = json.loads((folder / "golden.json").read_text())
    golden["prompts"][0]["tokens"][0] += 1
    (folder / "golden.json").write_text(json.dumps(golden))
    return folder


def first_answer(port, running, *, seconds=60):
    """Status and headers of a completion, once the server says why its model does not answer, and another one may."""
    wait_for_reason(port, running)
    body = json.dumps({"prompt": "def ", "max_tokens": 2}).encode()
    deadline = time.monotonic() + limit(seconds)
    while time.monotonic() < deadline:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=limit(30)) as answer:
                return answer.status, answer.headers
        except urllib.error.HTTPError as error:
            status, headers = error.code, error.headers
        time.sleep(0.05)
    return status, headers


def test_a_variant_in_the_mounted_folder_answers_when_the_model_cannot(installed, model, tmp_path):
    folder = with_a_variant(model, tmp_path / "model")
    port, running = start(tmp_path / "run", installed, folder, MODEL_REF="model/tiny")
    try:
        assert "golden prompt" in wait_for_reason(port, running)
        status, headers = first_answer(port, running)
        assert (status, headers["X-Headway-Degraded"]) == (200, "smaller")
        assert headers["X-Headway-Model"] == "model/tiny/variants/int8"
        assert not running.healthy()
    finally:
        running.stop()


@pytest.mark.long
def test_variants_are_no_rungs_where_nobody_wants_degraded_answers(installed, model, tmp_path):
    folder = with_a_variant(model, tmp_path / "model")
    port, running = start(tmp_path / "run", installed, folder, DEGRADE="false")
    try:
        assert first_answer(port, running, seconds=2)[0] == 503
    finally:
        running.stop()


def test_variants_of_a_version_that_is_named_are_verified_with_it(model, tmp_path):
    from tasks.jobs.serving.program import ServeSettings

    ref = whole_version(with_a_variant(model, tmp_path / "model"), tmp_path / "mounted")
    files = tmp_path / "mounted" / "files"
    told = {"model_folder": files, "model_ref": ref, "files": None, "manifest": files.parent / "manifest.json"}
    full, smaller = ServeSettings(**told, port=1, outputs=tmp_path, variants=True).rungs()
    assert (smaller.name, smaller.model_ref, smaller.folder) == (
        "smaller",
        f"{ref}/variants/int8",
        files / "variants/int8",
    )
    assert {(file.path, file.sha256) for file in smaller.files} == {
        (file.path.removeprefix("variants/int8/"), file.sha256)
        for file in full.files
        if file.path.startswith("variants/")
    }


def test_azure_mls_variables_are_understood_and_a_version_is_verified(installed, model, tmp_path):
    """A registered folder is mounted with its own name below AZUREML_MODEL_DIR; the container listens for others."""
    ref = whole_version(model, tmp_path / "mounted" / "tiny")
    told = {"MODEL_FOLDER": "", "AZUREML_MODEL_DIR": str(tmp_path / "mounted"), "MODEL_REF": ref}
    port, running = start(
        tmp_path / "run", installed, model, **told, HOST="0.0.0.0", OPEN="true", LIMITS='{"waiting": 3}'
    )
    try:
        running.wait(90)
        body = {"input_data": {"input_string": ["def "], "parameters": {"max_new_tokens": 3, "do_sample": False}}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/score", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=limit(30)) as answer:
            assert list(json.load(answer)[0]) == ["0"] and answer.headers["X-Headway-Model"] == ref
    finally:
        running.stop()


def test_a_container_that_others_reach_asks_who_they_are_or_does_not_start(installed, model, tmp_path):
    _, running = start(tmp_path / "run", installed, model, HOST="0.0.0.0")
    assert running.process.wait(limit(60)) == 2
    assert "not loopback" in running.log.read_text()
    whole_version(model, tmp_path / "version")
    _, other = start(tmp_path / "other", installed, tmp_path / "version", MODEL_REF=f"model/tiny@{'0' * 64}")
    assert other.process.wait(limit(60)) == 2
    assert "the manifest is of another version" in other.log.read_text()
