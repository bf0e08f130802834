"""What every store promises, held against each of them: whole artifacts or none, and documents by etag.

A live account joins where HEADWAY_AZURE_TEST_ACCOUNT names one. What breaks on the way is in test_faults.py, what is asked
wrongly in test_bad_input.py, what rots in test_damage.py; the local store's own ways are in test_local_store.py.
"""

import multiprocessing
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from store_stand import LIVE, contents, entry, fill, put
from waiting import limit

from tasks.common.errors import IntegrityError, Unknown
from tasks.registry import versions
from tasks.storage.history import changes, note_change
from tasks.storage.manifest import Provenance, describe
from tasks.storage.store import find

fork = multiprocessing.get_context("fork")
ODD_NAMES = [
    "plain.txt",
    "with space and + and % and %20",
    "what? is # this & that = 1; a:b",
    "umlaut ä, 日本語, 🚂",
    ".hidden/.git/config",
    'dots...and~tilde\'and"quotes"',
    "manifest.json",
    "files/manifest.json",
    "/".join(["deep"] * 30),
    "n" * 200,
]


ONE_OF_BLOB = pytest.mark.parametrize(
    "stand",
    [
        *("local", "versions"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("snapshots", "faulty")),
        pytest.param("live", marks=pytest.mark.skipif(not LIVE, reason="HEADWAY_AZURE_TEST_ACCOUNT names no account")),
    ],
    indirect=True,
)
"""For what has nothing to do with how a store of blobs keeps versions: in `make test` on one of the two kinds."""


@pytest.fixture
def store(stand):
    return stand.open()


@pytest.fixture
def folder(tmp_path):
    """Three files: one deep, one hidden, one empty."""
    return fill(
        tmp_path / "source", a=random.Random(0).randbytes(3000), deep__b=b"umlaut \xc3\xa4\r\n", deep__empty=b""
    )


def test_what_is_fetched_is_what_was_published_also_for_a_process_that_comes_later(stand, store, folder):
    (folder / ".hidden").write_bytes(b"\0")
    manifest = put(store, folder, created="2026-01-01", commit="a" * 40, metrics={"loss": 1.5}, colour="extra")
    later = stand.open()
    known = later.manifest("dataset", "corpus", manifest.version)
    assert known == manifest
    assert contents(later.fetch(known)) == contents(folder)
    assert later.verify(known) == [] and later.present(known)
    assert known.content.files == describe(folder)
    said = known.provenance.model_dump()
    assert (said["commit"], said["metrics"], said["colour"]) == ("a" * 40, {"loss": 1.5}, "extra")


@ONE_OF_BLOB
def test_equal_content_is_the_same_version_whatever_is_said_of_it(store, folder, tmp_path):
    first = put(store, folder, created="2026-01-01", commit="a" * 40)
    again = put(store, shutil.copytree(folder, tmp_path / "copy"), created="2027-01-01", commit="b" * 40)
    assert (again.version, again.provenance.created) == (first.version, "2026-01-01")
    assert [each.version for each in store.manifests()] == [first.version]
    other = put(store, folder, inputs=("2" * 64, "1" * 64))
    assert other.version != first.version
    assert put(store, folder, inputs=("1" * 64, "2" * 64)).version == other.version
    assert contents(store.fetch(other)) == contents(folder)


@ONE_OF_BLOB
def test_versions_of_a_name_are_listed_newest_first_and_names_are_not_mixed_up(store, folder):
    made = []
    for number in range(3):
        (folder / "a").write_bytes(b"%d" % number)
        made.append(put(store, folder).version)
    beside = [put(store, folder, name=name).version for name in ("corpus-2", "corp")]
    model = put(store, folder, kind="model").version
    assert [each.version for each in store.manifests("dataset", "corpus")] == made[::-1]
    assert [each.provenance.name for each in store.manifests("dataset")] == ["corp", *["corpus"] * 3, "corpus-2"]
    assert {each.version for each in store.manifests()} == {*made, *beside, model}
    assert list(store.manifests("model", "nothing")) == [] == list(store.manifests("tokens"))
    again = fill(folder, a=b"0")
    assert put(store, again).version == made[0]
    assert next(store.manifests("dataset", "corpus")).version == made[0]  # published again: the newest


