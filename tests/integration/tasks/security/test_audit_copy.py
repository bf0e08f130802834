"""The audit log's copy in append blobs, against a real Azurite: in order, never twice, caught up with, and compared."""

import json
import multiprocessing
import time
import uuid

import azurite
import pytest
import yaml
from azure.storage.blob import BlobServiceClient
from support import Home
from waiting import limit

from deployments.watch.duties import AUDIT_COPY_SECONDS, AuditCopy
from tasks.common.errors import Conflict, IntegrityError, Missing
from tasks.security import audit_chain
from tasks.security.audit import audit, copy_of, newest_copied, send
from tasks.storage import open_store
from tasks.storage.blob import lines as blob_lines

fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as started:
        yield started


@pytest.fixture
def container(service, monkeypatch):
    monkeypatch.setenv("AUDIT_SECRET", service.connection_string)
    client = BlobServiceClient.from_connection_string(service.connection_string)
    return client.create_container(f"audit-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def home(tmp_path, container):
    """A home whose audit log is copied, with three entries."""
    uri = f"az://{azurite.ACCOUNT}/{container.container_name}/team"
    far = {"uri": uri, "credential": "connection_string", "secret": "env:AUDIT_SECRET"}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "stores.yaml").write_text(yaml.safe_dump({"audit_copy": "far", "stores": {"far": far}}))
    write(tmp_path / "home", 3)
    return tmp_path / "home"


def write(home, count):
    for _ in range(count):
        audit(open_store(home), "delete", what="model/coder@1", reason="old")


def plant(home, count):
    """Entries as they are written, but at once: the store waits for the disk at each of them."""
    documents, last = home / "store" / "documents", audit_chain.newest(open_store(home))
    for number in range(last.number + 1, last.number + 1 + count):
        data = json.dumps({"action": "x", "number": number, "time": 0.0, "previous": last.hash}, indent=1)
        (documents / "audit" / f"{number:08d}.json").write_text(data)
        last = audit_chain.Link(number, audit_chain.hash_of(data.encode()))
    (documents / "heads" / "audit.json").write_text(json.dumps({"number": last.number, "hash": last.hash}))


def ship(home):
    return send(open_store(home), copy_of(home))


def copied(container):
    """Every line of the copy, and the blobs that hold them."""
    names = sorted(blob.name for blob in container.list_blobs())
    text = b"".join(container.download_blob(name).readall() for name in names)
    return [json.loads(line) for line in text.splitlines()], names


def is_whole(home, container, count):
    """Whether the copy holds exactly the entries of the log, in their order, each with the hash of its bytes."""
    found, _ = copied(container)
    hashes = [audit_chain.hash_of(json.dumps(line["entry"], indent=1).encode()) for line in found]
    kept = [link for link, _ in audit_chain.between(open_store(home), 0, count)]
    assert [line["number"] for line in found] == list(range(1, count + 1))
    assert [line["hash"] for line in found] == hashes == [link.hash for link in kept]
    return True


def test_entries_go_to_an_append_blob_once_and_in_order(home, container):
    assert ship(home) == 3 and ship(home) == 0 and is_whole(home, container, 3)
    write(home, 2)
    assert ship(home) == 2 and is_whole(home, container, 5)
    (name,) = copied(container)[1]
    assert name == "team/audit-log/00000001.jsonl"
    assert container.get_blob_client(name).get_blob_properties().blob_type == "AppendBlob"


def test_the_watch_sends_now_and_then_and_catches_up_after_an_outage(home, container, service, monkeypatch):
    duty = AuditCopy(home)
    duty.tick(1000.0)
    write(home, 1)
    duty.tick(1000.0 + AUDIT_COPY_SECONDS - 1)
    assert is_whole(home, container, 3)
    monkeypatch.delenv("AUDIT_SECRET")
    with pytest.raises(Missing):
        duty.tick(1000.0 + AUDIT_COPY_SECONDS)
    plant(home, 600)
    monkeypatch.setenv("AUDIT_SECRET", service.connection_string)
    duty.tick(1000.0 + 2 * AUDIT_COPY_SECONDS)
    assert audit_chain.check(open_store(home)).broken is None and is_whole(home, container, 604)


def test_without_a_copy_nothing_is_sent_and_a_copy_that_is_no_blob_store_is_refused(tmp_path):
    assert copy_of(tmp_path) is None
    AuditCopy(tmp_path).tick(time.time())
    (tmp_path / "stores.yaml").write_text("audit_copy: near\nstores: {near: {uri: /somewhere}}\n")
    with pytest.raises(ValueError, match="audit_copy"):
        copy_of(tmp_path)


def test_two_watches_at_once_write_every_entry_once(home, container):
    write(home, 20)

    def keep_sending():
        for _ in range(15):
            try:
                ship(home)
            except Conflict:
                continue

    children = [fork.Process(target=keep_sending) for _ in range(3)]
    for child in children:
        child.start()
    for _ in range(20):
        write(home, 1)
    for child in children:
        child.join(limit(60))
        assert child.exitcode == 0
    ship(home)
    assert is_whole(home, container, 43)


def test_who_appends_behind_an_end_that_moved_is_told_and_writes_nothing(home, container):
    lines = copy_of(home)
    ship(home)
    end = lines.end()
    lines.append(end, b'{"number": 4, "hash": "x"}\n', begins="unused")
    with pytest.raises(Conflict):
        lines.append(end, b'{"number": 4, "hash": "x"}\n', begins="unused")
    assert len(copied(container)[0]) == 4 and newest_copied(lines).number == 4


def test_a_blob_that_is_full_is_followed_by_the_next_one(home, container):
    ship(home)
    write(home, 1)
    lines = copy_of(home)
    full = lines.end()._replace(appends=blob_lines.MOST_APPENDS)
    link, data = next(audit_chain.between(open_store(home), 3, 4))
    line = json.dumps({"number": 4, "hash": link.hash, "entry": json.loads(data)}).encode() + b"\n"
    lines.append(full, line, begins="00000004.jsonl")
    write(home, 1)
    assert ship(home) == 1 and is_whole(home, container, 5)
    assert [name.rpartition("/")[2] for name in copied(container)[1]] == ["00000001.jsonl", "00000004.jsonl"]


def test_a_blob_that_was_begun_and_not_written_to_is_gone_on_with(home, container):
    ship(home)
    container.get_blob_client("team/audit-log/00000004.jsonl").create_append_blob()
    write(home, 1)
    assert newest_copied(copy_of(home)).number == 3
    assert ship(home) == 1 and is_whole(home, container, 4)


def test_a_log_that_was_written_anew_is_found_by_its_copy_and_not_sent_over_it(home, container):
    ship(home)
    here = Home(home)
    said = here.ok("audit-log", "--verify").said
    assert (said["checked"], said["copied"], said["broken"]) == (3, 3, None)
    documents = home / "store" / "documents"
    (documents / "heads" / "audit.json").unlink()
    for path in (documents / "audit").iterdir():
        path.unlink()
    write(home, 3)
    assert audit_chain.check(open_store(home)).broken is None
    ran = here.run("audit-log", "--verify")
    assert ran.code == 5 and ran.said["broken"] == {"number": 3, "problem": "changed"}
    with pytest.raises(IntegrityError, match="entry 3"):
        ship(home)
    assert len(copied(container)[0]) == 3


def test_a_copy_that_cannot_be_had_is_said_and_the_log_is_still_checked(home, container):
    container.delete_container()
    ran = Home(home).run("audit-log", "--verify")
    assert (ran.code, ran.said["checked"], ran.said["copied"]) == (0, 3, None) and "not compared" in ran.stderr
