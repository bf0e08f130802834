"""What landed becomes one dataset version, on a real folder and on real blobs; kills, moving files and bad ones among it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import azurite
import pytest
from event_stand import Blobs, blobs, body, config, known_key, lines, rows, ticking
from outgoing import connections
from waiting import limit

from deployments.bridge.arrivals import Arrivals, StoreHistory
from deployments.bridge.folders import Folders
from deployments.bridge.messages import read_events, to_event
from deployments.configuration.events import EventsConfig
from deployments.publishing.datasets import make_dataset
from tasks.events.ledger import Ledger
from tasks.security.audit import entries
from tasks.security.policy import RIGHTS, add_person
from tasks.storage import open_store
from tasks.storage.history import changes
from tasks.storage.manifest import Manifest

PROCESS = """# fork: commands
import sys, time
from pathlib import Path
from deployments.bridge.arrivals import Arrivals
from deployments.bridge.folders import Folders
from deployments.bridge.arrivals import StoreHistory
from deployments.configuration.events import EventsConfig
from tasks.events.ledger import Ledger
home = Path(sys.argv[1])
config, ledger = EventsConfig.model_validate_json(sys.argv[2]), Ledger(home)
parts = StoreHistory(home, ledger), Folders(home, config, ledger), Arrivals(home, config, ledger)
print("ready", flush=True)
while True:
    for part in parts:
        part.tick(time.time())
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with known_key(), azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as started:
        yield started


@pytest.fixture
def own(service) -> Blobs:
    return blobs(service)


@pytest.fixture
def watched(tmp_path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


class Stand:
    """The parts of the bridge that make versions, over one home."""

    def __init__(self, home: Path, events: EventsConfig) -> None:
        self.home, self.events, self.ledger = home, events, Ledger(home)
        self.store = open_store(home)
        history = StoreHistory(home, self.ledger)
        history.tick(time.time() - 3600)
        self.parts = [history, Folders(home, events, self.ledger), Arrivals(home, events, self.ledger)]

    def tick_until(self, done) -> None:
        ticking(*self.parts, until_done=done)

    def settled(self) -> bool:
        """Whether something arrived and all of it came to its end."""
        arrived = rows(self.ledger, name="data.arrived", status="accepted")
        return bool(arrived) and all(row["became"] is not None for row in arrived)

    def versions(self) -> list[Manifest]:
        return list(self.store.manifests("dataset", "corpus"))

    def published(self) -> list[dict]:
        return rows(self.ledger, name="dataset.published", status="accepted")

    def arrive(self, own: Blobs, *names: str) -> None:
        """What the queue does with an event about each blob."""
        told = read_events(body(*(own.created(name) for name in names)))
        self.ledger.receive_all([to_event(one, self.events, "queue") for one in told])


def of_folder(watched: Path, **said) -> EventsConfig:
    return config(folders=[{"path": str(watched), "dataset": "corpus"}], **said)


def test_a_dropped_file_becomes_one_version_and_one_event(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched))
    (watched / "a.jsonl").write_bytes(lines(3))
    (watched / "half.jsonl.part").write_bytes(lines(1)[:9])
    stand.tick_until(stand.settled)
    time.sleep(1.1)  # the store is looked at once more
    for part in stand.parts:
        part.tick(time.time())
    (manifest,) = stand.versions()
    (event,) = stand.published()
    (arrived,) = rows(stand.ledger, name="data.arrived")
    assert event["object"] == manifest.ref
    assert (arrived["became"], arrived["reason"]) == (event["number"], "")
    assert [file.path for file in manifest.content.files] == ["a.jsonl"]
    assert manifest.provenance.model_extra["sources"] == {"a.jsonl": [str(watched / "a.jsonl")]}
    noted = next(entry for entry in entries(stand.store) if entry.action == "publish dataset")
    assert (noted.who, noted.what) == ("bridge", manifest.ref)
    assert rows(stand.ledger, status="duplicate") == []


def test_three_thousand_files_at_once_are_one_version(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched))
    for number in range(3000):
        (watched / f"{number:04d}.txt").write_text(f"document {number}")
    stand.tick_until(stand.settled)
    assert len(rows(stand.ledger, name="data.arrived", status="accepted")) == 3000
    (manifest,) = stand.versions()
    assert manifest.provenance.metrics["documents"] == 3000
    (event,) = stand.published()
    assert {row["became"] for row in rows(stand.ledger, name="data.arrived")} == {event["number"]}


def test_a_file_that_is_still_written_is_waited_for(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched, settle_seconds=1.0))
    (watched / "a.txt").write_text("whole")
    stand.tick_until(lambda: rows(stand.ledger))
    with open(watched / "b.txt", "w") as file:
        for turn in range(20):
            file.write(f"line {turn}\n")
            file.flush()
            for part in stand.parts:
                part.tick(time.time())
            time.sleep(0.1)
        assert stand.versions() == [], "half of a file is no version"
    stand.tick_until(lambda: stand.settled() and len(rows(stand.ledger, name="data.arrived")) == 2)
    (manifest,) = stand.versions()
    assert manifest.provenance.metrics["documents"] == 2