@ONE_OF_BLOB
def test_versions_are_listed_without_their_manifests_and_a_manifest_that_is_written_again_has_another_stamp(
    store, folder
):
    first = put(store, folder)
    other = put(store, fill(folder, a=b"changed"), name="other", kind="model")
    listed = list(store.versions())
    assert {each[:3] for each in listed} == {("dataset", "corpus", first.version), ("model", "other", other.version)}
    assert [each.stamp for each in store.versions()] == [each.stamp for each in listed]
    put(store, folder, name="other", kind="model")
    before, after = [{each.name: each.stamp for each in these} for these in (listed, store.versions())]
    assert after["corpus"] == before["corpus"]
    store.delete(first)
    assert [each.name for each in store.versions()] == ["other"]


@ONE_OF_BLOB
def test_files_of_all_names_that_a_folder_can_hold_come_back(store, tmp_path):
    source = tmp_path / "odd"
    for number, name in enumerate(ODD_NAMES):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"%d" % number if number else b"")
    manifest = put(store, source)
    assert contents(store.fetch(manifest)) == contents(source)
    assert store.verify(manifest) == []
    for file in manifest.content.files:
        assert file.path.rpartition("/")[2] in store.location(manifest, file)


@ONE_OF_BLOB
def test_a_store_does_not_hand_on_what_was_changed_in_a_fetched_folder(store, folder):
    manifest = put(store, folder)
    path = store.fetch(manifest) / "a"
    path.chmod(0o644)
    path.write_bytes(bytes(3000))
    try:
        assert contents(store.fetch(manifest)) == contents(folder)
    except IntegrityError as refused:
        assert "a (sha256)" in refused.message


@ONE_OF_BLOB
def test_only_a_folder_of_plain_files_is_published(store, folder, tmp_path):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    for nothing in (tmp_path / "empty", tmp_path / "not-there"):
        with pytest.raises(ValueError, match="holds no file"):
            put(store, nothing)
    for number, make in enumerate((link_to_file, link_to_folder, os.mkfifo)):
        bad = shutil.copytree(folder, tmp_path / f"bad{number}")
        make(bad / "odd")
        with pytest.raises(ValueError, match="odd is a link or a special file"):
            put(store, bad)
    assert list(store.manifests()) == []


def link_to_file(path):
    path.symlink_to(path.parent / "a")


def link_to_folder(path):
    path.symlink_to(path.parent / "deep")


@ONE_OF_BLOB
def test_what_is_attached_is_no_part_of_the_version(store, folder):
    manifest = put(store, folder)
    other = put(store, folder, name="other")
    assert store.attachment(manifest, "model.sig") is None
    for data in (b"signature", b"another"):
        store.attach(manifest, "model.sig", data)
    assert store.attachment(manifest, "model.sig") == b"another"
    assert store.attachment(other, "model.sig") is None and store.attachment(manifest, "other.sig") is None
    assert store.verify(manifest) == [] and contents(store.fetch(manifest)) == contents(folder)
    put(store, folder)
    assert store.attachment(manifest, "model.sig") == b"another"


@ONE_OF_BLOB
def test_documents_change_by_compare_and_set(store):
    assert store.read("a/b.json") is None
    assert not store.replace("a/b.json", b"0", etag="not there")
    assert store.create("a/b.json", b"1") and not store.create("a/b.json", b"2")
    document = store.read("a/b.json")
    assert document.data == b"1"
    assert not store.replace("a/b.json", b"2", etag=None)
    assert store.replace("a/b.json", b"2", etag=document.etag)
    assert not store.replace("a/b.json", b"3", etag=document.etag)
    assert store.read("a/b.json").data == b"2"
    assert store.replace("a/c.json", b"new", etag=None) and store.create("a/empty", b"")
    assert store.read("a/empty").data == b""


@ONE_OF_BLOB
def test_documents_are_listed_below_a_folder_in_order(store):
    for key in ("journal/jobs/2", "journal/jobs/1", "journal/other", "journals/x", "records/ä b.json"):
        assert store.create(key, key.encode())
    assert store.list("journal") == ["journal/jobs/1", "journal/jobs/2", "journal/other"]
    assert store.list("journal/jobs") == ["journal/jobs/1", "journal/jobs/2"]
    assert store.list("records") == ["records/ä b.json"] and store.list("nothing") == []
    assert store.read("records/ä b.json").data == "records/ä b.json".encode()


