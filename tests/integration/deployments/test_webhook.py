"""The HTTP bridge over real sockets: every form of body, every status, limits, slow clients, kills, and storage that is away."""

import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import azurite
import httpx
import pytest
from azure.storage.blob import ContainerClient
from fault_proxy import FaultProxy
from waiting import limit
from webhook_stand import (
    JSON,
    KEY,
    REACHED,
    SECRET,
    VARIABLES,
    event,
    eventually,
    listening,
    secret,
    signed,
    with_variables,
    written,
)

from deployments.bridge import webhook
from deployments.bridge.senders import NOTES_A_MINUTE
from deployments.configuration.events import EventsConfig
from deployments.configuration.platform import PlatformConfig
from tasks.config.files import validated
from tasks.events.ledger import Ledger

OURS = {"secret": "env:STAND_SECRET", "hmac": "env:STAND_KEY"}
TOPIC = "/subscriptions/0a/resourceGroups/rg/providers/Microsoft.Storage/storageAccounts/mine"
MOST = 1 << 20


@pytest.fixture
def environment(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def stand(environment, tmp_path):
    with listening(tmp_path, **OURS) as running:
        yield running


def binary(number=1, **changed) -> dict[str, str]:
    """An event in the headers, as CloudEvents' HTTP binding has it."""
    said = {**event(number), "subject": "dataset/corpus", **changed}
    del said["data"]
    return {"Content-Type": "application/json", **{f"ce-{name}": value for name, value in said.items()}}


def data(number=1) -> bytes:
    return written(event(number)["data"])


BODIES = {
    "structured": ({}, written(event()), 202, 1),
    "structured, plain JSON": ({"Content-Type": "application/json"}, written(event()), 202, 1),
    "with a charset": ({"Content-Type": 'application/cloudevents+json; charset="UTF-8"'}, written(event()), 202, 1),
    "a batch of 100": (
        {"Content-Type": "application/cloudevents-batch+json"}, written([event(n) for n in range(100)]), 202, 100
    ),
    "a batch with one twice": ({}, written([event(1), event(1), event(2)]), 202, 2),
    "two identities of one object": ({}, written([event(1), event(1, id="other")]), 202, 1),
    "binary mode": (binary(), data(), 202, 1),
    "binary mode, encoded": (binary(source="/sender%20one"), data(), 202, 1),
    "binary mode without data": ({**binary(), "Content-Type": ""}, b"", 202, 1),
    "binary mode, no JSON": (binary(), b"{", 400, 0),
    "binary mode, no id": ({name: value for name, value in binary().items() if name != "ce-id"}, data(), 400, 0),
    "binary mode, other data": ({**binary(), "Content-Type": "text/plain"}, b"x", 415, 0),
    "binary mode, bytes that are no text": (binary(source="%ff"), data(), 400, 0),
    "not JSON": ({}, b"id=1", 400, 0),
    "nothing": ({}, b"", 400, 0),
    "no event": ({}, b"[]", 400, 0),
    "half": ({}, written(event())[:-1], 400, 0),
    "a number": ({}, b"1", 400, 0),
    "not UTF-8": ({}, b'{"id": "\xff"}', 400, 0),
    "NaN": ({}, written(event()).replace(b'"id-1"', b"NaN"), 400, 0),
    "an event without an id": ({}, written(event(id="")), 400, 0),
    "one of two is broken": ({}, written([event(), {"specversion": "1.0"}]), 400, 0),
    "nested deeply": ({}, b"[" * 500_000, 400, 0),
    "nested deeply in the data": ({}, b'{"data":' + b'{"a":' * 100_000, 400, 0),
    "a form": ({"Content-Type": "application/x-www-form-urlencoded"}, written(event()), 415, 0),
    "text": ({"Content-Type": "text/plain"}, written(event()), 415, 0),
    "no media type": ({"Content-Type": ""}, written(event()), 415, 0),
    "compressed": ({"Content-Encoding": "gzip"}, written(event()), 415, 0),
    "another charset": ({"Content-Type": "application/json; charset=utf-16"}, written(event()), 415, 0),
    "as large as may be": ({}, written(event()).ljust(MOST), 202, 1),
    "a byte too large": ({}, written(event()).ljust(MOST + 1), 413, 0),
    "huge": ({}, b" " * (5 << 20), 413, 0),
    "nothing that starts anything": ({}, written(event(type="Microsoft.Storage.BlobDeleted")), 202, 0),
    "a blob that is not ours": (
        {}, written(event(type="Microsoft.Storage.BlobCreated", data={"url": "http://169.254.169.254/metadata"})), 202, 0
    ),
    "a file that landed, said by hand": ({}, written(event(type="headway.data.arrived")), 202, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", BODIES)
def test_bodies(stand, case):
    headers, body, status, accepted = BODIES[case]
    REACHED.clear()
    answer = stand.post(body, {**headers, **secret()})
    assert answer.status_code == status, answer.text
    rows = stand.rows()
    assert len(rows) == accepted and {row["channel"] for row in rows} <= {"webhook"}
    if status == 202:
        said = answer.json()
        assert said["accepted"] == accepted and set(said) == {"accepted", "duplicate", "waiting", "refused", "numbers"}
        assert [row["number"] for row in rows] == [n for n in said["numbers"] if n in {row["number"] for row in rows}]
        assert bool(said["refused"]) == (not accepted)
    else:
        assert len(stand.refusals()) == 1 and set(answer.json()) == {"error"}
    assert REACHED == [], "nobody is asked about what an event says"


def test_the_same_event_again_is_a_duplicate(stand):
    body = written(event())
    first, second = stand.post(body, secret()).json(), stand.post(body, secret()).json()
    assert (first["accepted"], second["accepted"], second["duplicate"]) == (1, 0, 1)


def test_a_signature_is_not_stretched_to_headers(stand):
    """In binary mode the event is in the headers, and whoever holds a signed body could say anything there."""
    for body in (data(), written(event())):
        answer = stand.post(body, {**binary(), **signed(body)})
        assert answer.status_code == 400 and "structured" in answer.text
    assert stand.rows() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/events", 405), ("PUT", "/events", 405), ("HEAD", "/events", 405), ("POST", "/healthz", 405),
        ("TRACE", "/events", 405), ("POST", "/", 404), ("POST", "/events/", 404), ("POST", "//events", 404),
        ("POST", "/events/../events", 404), ("GET", "/docs", 404), ("GET", "/openapi.json", 404), ("GET", "/healthz", 200),
    ],
)  # fmt: skip
def test_paths_and_methods(stand, method, path, status):
    with closing(http.client.HTTPConnection("127.0.0.1", stand.port, timeout=limit(30))) as connection:
        connection.request(method, path, body=written(event()) if method in ("POST", "PUT") else None, headers=secret())
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == status
    assert ("allow" in answer.headers) == (status == 405)
    assert "server" not in answer.headers and "location" not in answer.headers and stand.rows() == []
    assert status != 200 or json.loads(text) == {"status": "up"}


def test_any_host_header_is_answered_alike(stand):
    body = written(event())
    assert stand.post(body, {**secret(), "Host": "events.example.org"}).status_code == 202


def parts(count: int, size: int = 1 << 16):
    for _ in range(count):
        yield b" " * size


@pytest.mark.parametrize("megabytes", [2, 12])
def test_a_body_without_a_length_is_measured_while_it_comes(stand, megabytes):
    """Up to a point the rest is heard, so that the sender hears the answer; then the connection ends."""
    try:
        answer = stand.client.post(stand.url, content=parts(16 * megabytes), headers={**JSON, **secret()})
        assert answer.status_code == 413
    except httpx.TransportError:
        assert megabytes == 12
    assert "more than" in stand.refusals()[0]
    assert stand.post(written(event()), secret()).status_code == 202


def test_slow_and_broken_clients_hold_nobody_up(stand, caplog):
    """A head that never ends, a body that never comes, and noise."""
    slow = [socket.create_connection(("127.0.0.1", stand.port)) for _ in range(60)]
    head = f"POST /events HTTP/1.1\r\nHost: x\r\nX-Headway-Secret: {SECRET}\r\nContent-Type: application/json\r\n"
    starts = [
        b"",
        b"POST /ev",
        head.encode(),
        head.encode() + b"Content-Length: 9\r\n\r\n[",
        b"\x16\x03\x01\x00\xa5 noise\r\n\r\n",
    ]
    broken = head.encode() + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nnoise\r\n0\r\n\r\n"
    for number, client in enumerate(slow):
        client.sendall([*starts, broken][number % 6])
    assert stand.post(written(event()), secret()).status_code == 202
    for client in slow:
        client.settimeout(60)
        with client:
            answer = b""
            while got := _received(client):
                answer += got
            assert answer == b"" or answer.split()[1] in (b"400", b"408")
    assert stand.post(written(event(2)), secret()).status_code == 202
    assert len(stand.rows()) == 2 and "Traceback" not in caplog.text


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 16)
    except ConnectionError:
        return b""