def test_the_same_content_again_starts_nothing(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched))
    (watched / "a.jsonl").write_bytes(lines(3))
    stand.tick_until(stand.settled)
    (watched / "a.jsonl").touch()
    stand.tick_until(lambda: len(rows(stand.ledger, name="data.arrived")) == 2 and stand.settled())
    (event,) = stand.published()
    assert [row["became"] for row in rows(stand.ledger, name="data.arrived")] == [event["number"]] * 2
    assert len(changes(stand.store, "dataset", "corpus")) == 1


def test_a_folder_that_was_published_before_it_was_watched_starts_nothing(watched, tmp_path):
    home = tmp_path / "home"
    (watched / "a.jsonl").write_bytes(lines(3))
    ref = make_dataset(open_store(home), home / "work", "corpus", [watched]).manifest.ref
    stand = Stand(home, of_folder(watched))
    stand.tick_until(stand.settled)
    (arrived,) = rows(stand.ledger)
    assert (arrived["became"], arrived["reason"]) == (0, f"{ref} is what it was before")


def test_what_can_be_no_dataset_is_noted_and_tried_again_when_more_comes(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched))
    (watched / "a.txt").write_bytes(b"\xff\xfe no text")
    stand.tick_until(stand.settled)
    (bad,) = rows(stand.ledger)
    assert bad["became"] == 0
    assert "no text found" in bad["reason"]
    assert "not UTF-8" in bad["reason"]
    assert stand.versions() == []
    (watched / "b.txt").write_text("text")
    stand.tick_until(lambda: stand.settled() and stand.published())
    assert rows(stand.ledger, became=0)[0]["number"] == bad["number"]


def test_a_dataset_that_nothing_makes_any_more_is_noted(watched, tmp_path):
    stand = Stand(tmp_path / "home", of_folder(watched))
    (watched / "a.txt").write_text("text")
    ticking(Folders(stand.home, stand.events, stand.ledger), until_done=lambda: rows(stand.ledger))
    ticking(Arrivals(stand.home, config(), stand.ledger), until_done=stand.settled)
    assert "nothing that is watched" in rows(stand.ledger)[0]["reason"]


def test_where_the_policy_asks_the_bridge_publishes_only_what_it_may(watched, tmp_path, caplog):
    home = tmp_path / "home"
    add_person(home, "anna", RIGHTS)
    policy = home / "policy.yaml"
    policy.write_text(policy.read_text().replace("bridge:\n  - publish\n  - run", "bridge: [run]"))
    stand = Stand(home, of_folder(watched))
    (watched / "a.txt").write_text("text")
    ticking(*stand.parts, until_done=lambda: any("bridge may not publish" in one.message for one in caplog.records))
    assert stand.versions() == []
    assert rows(stand.ledger)[0]["became"] is None, "it waits for the right"


def test_kills_at_any_point_give_each_content_one_version_and_one_event(watched, tmp_path):
    home, events = tmp_path / "home", of_folder(watched).model_copy(update={"settle_seconds": 0.05})
    ledger, store = Ledger(home), open_store(home)
    StoreHistory(home, ledger).tick(time.time() - 3600)
    for turn in range(6):
        (watched / f"{turn}.jsonl").write_bytes(lines(turn + 1))
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(home), events.model_dump_json()], stdout=subprocess.PIPE
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.12 * turn)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    stand = Stand(home, events)
    stand.tick_until(lambda: stand.settled() and len(rows(ledger, name="data.arrived", status="accepted")) == 6)
    time.sleep(1.1)
    for part in stand.parts:
        part.tick(time.time())
    told, noted = [row["object"] for row in stand.published()], changes(store, "dataset", "corpus")
    assert len(told) == len(set(told)), "no version is told of twice"
    assert set(told) == {f"dataset/corpus@{change.version}" for change in noted}
    assert noted[-1].version == stand.versions()[0].version
    assert stand.versions()[0].provenance.metrics["documents"] == sum(range(1, 7))
    arrived = rows(ledger, name="data.arrived", status="accepted")
    assert {row["became"] for row in arrived} <= {row["number"] for row in stand.published()}


def of_blobs(own: Blobs, **said) -> EventsConfig:
    return config(containers=[own.config(**{"prefix": "in/", "include": "*.jsonl", **said})])


def test_blobs_below_the_prefix_become_one_version(own, tmp_path):
    stand = Stand(tmp_path / "home", of_blobs(own))
    for name in ("in/a.jsonl", "in/deep/b.jsonl", "in/c.txt", "out/d.jsonl", "in/.hidden/e.jsonl"):
        own.put(name, lines(len(name)))
    stand.arrive(own, "in/a.jsonl")
    with connections() as made:
        stand.tick_until(stand.settled)
    assert {address for address in made if address[0] != "name"} <= {("127.0.0.1", own.service.port)}
    (manifest,) = stand.versions()
    assert [file.path for file in manifest.content.files] == ["a.jsonl", "b.jsonl"]
    assert manifest.provenance.model_extra["sources"] == {
        "a.jsonl": [f"{own.url}/in/a.jsonl"],
        "b.jsonl": [f"{own.url}/in/deep/b.jsonl"],
    }
    assert stand.published()[0]["object"] == manifest.ref