@ONE_OF_BLOB
def test_of_those_who_write_one_document_at_once_one_wins(stand):
    """Threads with a store of their own: create-only, and compare-and-set from one tag."""
    stores, wins = [stand.open() for _ in range(6)], []
    for number in range(3):
        at_once(
            *[lambda s=s, n=n, k=number: wins.append(s.create(f"race/{k}", b"%d" % n)) for n, s in enumerate(stores)]
        )
        assert wins.count(True) == number + 1
    tag, moved = stores[0].read("race/0").etag, []
    at_once(
        *[lambda s=s, n=n: moved.append(s.replace("race/0", b"new %d" % n, etag=tag)) for n, s in enumerate(stores)]
    )
    assert sorted(moved) == [False] * 5 + [True]


def at_once(*calls):
    """Make calls at the same moment, each in a thread; the first error of any is raised."""
    meet = threading.Barrier(len(calls))

    def run(call):
        meet.wait(limit(30))
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result(limit(60))


@ONE_OF_BLOB
def test_processes_that_publish_one_name_at_once_leave_every_version_whole(stand, tmp_path):
    """The same names of files with other bytes, by a writer each; two of them write the same."""
    stand.open().create("warm", b"")
    sources = [fill(tmp_path / f"s{n}", a=b"%d" % (n % 3) * 999, same=b"same" * 99, b=b"%d" % n * 9) for n in range(3)]
    sources.append(shutil.copytree(sources[0], tmp_path / "again"))
    meet = fork.Barrier(len(sources))

    def publish(source):
        meet.wait(limit(30))
        put(stand.open(), source)

    processes = [fork.Process(target=publish, args=(source,)) for source in sources]
    for process in processes:
        process.start()
    for process in processes:
        process.join(limit(60))
    assert [process.exitcode for process in processes] == [0] * 4
    store = stand.open()
    found = {manifest.version: manifest for manifest in store.manifests("dataset", "corpus")}
    assert len(found) == 3
    fetched = [contents(store.fetch(manifest)) for manifest in found.values()]
    assert all(contents(source) in fetched for source in sources)


def test_a_version_that_is_deleted_is_gone_and_the_others_stay_whole(store, folder):
    old = put(store, folder)
    new = put(store, fill(folder, a=b"changed"))
    store.delete(old)
    assert store.manifest("dataset", "corpus", old.version) is None and not store.present(old)
    with pytest.raises(IntegrityError):
        store.fetch(old)
    assert contents(store.fetch(new)) == contents(folder)
    store.delete(old)
    again = put(store, fill(folder, a=random.Random(0).randbytes(3000)))
    assert again.version == old.version
    store.delete(new)
    assert [each.version for each in store.manifests()] == [old.version]
    assert contents(store.fetch(again)) == contents(folder) and store.verify(again) == []


def test_the_newest_version_can_be_deleted_and_the_one_before_stays_whole(store, folder):
    old, before = put(store, folder), contents(folder)
    new = put(store, fill(folder, a=b"changed", more=b"more"))
    store.delete(new)
    assert [each.version for each in store.manifests()] == [old.version]
    assert contents(store.fetch(old)) == before and store.verify(old) == []


def test_promoting_leaves_every_version_whole(store, folder):
    old, before = put(store, folder), contents(folder)
    new = put(store, fill(folder, a=b"changed", more=b"more"))
    store.promote(old)
    assert contents(store.fetch(old)) == before
    assert contents(store.fetch(new)) == contents(folder)
    after = put(store, fill(folder, a=b"once more"))
    assert contents(store.fetch(after)) == contents(folder)
    assert store.verify(old) == [] == store.verify(new)


@pytest.mark.parametrize("stand", ["versions", "snapshots"], indirect=True)
@pytest.mark.parametrize("polls", [0, 2])
def test_promoting_brings_the_old_bytes_to_the_stable_paths_without_moving_them_through_us(stand, folder, polls):
    """Also where the service says that it is still copying."""
    store = stand.open()
    old, before = put(store, folder), contents(folder)
    put(store, fill(folder, a=b"changed", more=b"more"))
    stand.relay.polls_until_copied = polls
    moved = stand.written(lambda: store.promote(old))
    assert [target for target in moved if "/files/" in target] == []
    assert {path: stand.blobs().download_blob(stable(store, old, path)).readall() for path in before} == before


