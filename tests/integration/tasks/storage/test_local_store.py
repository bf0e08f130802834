"""What every store promises, held against the stores that are there: whole artifacts or none, and documents by etag.

A later store joins by an entry in `STORES`: how it is opened, and where a tamperer finds a stored file.
"""

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from waiting import limit

from tasks.common.errors import IntegrityError, Missing, Unknown
from tasks.common.seal import opened, sealed
from tasks.storage import open_store
from tasks.storage.manifest import Provenance
from tasks.storage.store import find

pytestmark = pytest.mark.unit

fork = multiprocessing.get_context("fork")


def open_bound(home):
    """The store of a home whose trust file says whose signatures count: others may write to its folder."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "trust.yaml").touch()
    return open_store(home)


STORES = {"local": open_store, "bound": open_bound}
CHANGES = ("os.mkdir", "os.rename", "os.link", "os.remove", "os.chmod", "os.utime", "os.rmdir")


BOUND_LATER = ["local", pytest.param("bound", marks=pytest.mark.long)]


@pytest.fixture(params=STORES)
def reopen(request, tmp_path):
    """Opens the store under test; a process of its own opens it anew."""
    return lambda: STORES[request.param](tmp_path / "home")


@pytest.fixture
def store(reopen):
    return reopen()


def stored_file(store, manifest, path):
    """The stored file, as somebody with access to the store's disk or account sees it."""
    entry = next(file for file in manifest.content.files if file.path == path)
    return Path(store.location(manifest, entry))


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "source")


def fill(folder, seed=0, size=3000):
    """Three files, one of them deep and one hidden."""
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(random.Random(seed).randbytes(size))
    (folder / "deep" / "b.txt").write_text("umlaut ä\r\n", encoding="utf-8", newline="")
    (folder / ".hidden").write_text(f"{seed}")
    return folder


