"""Nothing that was changed where it lies is handed on: a sampled sweep of what can happen to an artifact, found by default.

In a local store: a flip of any byte, every length, extra, missing, hidden and linked files. In Azure Blob: bytes that changed
where the service keeps them, blobs and versions that are gone.
"""

import os
import random

import pytest
from store_stand import contents, entry, fill, put

from tasks.common.errors import IntegrityError

SEED = 7
FLIPS = 150
"""Of the local store's bytes, in `make test`; every bit of the smallest file besides."""


@pytest.fixture
def published(stand, tmp_path):
    dice = random.Random(f"{SEED} {tmp_path.name}")  # bytes of its own, which nothing else in the service has
    source = fill(
        tmp_path / "source",
        **{"a.bin": dice.randbytes(5000), "deep__b.bin": dice.randbytes(300), ".hidden": b"x", "empty": b""},
    )
    return stand.open(), put(stand.open(), source), source


local = pytest.mark.parametrize("stand", ["local"], indirect=True)
one_of_blob = pytest.mark.parametrize(
    "stand", ["versions", pytest.param("snapshots", marks=pytest.mark.long)], indirect=True
)
blob = pytest.mark.parametrize("stand", ["versions", "snapshots"], indirect=True)


def files_of(store, manifest):
    return {file.path: store._place(manifest) / "files" / file.path for file in manifest.content.files}


def refused(store, manifest):
    """What is wrong with which file, as both ways of looking say: verify and fetch."""
    found = {problem.path: problem.problem for problem in store.verify(manifest)}
    with pytest.raises(IntegrityError) as error:
        store.fetch(manifest)
    assert {problem["path"]: problem["problem"] for problem in error.value.problems} == found
    return found


def rewrite(path, data):
    path.chmod(0o644)
    path.write_bytes(data)


@local
def test_of_a_few_files_each_byte_is_checked_and_no_other_file_is_read(published, tmp_path):
    store, manifest, source = published
    rewrite(files_of(store, manifest)["a.bin"], b"other")
    names = ("deep/b.bin", "empty", "no such file")
    store.copy_files(manifest, names, tmp_path / "few")
    assert contents(tmp_path / "few") == {name: contents(source)[name] for name in ("deep/b.bin", "empty")}
    rewrite(files_of(store, manifest)["deep/b.bin"], bytes(300))
    with pytest.raises(IntegrityError, match=r"deep/b\.bin"):
        store.copy_files(manifest, names, tmp_path / "again")
    files_of(store, manifest)["deep/b.bin"].unlink()
    with pytest.raises(IntegrityError, match=r"deep/b\.bin .*missing"):
        store.copy_files(manifest, names, tmp_path / "gone")


@one_of_blob
def test_of_a_few_blobs_each_byte_is_checked_and_no_other_one_is_read(stand, published, tmp_path):
    store, manifest, source = published
    stand.rot(contents(source)["a.bin"], at=17)
    store.copy_files(manifest, ("deep/b.bin", "no such file"), tmp_path / "few")
    assert contents(tmp_path / "few") == {"deep/b.bin": contents(source)["deep/b.bin"]}
    stand.rot(contents(source)["deep/b.bin"], at=17)
    with pytest.raises(IntegrityError, match=r"deep/b\.bin"):
        store.copy_files(manifest, ("deep/b.bin",), tmp_path / "again")


@local
def test_every_flip_of_a_bit_is_found(published):
    store, manifest, _ = published
    dice = random.Random(SEED)
    paths = {name: path for name, path in files_of(store, manifest).items() if path.stat().st_size}
    places = [
        (name, dice.randrange(paths[name].stat().st_size), dice.randrange(8))
        for name in dice.choices(list(paths), k=FLIPS)
    ]
    places += [(".hidden", 0, bit) for bit in range(8)]
    for name, byte, bit in places:
        whole = paths[name].read_bytes()
        rewrite(paths[name], whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :])
        assert refused(store, manifest) == {name: "sha256"}, (byte, bit)
        rewrite(paths[name], whole)
    assert store.verify(manifest) == []


@local
def test_every_other_length_is_found(published):
    store, manifest, _ = published
    path = files_of(store, manifest)["deep/b.bin"]
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        rewrite(path, whole[:length])
        assert refused(store, manifest) == {"deep/b.bin": "size"}, length
    for more in (b"\0", b"\n", whole):
        rewrite(path, whole + more)
        assert refused(store, manifest) == {"deep/b.bin": "size"}
    empty = files_of(store, manifest)["empty"]
    rewrite(path, whole)
    rewrite(empty, b"\0")
    assert refused(store, manifest) == {"empty": "size"}


