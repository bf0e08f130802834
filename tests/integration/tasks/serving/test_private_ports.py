"""A real endpoint of two servers: a prompt that kills a model kills one, and private ports answer their gateway only."""

import os
import stat

import pytest
from endpoint_stand import ask
from tiny_model import export_tiny, files_of
from waiting import limit, until

from tasks.common import process
from tasks.common.process import descendants, read_json
from tasks.config.serving import DeploymentConfig
from tasks.serving import open_endpoint
from tasks.serving.protocol.routes import SECRET, make_secret, read_secret
from tasks.serving.servers import port_of, servers_of

BODY = {"prompt": "def ", "max_tokens": 2}
REF = "model/tiny@0000aaaa"


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_MODEL_FAULT", "segfault:crash me")
    model, endpoint = export_tiny(tmp_path), open_endpoint(tmp_path / "endpoints", "a")
    config = DeploymentConfig.model_validate({"replicas": {"least": 2, "most": 2}})
    golden = read_json(model / "golden.json")
    try:
        candidate = endpoint.start(model, REF, files=files_of(model), golden=golden, timeout=limit(120), config=config)
        yield endpoint, endpoint.switch(candidate).port
    finally:
        endpoint.stop()


def healths(endpoint):
    groups = (endpoint._gateway.state() or {}).get("colours", {})
    return [one["health"] for group in groups.values() for one in group["servers"]]


def models_of(endpoint):
    """Of each server, the processes below its parent."""
    handles = {folder.name: read_json(folder / "handle.json") for folder in servers_of(endpoint.folder)}
    return {name: set(descendants(int(handle["pid"]))) for name, handle in handles.items() if process.alive(handle)}


def test_a_prompt_that_kills_a_model_kills_one_and_private_ports_want_the_secret(served):
    endpoint, port = served
    until(lambda: healths(endpoint) == ["ready", "ready"])
    before = models_of(endpoint)
    status, headers, body = ask(port, {**BODY, "prompt": "crash me"}, timeout=limit(60))
    assert (status, headers["x-headway-gone"]) == (503, "1") and b"SIGSEGV" in body and "retry-after" in headers
    assert ask(port, BODY, timeout=limit(60))[0] == 200  # by the other one, or by this one once it is loaded again
    until(lambda: healths(endpoint) == ["ready", "ready"])
    after = models_of(endpoint)
    assert sum(before[name] != after[name] for name in before) == 1

    file = make_secret(endpoint.folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for folder in servers_of(endpoint.folder):
        private = port_of(folder)
        for path in ("/v1/models", "/metrics", "/"):
            assert ask(private, method="GET", path=path)[0] == 401
        assert ask(private, BODY)[0] == ask(private, BODY, headers={SECRET: "another"})[0] == 401
        assert ask(private, BODY, headers={SECRET: read_secret(file)})[0] == 200
        for path in ("/livez", "/readyz"):
            assert ask(private, method="GET", path=path)[0] == 200
    assert ask(port, BODY, headers={SECRET: "what a client says"})[0] == 200


def test_servers_behind_a_gateway_of_the_release_before_ask_for_no_secret(tmp_path):
    endpoint = open_endpoint(tmp_path, "a")
    gateway = endpoint._gateway
    assert gateway.shows_secret  # there is none: the next one shows it
    me = {"pid": os.getpid(), "started": process.process_started(os.getpid()), "boot_id": process.boot_id()}
    process.write_json(gateway.folder / "handle.json", me)
    process.write_json(gateway.folder / "control.json", {"port": 1, "token": "t", "pid": 1})
    assert not gateway.shows_secret
    process.write_json(gateway.folder / "control.json", {"port": 1, "token": "t", "pid": 1, "secret": True})
    assert gateway.shows_secret


def test_a_secret_that_is_gone_is_said(tmp_path):
    file = make_secret(tmp_path)
    assert read_secret(make_secret(tmp_path)) == read_secret(file) and len(read_secret(file)) > 40
    file.unlink()
    with pytest.raises(ValueError, match=r"gateway.secret cannot be read.*deploy it again"):
        read_secret(file)
    assert read_secret(None) == ""