def test_text_blobs_say_where_they_came_from(own, tmp_path):
    stand = Stand(tmp_path / "home", of_blobs(own, include="*.txt"))
    own.put("in/a.txt", b"text")
    stand.arrive(own, "in/a.txt")
    stand.tick_until(stand.settled)
    (sources,) = stand.versions()[0].provenance.model_extra["sources"].values()
    assert sources == [f"{own.url}/in/"]


def test_one_more_blob_is_one_more_fetch_and_a_gone_one_is_left_out(own, tmp_path):
    stand = Stand(tmp_path / "home", of_blobs(own))
    names = [f"in/{number:03d}.jsonl" for number in range(40)]
    for name in names:
        own.put(name, lines(1))
    stand.arrive(own, *names)
    stand.tick_until(stand.settled)
    (copy,) = (stand.home / "events" / "blobs").iterdir()
    before = {path.name: path.stat().st_mtime_ns for path in (copy / "files").iterdir()}
    own.put("in/new.jsonl", lines(2))
    own.put("in/000.jsonl", lines(3))
    own.client.delete_blob("in/039.jsonl")
    stand.arrive(own, "in/new.jsonl", "in/000.jsonl")
    stand.tick_until(stand.settled)
    after = {path.name: path.stat().st_mtime_ns for path in (copy / "files").iterdir()}
    assert {name for name, written in after.items() if before.get(name) != written} == {"new.jsonl", "000.jsonl"}
    newest = stand.versions()[0]
    assert "039.jsonl" not in {file.path for file in newest.content.files}
    assert newest.provenance.metrics["documents"] == 38 + 2 + 3
    assert len(stand.published()) == 2


def test_a_copy_that_was_damaged_is_fetched_anew(own, tmp_path):
    stand = Stand(tmp_path / "home", of_blobs(own))
    own.put("in/a.jsonl", lines(3))
    stand.arrive(own, "in/a.jsonl")
    stand.tick_until(stand.settled)
    (copy,) = (stand.home / "events" / "blobs").iterdir()
    (copy / "files" / "a.jsonl").write_bytes(b"{")
    (copy / "files" / "planted.jsonl").write_bytes(lines(9))
    own.put("in/b.jsonl", lines(1))
    stand.arrive(own, "in/b.jsonl")
    stand.tick_until(stand.settled)
    assert stand.versions()[0].provenance.metrics["documents"] == 4


def test_names_that_could_be_another_file_are_left_out_and_said(own, tmp_path, caplog):
    stand = Stand(tmp_path / "home", of_blobs(own, prefix=""))
    for name in (
        "good.jsonl",
        "a//b.jsonl",
        "clash.jsonl",
        "clash.jsonl/below.jsonl",
        "e\u0301.jsonl",
        f"{'l' * 250}.jsonl",
    ):
        own.put(name, lines(1))
    stand.arrive(own, "good.jsonl")
    stand.tick_until(stand.settled)
    (manifest,) = stand.versions()
    assert {file.path for file in manifest.content.files} == {"good.jsonl", "below.jsonl"}
    left_out = [record.message for record in caplog.records if "left out:" in record.message]
    assert len(left_out) == 4


def test_storage_that_is_away_is_said_once_and_nothing_is_lost(own, tmp_path, caplog):
    stand = Stand(tmp_path / "home", of_blobs(own))
    own.put("in/a.jsonl", lines(1))
    stand.arrive(own, "in/a.jsonl")
    own.client.delete_container()
    deadline = time.monotonic() + limit(4)
    while time.monotonic() < deadline:
        for part in stand.parts:
            part.tick(time.time())
        time.sleep(0.05)
    assert sum("no such container" in record.message for record in caplog.records) == 1
    assert rows(stand.ledger)[0]["became"] is None
    own.client.create_container()
    own.put("in/a.jsonl", lines(2))
    stand.tick_until(stand.settled)
    assert stand.versions()[0].provenance.metrics["documents"] == 2


def test_a_kill_while_blobs_are_fetched_costs_only_time(own, tmp_path):
    home, events = tmp_path / "home", of_blobs(own).model_copy(update={"settle_seconds": 0.05})
    stand = Stand(home, events)
    names = [f"in/{number:02d}.jsonl" for number in range(30)]
    for name in names:
        own.put(name, lines(1))
    stand.arrive(own, *names)
    for turn in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(home), events.model_dump_json()],
            stdout=subprocess.PIPE,
            env={**os.environ},
        )
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.3 + 0.2 * turn)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    stand.tick_until(stand.settled)
    (manifest,) = stand.versions()
    assert manifest.provenance.metrics["documents"] == 30
    assert len(stand.published()) == 1
    assert json.loads(rows(stand.ledger, name="data.arrived")[0]["data"])["bytes"] == len(lines(1))