EXTRAS = [
    "extra",
    ".extra",
    "deep/.git/config",
    "__pycache__/a.pyc",
    "A.bin",
    "deep/b.bin~",
    "\u202eb.bin",
    "new\nline",
]


@local
@pytest.mark.parametrize("name", EXTRAS)
def test_every_file_too_many_is_found(published, name):
    store, manifest, _ = published
    path = store._place(manifest) / "files" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    assert refused(store, manifest) == {name: "extra"}


@local
def test_every_missing_file_is_found(published):
    store, manifest, _ = published
    for name, path in files_of(store, manifest).items():
        path.rename(path.parents[3] / "kept")
        assert refused(store, manifest) == {name: "missing"}
        (path.parents[3] / "kept").rename(path)
    assert store.verify(manifest) == []


@local
@pytest.mark.parametrize("make", ["symlink", "dangling", "hardlink", "fifo", "folder"])
def test_every_file_that_is_no_plain_file_is_found(published, tmp_path, make):
    store, manifest, _ = published
    for name, path in files_of(store, manifest).items():
        kept = tmp_path / f"kept-{path.name}"
        path.rename(kept)
        if make == "hardlink":
            os.link(kept, path)
        elif make == "fifo":
            os.mkfifo(path)
        elif make == "folder":
            path.mkdir()
        else:
            path.symlink_to(kept if make == "symlink" else "nowhere")
        assert refused(store, manifest)[name] == ("missing" if make == "folder" else "link")
        path.rmdir() if make == "folder" else path.unlink()
        kept.rename(path)
    assert store.verify(manifest) == []


@one_of_blob
def test_bytes_that_change_where_the_service_keeps_them_are_found(stand, published):
    store, manifest, source = published
    assert contents(store.fetch(manifest)) == contents(source)
    stand.rot((source / "deep" / "b.bin").read_bytes(), at=150)
    later = stand.open()
    assert {problem.path: problem.problem for problem in later.verify(manifest)} == {"deep/b.bin": "sha256"}
    assert later.present(manifest)


@one_of_blob
def test_rotten_bytes_are_not_fetched_and_published_again_they_are_whole(stand, published, tmp_path):
    _, manifest, source = published
    stand.rot((source / "a.bin").read_bytes(), at=0)
    fresh = another_machine(stand, tmp_path)
    assert refused(fresh, manifest) == {"a.bin": "sha256"}
    healed = put(fresh, source)
    assert healed.version == manifest.version
    known = fresh.manifest("dataset", "corpus", manifest.version)
    assert contents(another_machine(stand, tmp_path / "2").fetch(known)) == contents(source)


def another_machine(stand, tmp_path):
    """The store from a home where nothing was fetched yet."""
    from tasks.storage import open_named

    home = tmp_path / "other"
    home.mkdir(parents=True)
    (home / "stores.yaml").write_bytes((stand.home / "stores.yaml").read_bytes())
    return open_named(home, "cloud")


@blob
def test_a_blob_that_somebody_overwrote_or_deleted_takes_no_version_away(stand, published, tmp_path):
    """Who writes past Headway makes a newer version of a blob: those that manifests name are still there."""
    _, manifest, source = published
    blobs = stand.blobs()
    names = [each.name for each in blobs.list_blobs() if each.name.endswith(("a.bin", "b.bin"))]
    assert len(names) >= 2
    for name in names:
        blobs.upload_blob(name, b"vandal", overwrite=True)
    store = another_machine(stand, tmp_path)
    assert contents(store.fetch(manifest)) == contents(source)
    assert put(store, source).version == manifest.version
    assert entry(manifest, "a.bin").size == 5000


@pytest.mark.parametrize("stand", ["versions"], indirect=True)
def test_a_version_that_is_gone_is_named(stand, published, tmp_path):
    """As a lifecycle rule deletes old versions, by their id."""
    store, manifest, source = published
    put(store, fill(source, **{"a.bin": b"new"}))
    container, name = stand.container, next(n.name for n in stand.blobs().list_blobs() if n.name.endswith("a.bin"))
    service_of(stand).expire(container, name, manifest.provenance.blob_versions["a.bin"])
    fresh = another_machine(stand, tmp_path)
    assert refused(fresh, manifest) == {"a.bin": "missing"} and not fresh.present(manifest)


def service_of(stand):
    return stand.relay
