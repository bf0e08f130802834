"""Watched folders and the home's store: what landed is told of once, whatever dies meanwhile."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from event_stand import config, rows, ticking

from deployments.bridge.arrivals import StoreHistory
from deployments.bridge.folders import Folders, look
from deployments.configuration.events import EventsConfig
from deployments.configuration.platform import load_settings
from deployments.platform import start_stop
from deployments.publishing.datasets import make_dataset
from tasks.common import process
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.registry.promoting import roll_back, way_back
from tasks.registry.versions import note
from tasks.storage import open_store

PROCESS = """
import sys, time
from pathlib import Path
from deployments.bridge.folders import Folders
from deployments.configuration.events import EventsConfig
from tasks.events.ledger import Ledger
folders = Folders(Path(sys.argv[1]), EventsConfig.model_validate_json(sys.argv[2]), Ledger(Path(sys.argv[1])))
print("ready", flush=True)
while True:
    folders.tick(time.time())
    time.sleep(0.01)
"""


@pytest.fixture
def watched(tmp_path) -> Path:
    path = tmp_path / "in"
    path.mkdir()
    return path


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "home")


def events_of(watched: Path, **said) -> EventsConfig:
    return config(folders=[{"path": str(watched), "dataset": "corpus", **said}])


def names(ledger: Ledger, **wanted) -> list[str]:
    found = rows(ledger, **(wanted or {"status": "accepted"}))
    return [Path(row["object"].rpartition("#")[0]).name for row in found]


def settle(part: Folders, start: float = 1000.0) -> None:
    """Two looks, with more than the time that files take to settle in between; then none is due for an hour."""
    part.tick(start)
    part.tick(start + 100)


def test_a_file_is_told_of_once_when_it_has_settled(watched, ledger):
    folders = Folders(Path(), events_of(watched), ledger)
    (watched / "a.txt").write_text("one")
    folders.tick(1000.0)
    assert rows(ledger) == [], "it may still be written"
    folders.tick(1100.0)
    (row,) = rows(ledger)
    status = (watched / "a.txt").stat()
    stamp = f"3-{status.st_mtime_ns}-{status.st_ctime_ns}"
    assert row["object"] == f"file:{watched}/a.txt#{stamp}:corpus"
    assert (row["name"], row["subject"], row["channel"]) == ("data.arrived", "dataset/corpus", "folder")
    settle(folders, 2000.0)
    settle(Folders(Path(), events_of(watched), ledger), 3000.0)
    assert len(rows(ledger)) == 1, "neither again, nor after a restart"


def test_a_file_that_is_still_written_waits(watched, ledger):
    folders = Folders(Path(), events_of(watched), ledger)
    for turn in range(5):
        with open(watched / "a.jsonl", "a") as file:
            file.write('{"text": "more"}\n')
        folders.tick(1000.0 + turn * 100)
        assert rows(ledger) == []
    folders.tick(2000.0)
    assert json.loads(rows(ledger)[0]["data"]) == {"bytes": 5 * 17}


def test_a_change_is_told_of_also_one_that_hides(watched, ledger):
    folders = Folders(Path(), events_of(watched), ledger)
    path = watched / "a.txt"
    path.write_text("one")
    settle(folders)
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    settle(folders, 2000.0)
    assert names(ledger) == ["a.txt", "a.txt"], "the same size and the same time, and other text"


def test_what_is_no_plain_finished_file_is_left_alone(watched, ledger, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("not ours")
    (watched / "sub").mkdir()
    for name in ("good.txt", "sub/good.txt", ".hidden.txt", "half.txt.tmp", "half.part", "other.py"):
        (watched / name).write_text("text")
    (watched / ".git").mkdir()
    (watched / ".git" / "x.txt").write_text("text")
    (watched / "link.txt").symlink_to(outside / "secret.txt")
    (watched / "linked").symlink_to(outside)
    os.mkfifo(watched / "pipe.txt")
    settle(Folders(Path(), events_of(watched, include="*.txt"), ledger))
    assert sorted(row["object"].partition("#")[0] for row in rows(ledger)) == [
        f"file:{watched}/good.txt",
        f"file:{watched}/sub/good.txt",
    ]


def test_names_of_any_bytes_are_told_of_once(watched, ledger):
    for name in (b"\xff\xfe.txt", "ü b#c.txt".encode(), b"line\nbreak.txt", b"x" * 250):
        Path(os.fsdecode(os.fsencode(watched) + b"/" + name)).write_text("text")
    settle(Folders(Path(), events_of(watched), ledger))
    assert len(rows(ledger, status="accepted")) == 4
    assert all(row["object"].isprintable() for row in rows(ledger))
    settle(Folders(Path(), events_of(watched), ledger), 2000.0)
    assert len(rows(ledger)) == 4


def test_one_file_can_be_of_two_datasets(watched, ledger):
    both = config(folders=[{"path": str(watched), "dataset": name} for name in ("one", "two")])
    (watched / "a.txt").write_text("text")
    settle(Folders(Path(), both, ledger))
    settle(Folders(Path(), both, ledger), 2000.0)
    assert [row["subject"] for row in rows(ledger)] == ["dataset/one", "dataset/two"]


def test_a_folder_that_is_missing_is_said_once_and_watched_again(watched, ledger, caplog):
    gone = watched / "later"
    folders = Folders(Path(), events_of(gone), ledger)
    for turn in range(3):
        folders.tick(1000.0 + turn * 100)
    assert sum("cannot be looked at: No such file" in record.message for record in caplog.records) == 1
    gone.mkdir()
    (gone / "a.txt").write_text("text")
    settle(folders, 2000.0)
    assert names(ledger) == ["a.txt"]


def test_a_clock_that_is_set_back_stops_nothing(watched, ledger):
    folders = Folders(Path(), events_of(watched), ledger)
    (watched / "a.txt").write_text("one")
    folders.tick(1e9)
    settle(folders, 1000.0)
    assert names(ledger) == ["a.txt"]


def test_kills_lose_no_file_and_double_none(watched, tmp_path):
    home, said = tmp_path / "home", events_of(watched).model_copy(update={"settle_seconds": 0.0}).model_dump_json()
    for number in range(5):
        for each in range(300):
            (watched / f"{number}-{each}.txt").write_text(f"{number} {each}")
        process = subprocess.Popen([sys.executable, "-c", PROCESS, str(home), said], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.01 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    ledger = Ledger(home)
    settle(Folders(home, events_of(watched), ledger))
    accepted = names(ledger)
    assert len(accepted) == len(set(accepted)) == 1500
    assert not rows(ledger, status="duplicate")


def test_a_restart_with_many_files_tells_nothing_again(watched, ledger):
    for number in range(3000):
        (watched / f"{number}.txt").touch()
    settle(Folders(Path(), events_of(watched), ledger))
    began = time.monotonic()
    settle(Folders(Path(), events_of(watched), ledger), 5000.0)
    print(f"a restart with 3000 files: {time.monotonic() - began:.2f} s")
    assert len(rows(ledger)) == 3000


def test_a_look_says_what_it_could_not_see(tmp_path):
    assert look(tmp_path / "none", "*").problems == {str(tmp_path / "none"): "No such file or directory"}


def publish(home: Path, text: str, name: str = "corpus") -> str:
    """A version of a dataset, as the command publishes it."""
    path = home.parent / "text" / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return make_dataset(open_store(home), home / "work", name, [path]).manifest.version


def test_versions_that_were_there_start_nothing_and_new_ones_are_told_of_once(tmp_path):
    home = tmp_path / "home"
    first, ledger = publish(home, "one"), Ledger(home)
    StoreHistory(home, ledger).tick(1000.0)
    assert rows(ledger) == []
    second, other = publish(home, "two"), publish(home, "a new name", "other")
    history = StoreHistory(home, ledger)
    history.tick(2000.0)
    history.tick(2000.5)
    (home / "events" / "store.json").write_text(
        json.dumps({open_store(home).uri: {"corpus": 1}})
    )  # as a kill before its last act leaves it
    StoreHistory(home, ledger).tick(3000.0)
    told = rows(ledger, status="accepted")
    assert {row["object"] for row in told} == {f"dataset/corpus@{second}", f"dataset/other@{other}"}
    assert {(row["name"], row["channel"]) for row in told} == {("dataset.published", "store")}
    assert rows(ledger, status="duplicate") == [], "what is known is not told again"
    assert first not in str(told)


def test_what_is_published_while_the_bridge_comes_up_is_news(tmp_path):
    home = tmp_path / "home"
    first, folder = publish(home, "one"), home / "platform" / "bridge"
    process.start(folder, process.ProcessSpec(argv=[sys.executable, "-c", "import time; time.sleep(600)"], log="log"))
    try:
        process.write_json(folder / "part.json", {"pid": 0, "since": time.time()})
        second, ledger = publish(home, "two"), Ledger(home)
        StoreHistory(home, ledger).tick(1000.0)
    finally:
        process.stop(folder)
    assert [row["object"] for row in rows(ledger)] == [f"dataset/corpus@{second}"]
    assert first != second


def test_rollbacks_deletions_and_what_validation_left_start_nothing(tmp_path):
    home = tmp_path / "home"
    ledger, store = Ledger(home), open_store(home)
    StoreHistory(home, ledger).tick(1000.0)
    publish(home, "one")
    second = publish(home, "two")
    StoreHistory(home, ledger).tick(2000.0)
    assert len(rows(ledger)) == 2
    roll_back(store, way_back(store, "dataset/corpus"), keys=home / "keys", reason="a test")
    note(store, "dataset", "corpus", action="publish", version="c" * 64, current=False)
    note(store, "dataset", "corpus", action="delete", version=second, current=False)
    StoreHistory(home, ledger).tick(3000.0)
    assert len(rows(ledger)) == 2
    note(store, "dataset", "corpus", action="copy", version="d" * 64)
    StoreHistory(home, ledger).tick(4000.0)
    assert rows(ledger)[-1]["object"] == f"dataset/corpus@{'d' * 64}"


def test_a_version_that_somebody_told_of_by_hand_is_not_told_again(tmp_path):
    home = tmp_path / "home"
    ledger = Ledger(home)
    StoreHistory(home, ledger).tick(1000.0)
    version = publish(home, "one")
    ledger.receive(
        Event(name="dataset.published", subject="dataset/corpus", source="hand", identity="1", channel="hand", occurred=0.0)
        .model_copy(update={"object": f"dataset/corpus@{version}"})
    )  # fmt: skip
    other = publish(home, "another", name="other")
    ticking(StoreHistory(home, ledger), until_done=lambda: len(rows(ledger)) == 2)
    assert [row["object"] for row in rows(ledger)] == [f"dataset/corpus@{version}", f"dataset/other@{other}"]
    assert {row["status"] for row in rows(ledger)} == {"accepted"}


def test_a_relative_folder_is_below_where_its_file_was_given_and_stays_there(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    source = Path("mine.yaml")
    source.write_text(
        "# my folders\nevents:\n  folders:\n    - {path: inbox/web, dataset: web}\n    - {path: /srv/in, dataset: other}\n"
    )
    config, text = start_stop.given(source)
    start_stop.keep(tmp_path / "home", text)
    monkeypatch.chdir(tmp_path)
    paths = [folder.path for folder in load_settings(tmp_path / "home").events.folders]
    assert paths == [folder.path for folder in config.events.folders] == [str(tmp_path / "here/inbox/web"), "/srv/in"]
    source = tmp_path / "plain.yaml"
    source.write_text("# kept as it is\nevents:\n  folders:\n    - {path: /srv/in, dataset: other}\n")
    assert start_stop.given(source)[1] == source.read_text()
