"""Event Grid's queue on a real Azurite: nothing is lost, nothing is taken twice, and what cannot be read is set aside."""

import base64
import json
import logging
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import azure_queue
import azurite
import pytest
from event_stand import IDENTITY, Blobs, blobs, config, created, known_key, rows, ticking, until

from deployments.bridge.queues import Queues
from deployments.configuration.events import EventsConfig
from tasks.events.ledger import Ledger

PROCESS = """# fork: commands
import sys, time
from pathlib import Path
from deployments.bridge.queues import Queues
from deployments.configuration.events import EventsConfig
from tasks.events.ledger import Ledger
home = Path(sys.argv[1])
queues = Queues(home, EventsConfig.model_validate_json(sys.argv[2]), Ledger(home))
print("ready", flush=True)
while True:
    queues.tick(time.time())
    time.sleep(0.05)
"""
"""A process that does nothing but take messages in."""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with known_key(), azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as started:
        yield started


@pytest.fixture(scope="module")
def queues(tmp_path_factory):
    with azure_queue.running(tmp_path_factory.mktemp("queues")) as started:
        yield started


@pytest.fixture
def own(service) -> Blobs:
    return blobs(service)


class Line:
    """A queue of its own, as Event Grid delivers to it."""

    def __init__(self, service: azure_queue.Queues, *, made: bool = True) -> None:
        self.service, self.name = service, f"q{uuid.uuid4().hex[:20]}"
        self.client = service.client(self.name)
        if made:
            self.client.create_queue()

    def events(self, own: Blobs, **said) -> EventsConfig:
        queue = {
            "url": f"{self.service.url}/{self.name}",
            "poll_seconds": 0.05,
            "visibility_seconds": 1,
            **IDENTITY,
            **said,
        }
        return config(queues=[queue], containers=[own.config()])

    def send(self, event: dict, *, encoded: bool = False) -> None:
        text = json.dumps(event)
        self.client.send_message(base64.b64encode(text.encode()).decode() if encoded else text)

    def send_many(self, events: list[dict]) -> None:
        for number, event in enumerate(events):
            self.send(event, encoded=number % 2 == 0)

    def left(self, name: str = "") -> int:
        return self.service.client(name or self.name).get_queue_properties().approximate_message_count


def ready(home: Path, events: EventsConfig) -> tuple[Queues, Ledger]:
    ledger = Ledger(home)
    return Queues(home, events, ledger), ledger


def test_both_spellings_and_both_schemas_are_taken_and_deleted(queues, own, tmp_path):
    line = Line(queues)
    etags = {name: own.put(name) for name in ("a", "b", "c")}
    line.send(own.created("a"))
    line.send(own.created("b"), encoded=True)
    grid = own.created("c")
    line.send(
        {"specversion": "1.0", "id": "7", "source": "/s", "type": grid["eventType"], "time": grid["eventTime"]}
        | {"data": grid["data"]},
        encoded=True,
    )
    part, ledger = ready(tmp_path, line.events(own))
    part.tick(time.time())
    assert {row["object"] for row in rows(ledger, status="accepted")} == {
        f"{own.url}/{n}#{e}" for n, e in etags.items()
    }
    assert {row["channel"] for row in rows(ledger)} == {"queue"}
    assert line.left() == 0