def test_a_flood_of_refusals_leaves_few_rows(environment, tmp_path):
    with listening(tmp_path, **OURS) as stand:
        minute = int(time.monotonic() / 60)
        for _ in range(200):
            assert stand.post(b"x" * 1000, {}).status_code == 401
        minutes = int(time.monotonic() / 60) - minute + 1
    reasons = [row["reason"] for row in stand.rows(status="refused")]
    assert NOTES_A_MINUTE < len(reasons) <= minutes * (NOTES_A_MINUTE + 1)
    more = [int(reason.split()[1]) for reason in reasons if reason.startswith("and ")]
    assert sum(more) + len(reasons) - len(more) == 200, "every one is counted"


def test_while_the_ledger_is_locked_nothing_is_taken_and_nobody_is_accused(stand):
    body, headers = written(event()), signed(written(event()))
    assert stand.post(written(event(0)), secret()).status_code == 202
    with closing(sqlite3.connect(stand.ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = stand.post(body, headers)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        other.execute("ROLLBACK")
    # The request that was given up must not be written after its answer: the same one may come again.
    again = eventually(lambda: stand.post(body, headers), lambda answer: answer.status_code == 202)
    assert again.json()["accepted"] == 1


def test_when_the_ledger_cannot_be_written_nobody_is_accused(environment, tmp_path):
    with listening(tmp_path, **OURS) as stand:
        assert stand.post(written(event()), secret()).status_code == 202
        with stand.ledger.transaction() as db:
            db.execute(
                "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END"
            )
        answer = stand.post(written(event(2)), secret())
        assert answer.status_code == 503 and "disk" not in answer.text
        with stand.ledger.transaction() as db:
            db.execute("DROP TRIGGER full")
        assert stand.post(written(event(2)), secret()).json()["accepted"] == 1


def test_it_keeps_its_port_and_says_where_it_listens(environment, tmp_path):
    urls = []
    for _ in range(2):
        with listening(tmp_path, **OURS) as stand:
            urls.append(stand.url)
            noted = json.loads((tmp_path / "events" / "webhook.json").read_text())
            assert noted["url"] == stand.url and abs(time.time() - noted["since"]) < limit(60)
        assert set(json.loads((tmp_path / "events" / "webhook.json").read_text())) == {"port"}
    assert urls[0] == urls[1]
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ValueError, match="taken"):
        port = taken.getsockname()[1]
        webhook.start(tmp_path, EventsConfig.model_validate({"webhook": {**OURS, "port": port}}), Ledger(tmp_path))


@pytest.mark.parametrize(
    "wrong", [{"host": "0.0.0.0"}, {"host": "10.0.0.5"}, {"hmac": "", "secret": ""}, {"secret": SECRET}]
)
def test_settings_that_would_be_unsafe_are_refused(wrong):
    with pytest.raises(ValueError) as refused:
        validated(PlatformConfig, {"events": {"webhook": {**OURS, **wrong}}}, "platform.yaml")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("wrong", [{"tenant": "common"}, {"authority": "http://login.example"}, {"applications": []}])
def test_unsafe_settings_of_entra_are_refused(wrong):
    said = {"tenant": "11111111-2222-3333-4444-555555555555", "audience": "api://x", "applications": ["a"], **wrong}
    with pytest.raises(ValueError):
        EventsConfig.model_validate({"webhook": {"entra": said}})


def test_no_webhook_in_the_settings_is_none(tmp_path):
    assert webhook.start(tmp_path, EventsConfig(), Ledger(tmp_path)) is None


def test_no_secret_and_no_body_is_kept(environment, tmp_path, caplog, capfd):
    canary = "canary-in-the-body-41c7"
    with listening(tmp_path, **OURS) as stand:
        stand.post(written({"a": canary}), secret())
        stand.post(written(event()) + canary.encode(), secret())
        stand.post(canary.encode(), {"X-Headway-Secret": canary})
        stand.post(written(event(data={"password": f"password={canary}"})), secret())
    left = stand.traces() + caplog.text + "".join(capfd.readouterr())
    assert not any(each in left for each in (SECRET, KEY, canary))


class TestStorage:
    """Events about blobs: answered at once, looked at afterwards."""

    @pytest.fixture(scope="class")
    def blobs(self, tmp_path_factory):
        with azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as running:
            with ContainerClient.from_connection_string(running.connection_string, "landing") as client:
                client.create_container()
            yield running

    @pytest.fixture
    def proxy(self, blobs, environment, monkeypatch):
        with FaultProxy(blobs).running() as running:
            monkeypatch.setenv("STAND_STORAGE", running.endpoint.connection_string)
            yield running

    def settings(self, proxy):
        container = {"url": f"{proxy.endpoint.url}/landing", "dataset": "corpus", "include": "*.jsonl"}
        return {**OURS, "containers": [{**container, "credential": "connection_string", "secret": "env:STAND_STORAGE"}]}

    def blob(self, blobs, name, content=b"{}"):
        with ContainerClient.from_connection_string(blobs.connection_string, "landing") as client:
            client.upload_blob(name, content, overwrite=True)

    def told(self, proxy, name, number=1, **changed):
        said = {"api": "PutBlob", "eTag": "0x0", "contentLength": 2, "url": f"{proxy.endpoint.url}/landing/{name}"}
        one = {"topic": TOPIC, "subject": f"/blobServices/default/containers/landing/blobs/{name}", "id": f"g-{number}"}
        named = {"eventType": "Microsoft.Storage.BlobCreated", "eventTime": "2026-01-01T00:00:00.1234567Z"}
        return {**one, **named, "data": {**said, **changed}, "dataVersion": "", "metadataVersion": "1"}

    def test_what_storage_says_counts(self, blobs, proxy, tmp_path):
        self.blob(blobs, "a.jsonl", b"12345")
        bodies = [self.told(proxy, "a.jsonl", 1), self.told(proxy, "a.jsonl", 2), self.told(proxy, "gone.jsonl", 3)]
        with listening(tmp_path, **self.settings(proxy)) as stand:
            answer = stand.post(
                written([*bodies, self.told(proxy, "b.txt", 4)]), {**secret(), "Content-Type": "application/json"}
            )
            assert answer.json() == {"accepted": 0, "duplicate": 0, "waiting": 3, "refused": 1, "numbers": []}
            (row,) = eventually(stand.rows)
            assert row["object"].startswith(f"{proxy.endpoint.url}/landing/a.jsonl#0x") and row["object"][-3:] != "0x0"
            assert json.loads(row["data"])["bytes"] == 5 and row["name"] == "data.arrived"
            assert len(eventually(lambda: stand.rows(status="duplicate"))) == 1
            assert any("gone" in reason for reason in stand.refusals(2))
            eventually(lambda: waiting(stand) == 0)

    def test_a_kill_between_answer_and_work_loses_nothing(self, blobs, proxy, tmp_path):
        """The bridge takes an event while storage is away, and is killed; the next one finishes it, once."""
        self.blob(blobs, "b.jsonl")
        proxy.arm("expired", times=1 << 30)
        settings = EventsConfig.model_validate({"webhook": OURS, "containers": self.settings(proxy)["containers"]})
        code = (
            "# fork: commands\n"
            "import sys, time; from pathlib import Path; from deployments.bridge import webhook\n"
            "from deployments.configuration.events import EventsConfig; from tasks.events.ledger import Ledger\n"
            "home = Path(sys.argv[1]); said = EventsConfig.model_validate_json(sys.argv[2])\n"
            "print(webhook.start(home, said, Ledger(home)).url, flush=True); time.sleep(600)\n"
        )
        bridge = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), settings.model_dump_json()],
            env={**with_variables(), "STAND_STORAGE": os.environ["STAND_STORAGE"]},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert bridge.stdout
            url = bridge.stdout.readline().strip()
            body = written([self.told(proxy, "b.jsonl", n) for n in range(20)])
            answer = httpx.post(url, content=body, headers={**JSON, **signed(body)}, timeout=limit(30))
        finally:
            bridge.kill()
            bridge.wait()
        assert (answer.status_code, answer.json()["waiting"]) == (202, 20)
        with listening(tmp_path, **self.settings(proxy)) as stand:
            assert stand.rows() == [] and waiting(stand) == 20
            proxy.disarm()
            assert len(eventually(stand.rows, timeout=60)) == 1
            eventually(lambda: waiting(stand), lambda count: count == 0)
            assert len(stand.rows(status="duplicate")) == 19


def waiting(stand) -> int:
    with stand.ledger.transaction() as db:
        return db.execute("SELECT count(*) FROM waiting").fetchone()[0]
