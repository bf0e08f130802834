"""Who is believed: each way to prove oneself, right, wrong, stale and forged, against a webhook that listens."""

import base64
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import entra as authority
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from entra import AUDIENCE, EVENT_GRID, TENANT, forged, private_key, serving, token
from waiting import limit, until
from webhook_stand import KEY, REACHED, SECRET, VARIABLES, event, eventually, listening, mac, secret, signed, written

from tasks.azure.entra import AGAIN_SECONDS, Entra, KeysAway
from tasks.config.access import EntraConfig

BODY = written(event())
NOW = time.time


@pytest.fixture
def environment(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def entra():
    with serving() as running:
        yield running


@pytest.fixture
def stand(environment, entra, tmp_path):
    """Every way is open."""
    entra.published, entra.status, entra.keys_at = ["first"], 0, ""
    entra.asked.clear()
    with listening(tmp_path, entra=entra.settings(), secret="env:STAND_SECRET", hmac="env:STAND_KEY") as running:
        yield running


def bearer(said: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {said}"}


def hs256_with_the_public_key() -> str:
    """A token that is right for whoever takes the public key for a shared one."""
    pem = private_key("first").public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return forged({"alg": "HS256", "kid": "first"}, lambda head: hmac.new(pem, head, hashlib.sha256).digest())


def own_key_inside() -> str:
    said = authority.claims()
    header = {"kid": "first", "jwk": authority.public_jwk("stranger"), "jku": "http://127.0.0.1:1/keys"}
    return jwt.encode(said, private_key("stranger"), "RS256", headers=header)


def deep() -> str:
    nested = base64.urlsafe_b64encode(b"[" * 5000).decode()
    return f"{nested}.e30.e30"


REQUESTS = {
    "nothing": (lambda: {}, 401, "proves nothing"),
    "secret": (lambda: secret(), 202, ""),
    "wrong secret": (lambda: {"X-Headway-Secret": SECRET[:-1] + "x"}, 401, "shared secret"),
    "secret cut short": (lambda: {"X-Headway-Secret": SECRET[:-1]}, 401, "shared secret"),
    "empty secret": (lambda: {"X-Headway-Secret": ""}, 401, "shared secret"),
    "signature": (lambda: signed(BODY), 202, ""),
    "signature of another key": (lambda: signed(BODY, key="other"), 401, "not right"),
    "signature of another body": (lambda: signed(BODY + b" "), 401, "not right"),
    "signature of a body changed by a byte": (lambda: signed(BODY.replace(b"id-1", b"id-2")), 401, "not right"),
    "signature with another time": (
        lambda: {"X-Headway-Signature": f"t={int(NOW())},v1={mac(BODY, int(NOW()) - 9)}"}, 401, "not right"
    ),
    "old signature": (lambda: signed(BODY, seconds=int(NOW()) - 302), 401, "s old"),
    "signature of the future": (lambda: signed(BODY, seconds=int(NOW()) + 310), 401, "s ahead"),
    "signature a little old": (lambda: signed(BODY, seconds=int(NOW()) - 200), 202, ""),
    "signature a little ahead": (lambda: signed(BODY, seconds=int(NOW()) + 200), 202, ""),
    "no form of a signature": (lambda: {"X-Headway-Signature": mac(BODY, int(NOW()))}, 401, "of the form"),
    "signature without a time": (lambda: {"X-Headway-Signature": f"v1={mac(BODY, int(NOW()))}"}, 401, "of the form"),
    "two signatures, the new one right": (
        lambda: {"X-Headway-Signature": f"t={int(NOW())},v1={'0' * 64},v1={mac(BODY, int(NOW()))}"}, 202, ""
    ),
    "nine signatures": (lambda: {"X-Headway-Signature": f"t={int(NOW())}{f',v1={chr(48) * 64}' * 9}"}, 401, "of the form"),
    "token": (lambda: bearer(token()), 202, ""),
    "token, version 1.0": (lambda: bearer(token(version="1.0")), 202, ""),
    "expired token": (lambda: bearer(token(exp=int(NOW()) - 120)), 401, "expired"),
    "token within the leeway": (lambda: bearer(token(exp=int(NOW()) - 20)), 202, ""),
    "token of the future": (lambda: bearer(token(nbf=int(NOW()) + 300)), 401, "not valid yet"),
    "token that never ends": (lambda: bearer(token(exp=None)), 401, "claim is missing"),
    "other audience": (lambda: bearer(token(aud="api://other")), 401, "somebody else"),
    "two audiences": (lambda: bearer(token(aud=[AUDIENCE, "api://other"])), 401, "somebody else"),
    "no audience": (lambda: bearer(token(aud=None)), 401, "claim is missing"),
    "other tenant": (lambda: bearer(token(tid=EVENT_GRID)), 401, "another tenant"),
    "other issuer": (lambda: bearer(token(iss=f"https://evil.example/{TENANT}/v2.0")), 401, "another issuer"),
    "issuer of the other version": (lambda: bearer(token(iss=authority.ISSUERS["1.0"])), 401, "another issuer"),
    "other application": (lambda: bearer(token(azp="00000000-0000-0000-0000-000000000000")), 403, "not listed"),
    "no application": (lambda: bearer(token(azp=None)), 403, "not listed"),
    "application in the other version's claim": (lambda: bearer(token(azp=None, appid=EVENT_GRID)), 403, "not listed"),
    "unknown version": (lambda: bearer(token(ver="3.0")), 401, "no version"),
    "a version that is no word": (lambda: bearer(token(ver=[])), 401, "no version"),
    "alg none": (lambda: bearer(forged({"alg": "none", "kid": "first"})), 401, "RS256"),
    "alg None": (lambda: bearer(forged({"alg": "None", "kid": "first"})), 401, "RS256"),
    "RS256 without a signature": (lambda: bearer(forged({"alg": "RS256", "kid": "first"})), 401, "signature is not right"),
    "HS256 with the public key": (lambda: bearer(hs256_with_the_public_key()), 401, "RS256"),
    "no key named": (lambda: bearer(forged({"alg": "RS256"})), 401, "names no key"),
    "another's key under a known name": (lambda: bearer(token("stranger", kid="first")), 401, "signature is not right"),
    "a key that is not published": (lambda: bearer(token("stranger")), 401, "does not publish"),
    "its own key in the header": (lambda: bearer(own_key_inside()), 401, "signature is not right"),
    "no token": (lambda: bearer("x.y.z"), 401, "no token"),
    "a token that nests deeply": (lambda: bearer(deep()), 401, "no token"),
    "a token that is too long": (lambda: bearer(token(sub="b" * 8192)), 401, "too long"),
    "not a bearer": (lambda: {"Authorization": "Basic dXNlcjpwYXNz"}, 401, "no bearer"),
    "two proofs, both right": (lambda: {**secret(), **bearer(token()), **signed(BODY)}, 202, ""),
    "two proofs, the token wrong": (lambda: {**secret(), **bearer(token(aud="x"))}, 401, "somebody else"),
    "two proofs, the secret wrong": (lambda: {**bearer(token()), "X-Headway-Secret": "x"}, 401, "shared secret"),
    "two proofs, the signature wrong": (lambda: {**secret(), **signed(b"")}, 401, "not right"),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS)
def test_exactly_the_proven_ones_are_taken(stand, case):
    headers, status, why = REQUESTS[case]
    answer = stand.post(BODY, headers())
    assert answer.status_code == status, answer.text
    assert len(stand.rows()) == (status == 202)
    if why:
        (reason,) = stand.refusals()
        assert why in reason and why in answer.json()["error"]
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_header_given_twice_is_not_believed(stand):
    right = secret()["X-Headway-Secret"]
    answer = stand.client.post(stand.url, content=BODY, headers=[("X-Headway-Secret", right)] * 2)
    assert answer.status_code == 401 and stand.rows() == []


def test_a_signature_is_believed_once_also_after_a_restart(environment, tmp_path):
    headers = signed(BODY)
    with listening(tmp_path, hmac="env:STAND_KEY") as stand:
        assert stand.post(BODY, headers).status_code == 202
        dressed = {"X-Headway-Signature": f"{headers['X-Headway-Signature']},v1={'0' * 64}"}
        assert [stand.post(BODY, each).status_code for each in (headers, dressed)] == [401, 401]
    with listening(tmp_path, hmac="env:STAND_KEY") as stand:
        answer = stand.post(BODY, headers)
        assert answer.status_code == 401 and "used before" in answer.text
        assert stand.post(BODY, signed(BODY, seconds=int(NOW()) - 60)).json()["duplicate"] == 1
        assert len(stand.rows()) == 1


def test_a_signature_whose_request_failed_may_be_used_again(environment, tmp_path):
    """The events and the memory of the signature are one transaction."""
    headers = signed(BODY)
    with listening(tmp_path, hmac="env:STAND_KEY", topics=["/tests/sender"]) as stand:
        with stand.ledger.transaction() as db:
            db.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        assert stand.post(BODY, headers).status_code == 503
        with stand.ledger.transaction() as db:
            db.execute("DROP TRIGGER full")
        assert stand.post(BODY, headers).status_code == 202


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", [None, "", " \n"])
def test_without_our_own_secret_nobody_is_accused(environment, tmp_path, monkeypatch, name, value):
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    headers = {"STAND_SECRET": secret(), "STAND_KEY": signed(BODY)}[name]
    with listening(tmp_path, secret="env:STAND_SECRET", hmac="env:STAND_KEY") as stand:
        answer = stand.post(BODY, headers)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert name not in answer.text and stand.rows() == []
        assert stand.post(b"[]", {"X-Headway-Secret": ""}).status_code in (401, 503)


def test_while_the_keys_cannot_be_had_nobody_is_accused(stand, entra):
    entra.status = 500
    for said in (token(), token("stranger"), token(aud="other")):
        answer = stand.post(BODY, bearer(said))
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
    assert len(entra.asked) == 1, "an authority that is in trouble is not hammered"
    assert stand.post(BODY, secret()).status_code == 202, "other senders are heard"
    assert not stand.rows(status="refused")


def test_keys_that_we_have_are_believed_while_the_authority_is_away(stand, entra):
    assert stand.post(BODY, bearer(token())).status_code == 202
    entra.status = 503
    assert stand.post(BODY, bearer(token())).status_code == 202
    assert len(entra.asked) == 2


def test_a_new_key_is_found_and_unknown_ones_do_not_hammer(stand, entra):
    assert stand.post(BODY, bearer(token())).status_code == 202
    before, began = len(entra.asked), NOW()
    entra.published = ["second"]
    # Right after a look nobody looks again: the sender keeps its event, and comes again.
    for number in range(20):
        answer = stand.post(BODY, bearer(token("stranger", kid=f"k{number}")))
        assert answer.status_code in (401, 503)
    assert len(entra.asked) - before <= 2 * (1 + (NOW() - began) / AGAIN_SECONDS)
    eventually(lambda: stand.post(BODY, bearer(token("second"))).status_code, lambda status: status == 202)
    assert stand.post(BODY, bearer(token("first"))).status_code in (401, 503), "the old key is no longer published"


def test_an_authority_that_hangs_keeps_no_token_of_a_key_that_is_known(monkeypatch):
    monkeypatch.setattr("tasks.azure.entra.AGAIN_SECONDS", 0.0)
    monkeypatch.setattr("tasks.azure.entra.TIMEOUT_SECONDS", 60.0)
    told = threading.Event()
    with serving() as slow, ThreadPoolExecutor(4) as threads:  # as many as the edge of an endpoint has
        door = Entra(EntraConfig.model_validate(slow.settings()))
        assert door.check(token()) == EVENT_GRID
        slow.answer = lambda path: told.wait(limit(60)) and None
        unknown = [threads.submit(door.check, token(kid=f"k{number}")) for number in range(4)]
        try:
            assert threads.submit(door.check, token()).result(limit(20)) == EVENT_GRID
            until(lambda: sum(each.done() for each in unknown) == 3, why="one waits for the authority")
        finally:
            told.set()
        assert all(isinstance(each.exception(limit(20)), KeysAway) for each in unknown)


def test_nothing_but_the_authority_is_asked(stand, entra):
    REACHED.clear()
    assert stand.post(BODY, bearer(token())).status_code == 202
    assert stand.post(BODY, bearer(own_key_inside())).status_code == 401
    assert stand.post(BODY, bearer(token(version="1.0"))).status_code == 202
    assert {place for _, place in REACHED if _ == "socket.connect"} == {("127.0.0.1", entra.port)}


def test_keys_that_are_said_to_lie_elsewhere_are_not_fetched(stand, entra):
    with serving() as elsewhere:
        entra.keys_at = f"{elsewhere.url}/{TENANT}/discovery/v2.0/keys"
        assert stand.post(BODY, bearer(token())).status_code == 503
        assert elsewhere.asked == []


def test_a_key_too_short_is_not_believed(stand, entra):
    entra.published = ["first", "short"]
    answer = stand.post(BODY, bearer(token("short")))
    assert answer.status_code == 401 and "too short" in answer.text


def test_the_stand_in_speaks_as_an_authority_does(entra):
    """Read by PyJWT's own client of published keys."""
    entra.published, entra.status = ["first"], 0
    key = jwt.PyJWKClient(f"{entra.url}/{TENANT}/discovery/v2.0/keys").get_signing_key_from_jwt(token())
    assert jwt.decode(token(), key, ["RS256"], audience=AUDIENCE)["azp"] == EVENT_GRID


def test_the_examples_of_the_page_are_believed(environment, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "webhook.md").read_text()
    (shell,), (python,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("bash", "py"))
    with listening(tmp_path, hmac="env:STAND_KEY") as stand:
        for argv in (["bash", "-euc", shell], [sys.executable, "-c", python]):
            environment = {**os.environ, "HOOK_URL": stand.url, "HOOK_KEY": KEY}
            ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=limit(60))
            assert ran.returncode == 0, ran.stderr
            assert json.loads(ran.stdout)["accepted"] == 1


def test_no_secret_is_left_anywhere(stand, caplog, capfd):
    sent = token()
    for headers in (secret(), signed(BODY), bearer(sent), bearer(sent + "x"), {"X-Headway-Secret": SECRET + "x"}):
        answer = stand.post(BODY, headers)
        assert not any(each in answer.text for each in (SECRET, KEY, sent))
    stand.refusals(2)
    left = stand.traces() + caplog.text + "".join(capfd.readouterr())
    assert not any(each in left for each in (SECRET, KEY, sent, sent.split(".")[2]))
    assert os.environ["STAND_SECRET"] == SECRET
