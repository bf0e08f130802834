"""`headway endpoint key` and `headway complete` against a real endpoint: a key is shown once, audited, and asked for at once."""

import json
import time

import httpx
import pytest
from support import Home
from tiny_model import files_of
from waiting import limit

from tasks.serving import open_endpoint


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("endpoint") / "home")


@pytest.fixture(scope="module")
def served(home, model):
    endpoint = open_endpoint(home.path / "endpoints", "tiny")
    golden = json.loads((model / "golden.json").read_text())
    candidate = endpoint.start(model, "model/tiny@aaaaaaaa", files=files_of(model), golden=golden, timeout=limit(120))
    yield endpoint.switch(candidate)
    endpoint.stop()


def ask(served, **headers):
    body = {"prompt": "def ", "max_tokens": 2}
    return httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=limit(60), trust_env=False)


def settles(served, status, **headers):
    """Within a second or so the gateway has read the keys again."""
    deadline = time.monotonic() + limit(10)
    while ask(served, **headers).status_code != status:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_headway_complete_draws_by_temperature_and_seed_and_ends_before_a_text(home, served):
    def said(*how):
        return home.ok("complete", "tiny", "def ", "--max-tokens", 24, *how).said["completion"]

    drawn = ("--temperature", 1.5, "--seed")
    first = said(*drawn, 1)
    assert first == said(*drawn, 1) and len({first, said(*drawn, 2), said()}) == 3
    assert said(*drawn, 3, "--top-p", 0.000001) == said()  # the likeliest token alone is drawn from
    stop = first[5:7]
    assert said(*drawn, 1, "--stop", "no such text", "--stop", stop) == first[: first.index(stop)]
    assert home.run("complete", "tiny", "def ", "--top-p", 0).code == 2


def test_mistakes_are_told(home, served):
    assert home.run("endpoint", "key", "add", "tiny", "--caller", "Team A").code == 2
    assert home.run("endpoint", "key", "add", "other", "--caller", "a").code == 2
    assert home.run("endpoint", "key", "revoke", "tiny", "key-00000000").code == 2
    assert ask(served).status_code == 200


def test_keys_are_made_shown_once_asked_for_and_revoked(home, served):
    before = home.ok("audit-log").said["entries"]
    assert home.ok("endpoint", "key", "list", "tiny").said["keys"] == []
    assert ask(served).status_code == 200
    made = home.ok("endpoint", "key", "add", "tiny", "--caller", "team-a", "--reason", "a first caller").said
    key = {"Authorization": f"Bearer {made['key']}"}
    settles(served, 401)
    assert ask(served, **key).status_code == 200
    assert home.ok("complete", "endpoint/tiny", "def ", "--max-tokens", 2).said["model"] == "model/tiny@aaaaaaaa"
    listed = home.ok("endpoint", "key", "list", "tiny").said["keys"]
    assert [one["caller"] for one in listed] == ["headway", "team-a"] and made["key"] not in json.dumps(listed)
    revoked = home.ok("endpoint", "key", "revoke", "tiny", made["id"], "--reason", "it leaked").said
    assert revoked["caller"] == "team-a"
    settles(served, 401, **key)
    entries = home.ok("audit-log").said["entries"]
    assert entries[2:] == before
    entries = entries[:2]
    assert [one["action"] for one in entries] == ["revoke key", "make key"]
    assert entries[0]["reason"] == "it leaked" and entries[1]["after"] == "team-a"
    assert all(made["key"].encode() not in path.read_bytes() for path in home.path.rglob("*") if path.is_file())