def stable(store, manifest, path):
    """The name of the blob that holds a file, within the container."""
    return store.location(manifest, entry(manifest, path)).split("/", 4)[4].partition("?")[0]


@pytest.mark.parametrize("stand", ["versions", "snapshots"], indirect=True)
def test_files_that_did_not_change_are_not_uploaded_again(stand, folder):
    store = stand.open()
    old = put(store, folder)
    (folder / "a").write_bytes(b"changed")
    sent = stand.written(lambda: put(stand.open(), folder))
    assert [target.rpartition("/files/")[2].partition("?")[0] for target in sent if "/files/" in target] == ["a"]
    new = find(store, "dataset", "corpus")
    names = [manifest.provenance.blob_versions for manifest in (old, new)]
    assert names[0]["deep/b"] == names[1]["deep/b"] and names[0]["a"] != names[1]["a"]
    assert set(names[1]) == {"a", "deep/b", "deep/empty"}
    sent = stand.written(lambda: put(stand.open(), folder))
    assert [target for target in sent if "/files/" in target] == []
    (folder / "a").write_bytes(random.Random(0).randbytes(3000))
    sent = stand.written(lambda: put(stand.open(), folder, inputs=("1" * 64,)))
    assert [target for target in sent if "/files/" in target] == []  # an older version has them


def test_an_old_version_that_was_damaged_or_deleted_is_not_promoted(store, folder):
    old = put(store, folder)
    new = put(store, fill(folder, a=b"changed"))
    store.delete(old)
    with pytest.raises(IntegrityError):
        store.promote(old)
    assert contents(store.fetch(new)) == contents(folder)


@ONE_OF_BLOB
def test_a_name_means_what_was_published_last_or_rolled_back_to(stand, folder):
    store, made = stand.open(), []
    for number in range(3):
        fill(folder, a=b"%d" % number)
        made.append(publish_as_the_registry(store, folder).version)
    assert find(stand.open(), "dataset", "corpus").version == made[2]
    note_change(store, "dataset", "corpus", action="rollback", version=made[0], reason="worse")
    assert find(stand.open(), "dataset", "corpus").version == made[0]
    assert find(store, "dataset", "corpus", made[1][:8]).version == made[1]
    publish_as_the_registry(store, folder)
    assert find(store, "dataset", "corpus").version == made[2]
    noted = [(change.number, change.action, change.version) for change in changes(store, "dataset", "corpus")]
    assert noted == [
        *[(n + 1, "publish", made[n]) for n in range(3)],
        (4, "rollback", made[0]),
        (5, "publish", made[2]),
    ]
    with pytest.raises(Unknown, match=r"dataset/corpse is not in ") as unknown:
        find(store, "dataset", "corpse")
    assert "dataset/corpus" in unknown.value.remedy


def publish_as_the_registry(store, folder):
    return versions.publish(store, folder, kind="dataset", inputs=(), provenance=Provenance(name="corpus"))


@ONE_OF_BLOB
def test_history_of_writers_at_once_has_every_change_once(stand):
    stores = [stand.open() for _ in range(4)]
    at_once(
        *[lambda s=s, n=n: note_change(s, "model", "m", action="publish", version=str(n)) for n, s in enumerate(stores)]
    )
    noted = changes(stores[0], "model", "m")
    assert [change.number for change in noted] == [1, 2, 3, 4]
    assert {change.version for change in noted} == {"0", "1", "2", "3"}


@ONE_OF_BLOB
def test_a_published_artifact_does_not_change_with_its_source(store, folder):
    manifest, before = put(store, folder), contents(folder)
    (folder / "a").write_bytes(bytes(3000))
    assert store.verify(manifest) == [] and contents(store.fetch(manifest)) == before


@ONE_OF_BLOB
def test_with_link_the_artifact_stands_once_the_folder_is_gone(store, folder):
    before = contents(folder)
    manifest = store.publish(folder, kind="dataset", inputs=(), provenance=Provenance(name="corpus"), link=True)
    shutil.rmtree(folder)
    assert contents(store.fetch(manifest)) == before


@ONE_OF_BLOB
def test_addresses_are_below_the_stores_own(store, folder):
    manifest = put(store, folder)
    assert store.uri_of(manifest).startswith(store.uri)
    assert manifest.provenance.name in store.uri_of(manifest)
