"""The edge alone, before an application that answers at once: who is let in, how much they may ask, and what is refused."""

import asyncio
import json
import time
from contextlib import suppress

import entra as authority
import httpx
import pytest
from waiting import limit

from tasks.common.errors import Unknown
from tasks.config.access import AccessConfig
from tasks.config.serving import LimitsConfig
from tasks.jobs.serving.api_middleware import Edge, Unread, require_flat, send_json
from tasks.jobs.serving.keys import require_guarded
from tasks.serving.keys import add_key, keys_file, own_key, read_keys, revoke_key

pytestmark = pytest.mark.unit

ASKED = {"prompt": "a"}


class Inner:
    """Says what reached it; answers cost as many tokens as they are asked to."""

    def __init__(self, *, seconds=0.0):
        self.seconds, self.reached = seconds, 0

    async def __call__(self, scope, receive, send):
        self.reached += 1
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = (await receive())["body"]
        await asyncio.sleep(self.seconds)
        tokens = str(json.loads(body).get("tokens", 0)) if body else "0"
        await send_json(send, 200, headers, headers={"X-Headway-Tokens": tokens})


def edge(inner=None, **how):
    return Edge(inner or Inner(), **{"limits": LimitsConfig(), **how})


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


def ask(app, *bodies, path="/v1/completions", **headers):
    """The answers to several requests, one after the other."""

    async def asking():
        async with client(app) as one:
            return [await one.post(path, json=body, headers=headers) for body in bodies]

    said = asyncio.run(asking())
    return said[0] if len(bodies) == 1 else said


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.integration
def test_without_keys_nobody_is_asked_and_with_the_first_everybody_is(tmp_path):
    app = edge(keys_file=keys_file(tmp_path))
    assert ask(app, ASKED).status_code == 200
    key, shown = add_key(tmp_path, "team-a")
    time.sleep(0.6)
    refused = ask(app, ASKED)
    assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert ask(app, ASKED, **bearer("hwk_wrong")).status_code == 401
    for way in (bearer(shown), {"api-key": shown}):
        seen = ask(app, ASKED, **way, **{"X-Headway-Caller": "somebody-else", "X-Request-Id": "mine"}).json()
        assert seen["x-headway-caller"] == "team-a" and seen["x-request-id"].startswith("cmpl-")
        assert shown not in json.dumps(seen)
    revoke_key(tmp_path, key.id)
    time.sleep(0.6)
    assert ask(app, ASKED, **bearer(shown)).status_code == 401
    with pytest.raises(Unknown, match=key.id):
        revoke_key(tmp_path, key.id)


def test_of_a_key_only_the_hash_is_kept(tmp_path):
    _, shown = add_key(tmp_path, "team-a")
    own = own_key(tmp_path)
    text = keys_file(tmp_path).read_text()
    assert shown not in text and own not in text
    assert keys_file(tmp_path).stat().st_mode & 0o077 == 0 and (tmp_path / "own.key").stat().st_mode & 0o077 == 0
    assert read_keys(tmp_path).caller(own) == "headway" and own_key(tmp_path) == own
    with pytest.raises(ValueError, match="Headway itself"):
        add_key(tmp_path, "headway")


@pytest.mark.integration
def test_a_file_of_keys_that_is_damaged_or_gone_lets_nobody_in(tmp_path):
    _, shown = add_key(tmp_path, "team-a")
    app = edge(keys_file=keys_file(tmp_path))
    assert ask(app, ASKED, **bearer(shown)).status_code == 200
    for change in (lambda: keys_file(tmp_path).write_text("{"), lambda: keys_file(tmp_path).unlink()):
        change()
        time.sleep(0.6)
        assert ask(app, ASKED).status_code == 401
        assert ask(app, ASKED, **bearer(shown)).status_code == 200
    keys_file(tmp_path).write_text("[]")
    assert ask(edge(keys_file=keys_file(tmp_path)), ASKED).status_code == 401
    with pytest.raises(ValueError, match="correct it"):
        add_key(tmp_path, "team-b")


@pytest.mark.integration
def test_tokens_of_entra_are_taken_from_the_applications_that_are_listed(tmp_path):
    with authority.serving() as entra:
        app = edge(access=AccessConfig.model_validate({"entra": entra.settings()}), keys_file=keys_file(tmp_path))
        good = authority.token()
        assert ask(app, ASKED, **bearer(good)).json()["x-headway-caller"] == f"entra:{authority.EVENT_GRID}"
        asked = len(entra.asked)
        assert ask(app, ASKED, **bearer(good)).status_code == 200 and len(entra.asked) == asked
        for status, token in [
            (401, authority.token(aud="api://another")),
            (401, authority.token(exp=int(time.time()) - 3600)),
            (401, authority.token("stranger", kid="first")),
            (403, authority.token(azp="00000000-0000-0000-0000-000000000000")),
            (401, "hwk_no-token"),
        ]:
            said = ask(app, ASKED, **bearer(token))
            assert said.status_code == status
            assert token not in said.text
        assert ask(app, ASKED).status_code == 401
        _, shown = add_key(tmp_path, "team-a")
        time.sleep(0.6)
        assert ask(app, ASKED, **bearer(shown)).json()["x-headway-caller"] == "team-a"
        entra.status = 500
        away = edge(access=AccessConfig.model_validate({"entra": entra.settings()}))
        said = ask(away, ASKED, **bearer(good))
        assert said.status_code == 503 and int(said.headers["Retry-After"]) > 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.4"])
