"""What Event Grid asks before it delivers, and who may not be answered. The addresses that it names are canaries."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from webhook_stand import JSON, REACHED, VARIABLES, event, listening, secret, signed, written

TOPIC = "/subscriptions/0a/resourceGroups/rg/providers/Microsoft.Storage/storageAccounts/mine"
CODE = "512d38b6-c7b8-40c8-89fe-f46f9e9622b6"
GRID = {"Content-Type": "application/json; charset=utf-8", "aeg-event-type": "SubscriptionValidation"}


class Canary(ThreadingHTTPServer):
    """Counts whoever comes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Counted)
        self.hits = 0
        self.url = f"http://127.0.0.1:{self.server_port}/eventsubscriptions/mine/validate?id=1&token=t"

    def get_request(self):
        self.hits += 1
        return super().get_request()


class _Counted(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def canary():
    """Nobody may have come by the end."""
    with Canary() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        REACHED.clear()
        yield server
        server.shutdown()
        assert server.hits == 0 and REACHED == []


@pytest.fixture
def stand(monkeypatch, tmp_path):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with listening(
        tmp_path, secret="env:STAND_SECRET", hmac="env:STAND_KEY", topics=[TOPIC, "/tests/sender"]
    ) as running:
        yield running


def validation(canary, *, topic=TOPIC, **data) -> bytes:
    """As in learn.microsoft.com/azure/event-grid/end-point-validation-event-grid-events-schema."""
    said = {"validationCode": CODE, "validationUrl": canary.url, **data}
    one = {"id": "2d1781af", "topic": topic, "subject": "", "data": said, "dataVersion": "2", "metadataVersion": "1"}
    named = {
        "eventType": "Microsoft.EventGrid.SubscriptionValidationEvent",
        "eventTime": "2018-01-25T22:12:19.4556811Z",
    }
    return written([{**one, **named}])


def test_the_code_is_sent_back_to_who_has_proven_itself(stand, canary):
    for topic in (TOPIC, TOPIC.upper()):
        answer = stand.post(validation(canary, topic=topic), {**GRID, **secret()})
        assert (answer.status_code, answer.json()) == (200, {"validationResponse": CODE})
        assert answer.headers["content-type"] == "application/json"
    assert stand.rows() == []


FORGED = {
    "without a proof": ({}, {}, 401),
    "with a wrong secret": ({}, {"X-Headway-Secret": "guessed"}, 401),
    "for a topic that is not listed": ({"topic": f"{TOPIC}2"}, secret(), 403),
    "without a code": ({"validationCode": None}, secret(), 400),
    "with a script for a code": ({"validationCode": "<script>alert(1)</script>"}, secret(), 400),
    "with a code of a megabyte": ({"validationCode": "a" * 500_000}, secret(), 400),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_validation_is_refused(stand, canary, case):
    changed, headers, status = FORGED[case]
    answer = stand.post(validation(canary, **changed), {**GRID, **headers})
    assert answer.status_code == status
    assert CODE not in answer.text and "<script" not in answer.text
    assert len(stand.refusals()) == 1 and stand.rows() == []


def test_a_validation_among_events_is_no_handshake(stand, canary):
    mixed = written([*json.loads(validation(canary)), event()])
    answer = stand.post(mixed, {**GRID, **secret()})
    assert answer.status_code == 202 and CODE not in answer.text
    assert (answer.json()["accepted"], answer.json()["refused"]) == (1, 1)


def test_cloud_events_ask_with_options(stand, canary):
    asked = {"WebHook-Request-Origin": "eventgrid.azure.net", "WebHook-Request-Rate": "120"}
    answer = stand.client.options(stand.url, headers={**asked, "WebHook-Request-Callback": canary.url})
    assert (answer.status_code, answer.text) == (200, "")
    ours = {"date", "content-length", "cache-control", "x-content-type-options"}
    assert set(answer.headers) - ours == {"webhook-allowed-origin", "webhook-allowed-rate"}
    assert (answer.headers["webhook-allowed-origin"], answer.headers["webhook-allowed-rate"]) == (
        asked["WebHook-Request-Origin"],
        "*",
    )


@pytest.mark.parametrize(
    "origin", ["", "evil.example", "eventgrid.azure.net.evil.example", "*", "eventgrid.azure.net, evil.example"]
)
def test_another_origin_is_not_let_in(stand, canary, origin):
    headers = {"WebHook-Request-Origin": origin, "WebHook-Request-Callback": canary.url} if origin else {}
    answer = stand.client.options(stand.url, headers=headers)
    assert answer.status_code == 403 and not any("allow" in name for name in answer.headers)


def test_a_page_on_the_web_is_not_let_in(stand):
    """No CORS: neither the question before nor the answer says that a page may read or send."""
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    asked = stand.client.options(stand.url, headers={**asks, "Access-Control-Request-Headers": "x-headway-secret"})
    sent = stand.post(written(event()), {**secret(), "Origin": "https://evil.example"})
    assert (asked.status_code, sent.status_code) == (403, 202)
    assert not any(name.startswith("access-control") for answer in (asked, sent) for name in answer.headers)


def test_topics_are_an_allow_list_for_events_too(stand):
    body = written(event(source="/another/sender"))
    answer = stand.post(body, signed(body))
    assert answer.status_code == 403 and stand.rows() == []
    both = stand.post(written([event(1), event(2, source="/another/sender")]), {**JSON, **secret()})
    assert both.status_code == 202 and (both.json()["accepted"], both.json()["refused"]) == (1, 1)
    assert any("not listed" in reason for reason in stand.refusals(2))