@pytest.mark.parametrize("blobs", [60, pytest.param(250, marks=pytest.mark.long)])
def test_many_shuffled_messages_give_one_accepted_event_a_version(queues, own, tmp_path, blobs):
    """Duplicates are the same event delivered again, and another event about the same version of the blob."""
    line, draw = Line(queues), random.Random(6)
    names = [f"in/{number:04d}.jsonl" for number in range(blobs)]
    for name in names:
        own.put(name, b"first")
    once = [own.created(name) for name in names]
    for name in names[
        : blobs // 5
    ]:  # written again: events about the first writing come late, and mean what is there now
        own.put(name, b"second, longer")
    once += [own.created(name) for name in names[: blobs // 5]]
    again = [draw.choice(once) for _ in range(2 * blobs)]
    others = [own.created(draw.choice(names)) for _ in range(4 * blobs // 5)]
    said = [*once, *again, *others]
    draw.shuffle(said)
    assert len(said) == 4 * blobs
    line.send_many(said)
    part, ledger = ready(tmp_path, line.events(own, visibility_seconds=60))
    began, cpu = time.monotonic(), time.process_time()
    ticking(part, until_done=lambda: line.left() == 0)
    print(f"{len(said)} messages in {time.monotonic() - began:.2f} s, {time.process_time() - cpu:.2f} s of CPU")
    accepted = [row["object"] for row in rows(ledger, status="accepted")]
    current = {f"{own.url}/{blob.name}#{blob.etag.strip(chr(34))}" for blob in own.client.list_blobs()}
    assert len(accepted) == blobs
    assert set(accepted) == current
    numbers = {row["number"] for row in rows(ledger, status="accepted")}
    repeated = rows(ledger, status="duplicate")
    assert len(repeated) == 3 * blobs
    assert {row["of"] for row in repeated} <= numbers


def test_a_process_that_is_killed_again_and_again_loses_none_and_doubles_none(queues, own, tmp_path):
    line, draw = Line(queues), random.Random(66)
    names = [f"in/{number:03d}" for number in range(45)]
    for name in names:
        own.put(name)
    said = [own.created(name) for name in names for _ in range(3)]
    draw.shuffle(said)
    line.send_many(said)
    said_config = line.events(own).model_dump_json()
    kills = 0
    while (before := line.left()) and kills < 40:
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), said_config], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert process.stdout.readline() == b"ready\n", process.stderr.read().decode()
            most = max(before - draw.randint(1, 40), 0)
            until(lambda most=most: line.left() <= most, every=0.005)
            time.sleep(draw.uniform(0, 0.02))
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        kills += 1
    print(f"{kills} kills")
    assert kills > 1, "it was never killed in the middle"
    part, ledger = ready(tmp_path, line.events(own))
    ticking(part, until_done=lambda: line.left() == 0)
    accepted = [row["object"] for row in rows(ledger, status="accepted")]
    assert len(accepted) == len(set(accepted)) == len(names)
    assert not rows(ledger, status="poison")
    assert not rows(ledger, status="refused")


def test_what_cannot_be_read_is_set_aside_after_some_deliveries_and_stands_in_nobodys_way(
    queues, own, tmp_path, caplog
):
    line = Line(queues)
    bad = ["this is no event", "{", base64.b64encode(b"\x00\x01").decode(), json.dumps({"eventType": "x", "id": 1})]
    for text in bad:
        line.client.send_message(text)
    own.put("a")
    line.send(own.created("a"))
    part, ledger = ready(tmp_path, line.events(own, max_deliveries=2))
    part.tick(time.time())
    assert [row["status"] for row in rows(ledger)] == ["accepted"], "one try is not enough"
    assert line.left() == len(bad)
    ticking(part, until_done=lambda: line.left() == 0)
    aside = {message.content for message in queues.client(f"{line.name}-poison").receive_messages(max_messages=32)}
    assert aside == set(bad)
    poison = rows(ledger, status="poison")
    assert len(poison) == len(bad)
    assert all("was not to be read 2 times" in row["reason"] and row["source"].endswith(line.name) for row in poison)
    assert sum("set aside" in record.message for record in caplog.records) == len(bad)


def test_what_is_refused_is_noted_once_and_deleted_at_once(queues, own, tmp_path):
    line = Line(queues)
    own.put("a")
    deleted = {**own.created("a"), "eventType": "Microsoft.Storage.BlobDeleted"}
    signed = created("https://other.blob.core.windows.net/x/a?sig=" + "A" * 44, id_="signed")
    for event in (created("http://169.254.169.254/metadata", id_="metadata"), deleted, own.created("gone"), signed):
        line.send(event)
    part, ledger = ready(tmp_path, line.events(own))
    part.tick(time.time())
    assert line.left() == 0
    why = {row["identity"]: row["reason"] for row in rows(ledger, status="refused")}
    assert len(why) == len(rows(ledger)) == 4
    assert "is in no container" in why["metadata"]
    assert "BlobDeleted" in why[deleted["id"]]
    assert "A" * 44 not in why["signed"]


def test_a_refusal_that_is_delivered_again_is_not_noted_again(queues, own, tmp_path):
    """What a kill between the note and the deletion leaves."""
    line = Line(queues)
    line.send(created("http://169.254.169.254/metadata", id_="metadata"))
    (message,) = line.client.receive_messages(visibility_timeout=1)
    ledger = Ledger(tmp_path)
    part = Queues(tmp_path, line.events(own), ledger)
    ledger.refuse("queue", "noted before the kill", source=json.loads(message.content)["topic"], identity="metadata")
    ticking(part, until_done=lambda: line.left() == 0)
    assert [row["reason"] for row in rows(ledger)] == ["noted before the kill"]


def test_messages_wait_while_storage_is_away(queues, own, tmp_path, caplog):
    line = Line(queues)
    events = [own.created(f"{number:02d}") for number in range(20)]
    own.client.delete_container()
    line.send_many(events)
    part, ledger = ready(tmp_path, line.events(own))
    for _ in range(3):
        part.tick(time.time())
    assert rows(ledger) == []
    assert line.left() == 20
    assert sum("no such container" in record.message for record in caplog.records) == 1, "said once"
    own.client.create_container()
    for number in range(20):
        own.put(f"{number:02d}")
    ticking(part, until_done=lambda: line.left() == 0)
    assert len(rows(ledger, status="accepted")) == 20
    assert len(rows(ledger)) == 20


def test_one_queue_that_is_not_there_keeps_no_other(queues, own, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="headway.queue")
    missing, there = Line(queues, made=False), Line(queues)
    own.put("a")
    there.send(own.created("a"))
    both = [*missing.events(own).queues, *there.events(own).queues]
    part, ledger = ready(tmp_path, config(queues=both, containers=[own.config()]))
    part.tick(time.time())
    assert len(rows(ledger, status="accepted")) == 1
    missing.client.create_queue()
    own.put("b")
    missing.send(own.created("b"))
    ticking(part, until_done=lambda: len(rows(ledger, status="accepted")) == 2)
    said = [record.message for record in caplog.records if record.name == "headway.queue"]
    assert sum("QueueNotFound" in message for message in said) == 1
    assert any("answers again" in message for message in said)


@pytest.mark.long
def test_a_service_that_is_stopped_and_started_again_loses_nothing(own, tmp_path):
    """Its process dies; the same one comes back on the same port with the messages that it had."""
    with azure_queue.running(tmp_path / "service") as service:
        line = Line(service)
        for name in ("a", "b"):
            own.put(name)
            line.send(own.created(name))
        time.sleep(6)  # Azurite writes its queues down every five seconds
    part, ledger = ready(tmp_path / "home", line.events(own))
    part.tick(time.time())
    assert rows(ledger) == []
    with azure_queue.running(tmp_path / "service", port=service.port):
        until(lambda: (part.tick(time.time() + 120), len(rows(ledger, status="accepted")) == 2)[1])
        assert line.left() == 0