def test_fault_69_nobody_listens_to_others_without_asking_who_they_are(tmp_path, host):
    with pytest.raises(ValueError, match=r"not loopback.*headway endpoint key add"):
        require_guarded(AccessConfig(host=host), keys_file(tmp_path))
    require_guarded(AccessConfig(host=host, open=True), None)
    require_guarded(AccessConfig(host=host, ask_for_keys=True), None)
    require_guarded(AccessConfig(host="127.0.0.1"), None)
    add_key(tmp_path, "team-a")
    require_guarded(AccessConfig(host=host), keys_file(tmp_path))


def test_requests_are_counted_by_caller(tmp_path):
    app = edge(limits=LimitsConfig(requests_per_minute=3), keys_file=keys_file(tmp_path))
    (_, one), (_, other) = add_key(tmp_path, "team-a"), add_key(tmp_path, "team-b")
    said = ask(app, *[ASKED] * 5, **bearer(one))
    assert [each.status_code for each in said] == [200, 200, 200, 429, 429]
    assert 1 <= int(said[-1].headers["Retry-After"]) <= 60
    assert said[-1].json()["error"]["type"] == "rate_limit_error"
    assert ask(app, ASKED, **bearer(other)).status_code == 200


def test_tokens_are_charged_after_the_answer_and_a_debt_is_waited_for():
    inner = Inner()
    app = edge(inner, limits=LimitsConfig(tokens_per_minute=100))
    said = ask(app, {"tokens": 60}, {"tokens": 500}, ASKED, ASKED)
    assert [each.status_code for each in said] == [200, 200, 429, 429]
    assert "tokens in a minute" in said[-1].json()["error"]["message"]
    assert "X-Headway-Tokens" not in said[0].headers
    assert inner.reached == 2


def test_a_stream_is_charged_by_its_comment_and_a_cut_one_by_its_events():
    def streamed(*parts):
        async def app(scope, receive, send):
            await receive()
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        return app

    for tokens, parts in [
        (70, (b"data: {}\n\n", b": tokens 70\n\ndata: [DONE]\n\n")),
        (70, (b"data: {}\n\n", b": tok", b"ens 70\n\n", b"data: [DONE]\n\n")),
        (3, (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n")),
    ]:
        app = edge(streamed(*parts), limits=LimitsConfig(tokens_per_minute=tokens))
        assert [each.status_code for each in ask(app, ASKED, ASKED)] == [200, 429]


def test_when_too_many_wait_the_next_is_told_so_at_once():
    inner = Inner(seconds=limit(2.0))
    app = edge(inner, limits=LimitsConfig(waiting=4))

    async def asking():
        async with client(app) as one:

            async def timed():
                began = time.perf_counter()
                return (await one.post("/v1/completions", json=ASKED)).status_code, time.perf_counter() - began

            return await asyncio.gather(*(timed() for _ in range(40)))

    said = asyncio.run(asking())
    assert sorted(status for status, _ in said) == [200] * 4 + [429] * 36
    assert inner.reached == 4 and (app.waiting, app.under_way) == (0, 0)
    assert max(seconds for status, seconds in said if status == 429) < limit(0.5)


def test_what_takes_too_long_is_given_up():
    said = ask(edge(Inner(seconds=5.0), limits=LimitsConfig(request_seconds=0.1)), ASKED)
    assert (said.status_code, said.headers["Retry-After"]) == (504, "1")


def test_bodies_are_bounded():
    app = edge(limits=LimitsConfig(body_bytes=1000, depth=16))
    assert ask(app, {"prompt": "a" * 980}).status_code == 200
    assert ask(app, {"prompt": "a" * 1000}).status_code == 413
    deep = json.loads("[" * 17 + "]" * 17)
    assert ask(app, deep).status_code == 400
    assert ask(app, {"prompt": "[" * 500 + '\\"' + "{" * 100}).status_code == 200

    async def other(**headers):
        async with client(app) as one:
            return (await one.post("/v1/completions", content=b"{}", headers=headers)).status_code

    assert asyncio.run(other(**{"Content-Type": "text/plain"})) == 415
    assert asyncio.run(other(**{"Content-Type": "application/json; charset=utf-8"})) == 200


def test_whoever_asks_for_something_sends_no_body_and_nothing_waits_for_one():
    """GET, HEAD and what else is no POST, with a key or without one."""
    inner = Inner()
    app = edge(inner, limits=LimitsConfig(read_seconds=0.1))

    async def slow():
        await asyncio.sleep(60)
        yield b"a"

    async def asking(method, path, content):
        async with client(app) as one:
            return (await one.request(method, path, content=content)).status_code

    for method, path in [("GET", "/"), ("GET", "/livez"), ("HEAD", "/readyz"), ("GET", "/v1/models"), ("DELETE", "/a")]:
        assert asyncio.run(asking(method, path, b"a")) == 413
        assert asyncio.run(asking(method, path, slow())) == 408
        assert inner.reached == 0
    assert asyncio.run(asking("GET", "/v1/models", b"")) == 200 and inner.reached == 1


@pytest.mark.parametrize(
    "body", [b'"' + b'\\"' * 500_000, b'{"a":"' + b"\\" * 999_999, b'"' * 1_000_000, b"[]" * 500_000, b"{" * 1_000_000]
)
def test_hostile_json_takes_no_time(body):
    began = time.perf_counter()
    with suppress(Unread):
        require_flat(body, depth=16)
    assert time.perf_counter() - began < limit(2.0)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_page_on_the_web_cannot_ask_by_a_name_of_its_own(host):
    assert ask(edge(), ASKED, Host=host).status_code == 400
    assert ask(edge(access=AccessConfig(host="0.0.0.0", open=True)), ASKED, Host=host or "a").status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080"])
def test_names_of_loopback_are_answered(host):
    assert ask(edge(), ASKED, Host=host).status_code == 200