def put(store, folder, *, name="corpus", inputs=(), link=False, **provenance):
    return store.publish(
        folder, kind="dataset", inputs=inputs, provenance=Provenance(name=name, **provenance), link=link
    )


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def in_processes(*calls):
    """Run calls at once, each in a process of its own; their exit codes."""
    processes = [fork.Process(target=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit(60))
    return [process.exitcode for process in processes]


def test_what_is_fetched_is_what_was_published(store, folder):
    manifest = put(store, folder)
    assert contents(store.fetch(manifest)) == contents(folder)
    assert [file.path for file in manifest.content.files] == [".hidden", "a.bin", "deep/b.txt"]
    expected = hashlib.sha256((folder / "a.bin").read_bytes()).hexdigest()
    assert manifest.content.files[1].sha256 == expected
    assert store.verify(manifest) == []
    assert store.manifest("dataset", "corpus", manifest.version) == manifest


def test_the_version_is_the_content_and_its_inputs_whatever_the_provenance(store, folder, tmp_path):
    first = put(store, folder, created="2026-01-01", commit="a" * 40, metrics={"loss": 1.0})
    again = put(store, shutil.copytree(folder, tmp_path / "copy"), created="2027-01-01", commit="b" * 40)
    assert again.version == first.version
    assert again.provenance.created == "2026-01-01"  # an artifact keeps the provenance that it was first made with
    assert len(list(store.manifests("dataset"))) == 1
    with_inputs = put(store, folder, inputs=("1" * 64, "2" * 64))
    assert with_inputs.version != first.version
    assert put(store, folder, inputs=("2" * 64, "1" * 64)).version == with_inputs.version
    (folder / "a.bin").rename(folder / "renamed.bin")
    assert put(store, folder).version != first.version


def test_a_published_artifact_does_not_change_with_its_source(store, folder):
    manifest = put(store, folder)
    (folder / "a.bin").write_bytes(b"changed")
    assert store.verify(manifest) == []


def remove(path):
    path.unlink()


def extra(path):
    (path.parent / "extra").write_text("x")


def hidden(path):
    (path.parent / "deep" / ".extra").write_text("x")


def longer(path):
    rewrite(path, path.read_bytes() + b"x")


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    rewrite(path, data)


def rewrite(path, data):
    path.chmod(0o644)
    path.write_bytes(data)


def symlink(path):
    path.rename(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


def symlinked_folder(path):
    (path.parent / "deep").rename(path.parents[1] / "elsewhere")
    (path.parent / "deep").symlink_to(path.parents[1] / "elsewhere")


def symlinked_root(path):
    path.parent.rename(path.parents[1] / "elsewhere")
    path.parent.symlink_to(path.parents[1] / "elsewhere")


def hard_link(path):
    os.link(path, path.parents[1] / "elsewhere")


def fifo(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [
    (remove, {"a.bin": "missing"}),
    (extra, {"extra": "extra"}),
    (hidden, {"deep/.extra": "extra"}),
    (longer, {"a.bin": "size"}),
    (flipped, {"a.bin": "sha256"}),
    (symlink, {"a.bin": "link"}),
    (symlinked_folder, {"deep": "extra", "deep/b.txt": "missing"}),
    (symlinked_root, {".": "link"}),
    (hard_link, {"a.bin": "link"}),
    (fifo, {"a.bin": "link"}),
]


@pytest.mark.parametrize(("damage", "expected"), DAMAGES, ids=lambda case: getattr(case, "__name__", ""))
def test_every_damage_is_found_and_refused_and_healed_by_publishing_again(store, folder, damage, expected):
    manifest = put(store, folder)
    damage(stored_file(store, manifest, "a.bin"))
    assert {problem.path: problem.problem for problem in store.verify(manifest)} == expected
    with pytest.raises(IntegrityError) as refused:
        store.fetch(manifest)
    assert {problem["path"]: problem["problem"] for problem in refused.value.problems} == expected
    assert all(f"{path} ({problem})" in refused.value.message for path, problem in expected.items())
    assert put(store, folder).version == manifest.version
    assert contents(store.fetch(manifest)) == contents(folder)


EDITS = {
    "another size": lambda text: text.replace('"size": 3000', '"size": 3001'),
    "another hash": lambda text: text.replace('"sha256": "', '"sha256": "0', 1),
    "a file less": lambda text: json.dumps(without_a_file(json.loads(text))),
    "a stranger's key": lambda text: text.replace('"kind"', '"sort"'),
    "half of it": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "no object": lambda text: "[]",
}


def without_a_file(manifest):
    manifest["content"]["files"].pop()
    return manifest


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(store, folder, edit):
    manifest = put(store, folder)
    path = stored_file(store, manifest, "a.bin").parents[1] / "manifest.json"
    edited = EDITS[edit](path.read_text())
    assert edited != path.read_text()
    rewrite(path, edited.encode())
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        find(store, "dataset", "corpus")
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        store.manifest("dataset", "corpus", manifest.version)


def test_a_manifest_of_a_later_schema_says_upgrade(store, folder):
    manifest = put(store, folder)
    path = stored_file(store, manifest, "a.bin").parents[1] / "manifest.json"
    said = opened(path.read_bytes(), where="here")
    rewrite(path, sealed(said.replace(b"headway/manifest/1", b"headway/manifest/9")))
    with pytest.raises(ValueError, match="upgrade Headway"):
        find(store, "dataset", "corpus")


@pytest.mark.parametrize("make", [symlink, symlinked_folder, fifo], ids=lambda make: make.__name__)
def test_links_and_special_files_are_not_published(store, folder, make):
    make(folder / "a.bin")
    with pytest.raises(ValueError, match="link or a special file"):
        put(store, folder)
    assert list(store.manifests()) == []


def test_an_empty_folder_is_not_published(store, tmp_path):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for folder in (tmp_path / "empty", tmp_path / "not-there"):
        with pytest.raises(ValueError, match="holds no file"):
            put(store, folder)


def test_presence_is_asked_without_reading(store, folder):
    manifest = put(store, folder)
    assert store.present(manifest)
    flipped(stored_file(store, manifest, "a.bin"))
    assert store.present(manifest)
    stored_file(store, manifest, "deep/b.txt").unlink()
    assert not store.present(manifest)


def test_with_link_nothing_is_copied_and_the_artifact_stands_once_the_folder_is_gone(tmp_path, folder):
    store = open_store(tmp_path / "home")
    before = contents(folder)
    inode = (folder / "a.bin").stat().st_ino
    manifest = put(store, folder, link=True)
    assert stored_file(store, manifest, "a.bin").stat().st_ino == inode
    assert {problem.problem for problem in store.verify(manifest)} == {"link"}
    assert put(store, folder, link=True).version == manifest.version  # a restarted stage publishes once more
    shutil.rmtree(folder)
    assert contents(store.fetch(manifest)) == before


def test_whoever_writes_to_the_store_of_a_bound_home_changes_nothing_that_is_being_read(tmp_path, folder):
    store = open_bound(tmp_path / "home")
    manifest = put(store, folder)
    read = store.fetch(manifest)
    stored = stored_file(store, manifest, "a.bin")
    stored.chmod(0o644)
    stored.write_bytes(b"exchanged")
    assert contents(read) == contents(folder) and not read.is_relative_to(store.root)
    assert store.verify(manifest) != []
    assert contents(store.fetch(manifest)) == contents(folder)
    (read / "a.bin").chmod(0o644)
    (read / "a.bin").write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match="a.bin"):
        store.fetch(manifest)
    store.delete(manifest)
    assert not read.exists()


def test_whoever_writes_to_the_store_of_a_bound_home_has_no_second_name_of_what_a_job_made(tmp_path, folder):
    """A job that is adopted is published once more from its folder, and signed."""
    store, before = open_bound(tmp_path / "home"), contents(folder)
    stored = stored_file(store, put(store, folder, link=True), "a.bin")
    assert stored.stat().st_ino != (folder / "a.bin").stat().st_ino and stored.stat().st_nlink == 1
    stored.chmod(0o644)
    stored.write_bytes(b"exchanged")
    assert contents(folder) == before


def test_no_room_is_said_before_anything_is_written(store, folder, monkeypatch):
    usage = type("Usage", (), {"free": 64 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Missing, match="no space on the disk for dataset/corpus") as said:
        put(store, folder)
    assert "HEADWAY_HOME" in said.value.remedy
    assert list(store.manifests()) == []
    usage.free += 3014 + len("umlaut ä\r\n".encode())
    put(store, folder)


def dying_at(count):
    """Have this process kill itself right before the count-th change of the file system."""
    left = [count]

    def hook(event, args):
        changes = event in CHANGES or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        left[0] -= bool(changes)
        if changes and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("reopen", "damaged"),
    [
        pytest.param("local", False, id="local-new"),
        pytest.param("bound", True, id="bound-healing"),
        pytest.param("bound", False, id="bound-new", marks=pytest.mark.long),
        pytest.param("local", True, id="local-healing", marks=pytest.mark.long),
    ],
    indirect=["reopen"],
)
def test_a_publisher_killed_before_any_of_its_steps_leaves_nothing_torn(reopen, folder, damaged):
    """Nothing torn is visible, and the next publish heals; `healing` begins with an artifact that was damaged before."""
    store, deaths = reopen(), 0
    for count in range(1, 200):
        (folder / ".hidden").write_text(str(count))
        if damaged:
            flipped(stored_file(store, put(store, folder), "a.bin"))

        def publish(count=count):
            dying_at(count)
            put(reopen(), folder)

        (code,) = in_processes(publish)
        for manifest in store.manifests():
            assert [problem.problem for problem in store.verify(manifest)] in ([[], ["sha256"]] if damaged else [[]])
        published = put(store, folder)
        assert contents(store.fetch(published)) == contents(folder)
        deaths += code == -signal.SIGKILL
        if code == 0:
            break
    assert code == 0
    assert deaths > 10


@pytest.mark.integration
@pytest.mark.long
def test_a_publisher_killed_at_any_time_leaves_nothing_torn(reopen, tmp_path):
    store, source = reopen(), tmp_path / "source"
    fill(source, size=8 << 20)
    began = time.monotonic()
    put(store, source)
    took = time.monotonic() - began
    chance = random.Random(7)
    for number in range(20):
        (source / ".hidden").write_text(f"round {number}")
        publisher = fork.Process(target=lambda: put(reopen(), source))
        publisher.start()
        time.sleep(took * 1.3 * chance.random())
        publisher.kill()
        publisher.join()
        for manifest in store.manifests():
            assert store.verify(manifest) == []
        assert contents(store.fetch(put(store, source))) == contents(source)
        shutil.rmtree(tmp_path / "home")


@pytest.mark.integration
@pytest.mark.parametrize("reopen", BOUND_LATER, indirect=True)
def test_processes_that_publish_the_same_at_once_all_succeed(reopen, folder):
    """And whoever looks meanwhile sees a whole artifact or none."""
    store, rounds, publishers = reopen(), 12, 4
    meet = fork.Barrier(publishers + 1)

    def publish():
        for _ in range(rounds):
            meet.wait(limit(30))
            put(reopen(), folder)
            meet.wait(limit(30))

    processes = [fork.Process(target=publish, daemon=True) for _ in range(publishers)]
    for process in processes:
        process.start()
    for number in range(rounds):
        meet.wait(limit(30))
        while meet.n_waiting < publishers and any(process.is_alive() for process in processes):
            for manifest in store.manifests():
                assert store.verify(manifest) == [], f"round {number}"
        meet.wait(limit(30))
        assert [store.verify(manifest) for manifest in store.manifests()] == [[]]
        if number < rounds - 1:
            shutil.rmtree(store.root)
    for process in processes:
        process.join(limit(30))
    assert [process.exitcode for process in processes] == [0] * publishers


def test_find_takes_the_newest_or_the_version_that_the_digits_mean(store, folder):
    first = put(store, folder)
    (folder / "a.bin").write_bytes(b"2")
    second = put(store, folder)
    put(store, folder, name="other")
    assert find(store, "dataset", "corpus") == second
    assert find(store, "dataset", "corpus", first.version[:8]) == first
    (folder / "a.bin").write_bytes(random.Random(0).randbytes(3000))
    time.sleep(0.01)
    put(store, folder)
    assert find(store, "dataset", "corpus") == first  # published again: the newest


def test_find_says_what_is_there(store, folder):
    with pytest.raises(Unknown) as nothing:
        find(store, "dataset", "corpus")
    assert "There is no dataset yet" in nothing.value.remedy
    put(store, folder)
    with pytest.raises(Unknown, match=r"dataset/corpse is not in ") as wrong:
        find(store, "dataset", "corpse")
    assert "corpus" in wrong.value.remedy
    with pytest.raises(Unknown, match="dataset/corpus@00000000"):
        find(store, "dataset", "corpus", "00000000")


def test_digits_that_fit_two_versions_are_not_enough(store, folder):
    versions = set()
    while len({version[0] for version in versions}) == len(versions):
        (folder / "a.bin").write_text(str(len(versions)))
        versions.add(put(store, folder).version)
    first = next(v[0] for v in versions if sum(w[0] == v[0] for w in versions) > 1)
    with pytest.raises(ValueError, match="give more digits"):
        find(store, "dataset", "corpus", first)


def test_what_is_attached_is_no_part_of_the_version(store, folder):
    manifest = put(store, folder)
    assert store.attachment(manifest, "model.sig") is None
    store.attach(manifest, "model.sig", b"signature")
    store.attach(manifest, "model.sig", b"another")
    assert store.attachment(manifest, "model.sig") == b"another"
    assert store.verify(manifest) == []
    put(store, folder)
    assert store.attachment(manifest, "model.sig") == b"another"


def test_documents_change_by_compare_and_set(store):
    assert store.read("a/b.json") is None
    assert not store.replace("a/b.json", b"0", etag="not there")
    assert store.create("a/b.json", b"1")
    assert not store.create("a/b.json", b"2")
    document = store.read("a/b.json")
    assert document.data == b"1"
    assert not store.replace("a/b.json", b"2", etag=None)
    assert store.replace("a/b.json", b"2", etag=document.etag)
    assert not store.replace("a/b.json", b"3", etag=document.etag)
    assert store.read("a/b.json").data == b"2"
    assert store.replace("a/c.json", b"new", etag=None)


def test_documents_are_listed_by_prefix(store):
    for key in ("journal/jobs/2", "journal/jobs/1", "journal/other", "records/x"):
        store.create(key, b"{}")
    assert store.list("journal/jobs") == ["journal/jobs/1", "journal/jobs/2"]
    assert store.list("journal") == ["journal/jobs/1", "journal/jobs/2", "journal/other"]
    assert store.list("nothing") == []
    assert len(store.list("")) == 4


@pytest.mark.parametrize("key", ["../escaped", "a/../../escaped", "/etc/escaped", ".."])
def test_keys_do_not_leave_the_store(store, key, tmp_path):
    for call in (
        lambda: store.create(key, b"x"),
        lambda: store.replace(key, b"x", etag=None),
        lambda: store.read(key),
        lambda: store.list(key),
    ):
        with pytest.raises(ValueError, match="is not a document's key"):
            call()
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.integration
@pytest.mark.parametrize("reopen", BOUND_LATER, indirect=True)
def test_eight_writers_lose_no_update_and_one_of_eight_creators_wins(reopen):
    store = reopen()
    store.create("counter", b"0")

    def write():
        mine, wins = reopen(), 0
        for number in range(10):
            wins += mine.create(f"only/{number}", str(os.getpid()).encode())
            while True:
                now = mine.read("counter")
                if mine.replace("counter", str(int(now.data) + 1).encode(), etag=now.etag):
                    break
        mine.create(f"wins/{os.getpid()}", str(wins).encode())

    assert in_processes(*[write] * 8) == [0] * 8
    assert store.read("counter").data == b"80"
    assert sum(int(store.read(key).data) for key in store.list("wins")) == 10
    assert len(store.list("only")) == 10


def test_what_a_killed_publisher_left_goes_away_a_day_later(store, folder):
    place = store.root / "artifacts" / "dataset" / "corpus"
    for name, age in ((".incoming-old", 25 * 3600), (".incoming-now", 60)):
        (place / name / "files").mkdir(parents=True)
        os.utime(place / name, (time.time() - age,) * 2)
    put(store, folder)
    assert [path.name for path in place.glob(".incoming-*")] == [".incoming-now"]


@pytest.mark.parametrize("where", ["documents/journal", "artifacts/dataset", "artifacts/dataset/corpus"])
def test_no_write_follows_a_link_out_of_the_store(store, folder, where, tmp_path):
    """Who may write to the store must not have the home's own files written through it."""
    manifest = put(store, folder)
    store.create("journal/kept", b"{}")
    (tmp_path / "outside").mkdir()
    link = store.root / where
    link.rename(link.with_name("aside"))
    link.symlink_to(tmp_path / "outside")
    writes = (
        [lambda: store.create("journal/a/b", b"{}"), lambda: store.replace("journal/c", b"{}", etag=None)]
        if where.startswith("documents")
        else [
            lambda: put(store, folder),
            lambda: store.attach(manifest, "signature.json", b"{}"),
            lambda: store.delete(manifest),
        ]
    )
    for write in writes:
        with pytest.raises(IntegrityError, match="is a link"):
            write()
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_link_that_appears_while_an_artifact_is_brought_in_is_not_followed(store, tmp_path):
    (tmp_path / "outside").mkdir()
    source = tmp_path / "source"
    for name in ("a", "z"):
        (source / name).mkdir(parents=True)
        (source / name / "file").write_bytes(b"text")
    begun = []

    def plant(event, arguments):
        if event == "os.mkdir" and arguments[0] == "a" and not begun:
            begun.append(True)
            [arriving] = store.root.glob("artifacts/dataset/corpus/.incoming-*/files")
            (arriving / "z").symlink_to(tmp_path / "outside")

    sys.addaudithook(plant)
    with pytest.raises(IntegrityError, match="is a link"):
        put(store, source)
    assert begun and list((tmp_path / "outside").iterdir()) == [] and list(store.manifests()) == []
