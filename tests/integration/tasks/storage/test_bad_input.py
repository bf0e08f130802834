"""What is asked wrongly, at the wrong time or by the wrong clock ends with what is true and what to do, and nothing is lost."""

import json
import multiprocessing
import random
import time

import pytest
from store_stand import SECRET, contents, fill, put, write_stores
from versioned_blobs import VersionedBlobs
from waiting import limit

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, IntegrityError, Missing
from tasks.common.seal import opened, sealed
from tasks.registry.versions import publish
from tasks.storage import open_named
from tasks.storage.blob import lease
from tasks.storage.history import changes
from tasks.storage.manifest import Content, FileEntry, Manifest, Provenance, manifest_bytes
from tasks.storage.store import find

fork = multiprocessing.get_context("fork")
later = pytest.mark.long
one_of_blob = pytest.mark.parametrize("stand", ["versions", pytest.param("snapshots", marks=later)], indirect=True)
blob = pytest.mark.parametrize("stand", ["versions", "snapshots"], indirect=True)
versions = pytest.mark.parametrize("stand", ["versions"], indirect=True)
proxy = pytest.mark.parametrize("stand", ["proxy"], indirect=True)
OUTSIDE = [
    "../out",
    "a/../../out",
    "/out",
    "a//b",
    "./a",
    "a/.",
    "",
    "a\\..\\out",
    "nul\0",
    "line\nfeed",
    "tab\t",
    "\x7f",
]


@pytest.fixture
def source(tmp_path):
    dice = random.Random(3)
    return fill(tmp_path / "source", **{f"{name}.bin": dice.randbytes(2000) for name in "abc"})


def told(error):
    """An error that says what to do."""
    assert error.value.message and error.value.remedy
    return f"{error.value.message} {error.value.remedy}"


# Two writers


def test_two_writers_of_one_name_both_have_their_version_and_the_history_has_both(stand, source, tmp_path):
    stand.open().create("warm", b"")
    sources = [fill(tmp_path / f"w{n}", a=b"%d" % n * 5000, same=b"same") for n in range(2)]
    meet = fork.Barrier(2)

    def publish_one(folder):
        meet.wait(limit(30))
        publish(stand.open(), folder, kind="model", inputs=(), provenance=Provenance(name="m"))

    writers = [fork.Process(target=publish_one, args=(folder,)) for folder in sources]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(limit(60))
    assert [writer.exitcode for writer in writers] == [0, 0]
    store = stand.open()
    noted = changes(store, "model", "m")
    assert [change.number for change in noted] == [1, 2]
    assert find(store, "model", "m").version == noted[1].version
    fetched = [contents(store.fetch(store.manifest("model", "m", change.version))) for change in noted]
    assert all(contents(folder) in fetched for folder in sources)


@versions
def test_who_lost_its_lease_goes_no_further(stand):
    """As one does who was stopped for long, or whose lease an administrator broke: it asks before the last step."""
    store = stand.open()
    with lease.held(store.container, "artifacts/dataset/corpus/lease") as require:
        require()
        stand.break_leases()
        time.sleep(lease.FRESH_SECONDS)
        with pytest.raises(lease.Lost) as lost:
            require()
        assert "run the same command again" in told(lost)


@versions
def test_a_lease_runs_from_when_it_was_asked_for(stand, monkeypatch):
    answer = stand.relay.answer

    def late(request):
        said = answer(request)
        if request.header("x-ms-lease-action") == "acquire":
            time.sleep(lease.FRESH_SECONDS)
        return said

    monkeypatch.setattr(stand.relay, "answer", late)
    with lease.held(stand.open().container, "artifacts/dataset/corpus/lease") as require:
        stand.break_leases()
        with pytest.raises(lease.Lost):
            require()


@blob
@pytest.mark.parametrize("damaged", [False, True], ids=["on files of the deleted one", "the deleted one itself"])
def test_a_publisher_stopped_for_longer_than_its_lease_names_no_file_that_is_gone(
    stand, source, tmp_path, monkeypatch, damaged
):
    """It is stopped after its last question, and before what makes its version appear has arrived."""
    store = stand.open()
    first = put(store, source)
    if damaged:
        gone = next(blob.name for blob in stand.blobs().list_blobs() if blob.name.endswith("b.bin"))
        stand.blobs().delete_blob(gone, delete_snapshots="include" if stand.kind == "snapshots" else None)
        for one in stand.blobs().list_blobs(include=["versions"] if stand.kind == "versions" else []):
            if one.name == gone:
                stand.blobs().delete_blob(gone, version_id=one.version_id)
    else:
        fill(source, d=b"more")
    answer, stopped = stand.relay.answer, []

    def stopping(request):
        if request.method == "PUT" and request.place[1].endswith("/manifest.json") and not stopped:
            stopped.append(True)
            stand.break_leases()
            stand.open().delete(first)
        return answer(request)

    with monkeypatch.context() as patched:
        patched.setattr(stand.relay, "answer", stopping)
        with pytest.raises(lease.Lost) as lost:
            put(store, source)
    assert stopped and "run the same command again" in told(lost)
    assert list(store.manifests()) == []
    again = put(store, source)
    assert store.verify(again) == [] and contents(store.fetch(again)) == contents(source)
    assert not [blob.name for blob in stand.blobs().list_blobs() if "/drafts/" in blob.name]


# Blobs that are gone


@blob
def test_a_deleted_blob_is_named_and_publishing_again_brings_it_back(stand, source):
    store = stand.open()
    manifest = put(store, source)
    for each in list(stand.blobs().list_blobs()):
        if each.name.endswith("b.bin"):
            stand.blobs().delete_blob(each.name, delete_snapshots="include" if stand.kind == "snapshots" else None)
    service_forgets(stand, manifest)
    fresh = elsewhere(stand, source.parent)
    with pytest.raises(IntegrityError) as refused:
        fresh.fetch(manifest)
    assert "stored version of b.bin is gone" in told(refused) and not fresh.present(manifest)
    assert put(fresh, source).version == manifest.version
    healed = elsewhere(stand, source.parent)
    known = healed.manifest("dataset", "corpus", manifest.version)
    assert healed.verify(known) == [] and contents(healed.fetch(known)) == contents(source)


def service_forgets(stand, manifest):
    """With versions, a deleted blob leaves its versions; those are gone too when a rule or a person deleted them."""
    if stand.kind == "versions":
        key = next(key for key in stand.relay.versions if key[0] == stand.container and key[1].endswith("b.bin"))
        for version in list(stand.relay.versions[key]):
            stand.relay.expire(*key, version.id)


@versions
def test_an_old_version_that_a_lifecycle_rule_deleted_is_named_and_the_others_stand(stand, source, tmp_path):
    store = stand.open()
    old = put(store, source)
    before = contents(source)
    new = put(store, fill(source, **{"a.bin": b"changed"}))
    key = next(key for key in stand.relay.versions if key[0] == stand.container and key[1].endswith("a.bin"))
    stand.relay.expire(*key, old.provenance.blob_versions["a.bin"])
    fresh = elsewhere(stand, tmp_path)
    for ask in (fresh.fetch, fresh.promote):
        with pytest.raises(IntegrityError) as refused:
            ask(old)
        assert "stored version of a.bin is gone" in told(refused)
    assert contents(fresh.fetch(new)) == contents(source)
    for name, data in before.items():
        (source / name).write_bytes(data)
    assert put(fresh, source).version == old.version
    assert contents(elsewhere(stand, tmp_path).fetch(find(fresh, "dataset", "corpus", old.version))) == before


# Manifests


@blob
def test_a_manifest_of_a_newer_headway_says_upgrade_and_is_left_as_it_is(stand, source):
    manifest = put(stand.open(), source)
    name = next(each.name for each in stand.blobs().list_blobs() if each.name.endswith("manifest.json"))
    whole = stand.blobs().download_blob(name).readall()
    newer = sealed(opened(whole, where=name).replace(b"headway/manifest/1", b"headway/manifest/9"))
    stand.blobs().upload_blob(name, newer, overwrite=True)
    store = stand.open()
    for ask in (lambda: find(store, "dataset", "corpus", manifest.version), lambda: list(store.manifests())):
        with pytest.raises(ValueError, match="upgrade Headway"):
            ask()
    with pytest.raises(ValueError, match="upgrade Headway"):
        put(store, source)
    assert stand.blobs().download_blob(name).readall() == newer


EDITS = {
    "half": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "no object": lambda text: "[]",
    "other size": lambda text: text.replace('"size": 2000', '"size": 2001'),
    "other hash": lambda text: text.replace('"sha256": "', '"sha256": "0', 1),
    "a path out": lambda text: text.replace('"path": "a.bin"', '"path": "../../a.bin"'),
    "a file less": lambda text: without_a_file(text),
}


def without_a_file(text):
    value = json.loads(text)
    value["content"]["files"].pop()
    return json.dumps(value)


@one_of_blob
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_refused(stand, source, edit):
    manifest = put(stand.open(), source)
    name = next(each.name for each in stand.blobs().list_blobs() if each.name.endswith("manifest.json"))
    text = stand.blobs().download_blob(name).readall().decode()
    assert EDITS[edit](text) != text
    stand.blobs().upload_blob(name, EDITS[edit](text).encode(), overwrite=True)
    store = elsewhere(stand, source.parent)
    for ask in (lambda: store.manifest("dataset", "corpus", manifest.version), lambda: list(store.manifests())):
        with pytest.raises(IntegrityError) as refused:
            ask()
        assert "manifest.json" in told(refused)


# Names


@pytest.mark.parametrize(
    ("stand", "path"),
    [
        *(("local", path) for path in OUTSIDE),
        *(("versions", path) for path in OUTSIDE[:1]),
        *(pytest.param("versions", path, marks=later) for path in OUTSIDE[1:]),
    ],
    indirect=["stand"],
)
def test_a_manifest_with_a_path_that_leads_out_or_means_two_things_is_refused(stand, source, tmp_path, path):
    """Also one that somebody forged with care: its version is the hash of what it says."""
    manifest = put(stand.open(), source)
    files = (*manifest.content.files, FileEntry(path=path, size=2000, sha256=manifest.content.files[0].sha256))
    said = manifest.provenance.model_copy(update={"blob_versions": {path: "2026-01-01T00:00:00.0000000Z"}})
    forged = Manifest(content=Content(kind="dataset", files=files), provenance=said)
    lay(stand, manifest, forged)
    store = stand.open()
    for ask in (lambda: find(store, "dataset", "corpus", forged.version), lambda: list(store.manifests())):
        with pytest.raises(IntegrityError, match="manifest.json"):
            ask()
    assert contents(store.fetch(manifest)) == contents(source)


def lay(stand, beside, manifest):
    """Put a manifest where a store would look for it, as somebody does who can write there."""
    if stand.is_blob:
        name = next(each.name for each in stand.blobs().list_blobs() if each.name.endswith("manifest.json"))
        stand.blobs().upload_blob(name.replace(beside.version, manifest.version), manifest_bytes(manifest))
    else:
        place = stand.home / "store" / "artifacts" / "dataset" / "corpus" / manifest.version / "manifest.json"
        place.parent.mkdir()
        place.write_bytes(manifest_bytes(manifest))


def test_names_that_differ_in_case_only_are_refused(stand, source):
    (source / "A.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="differ in case only"):
        put(stand.open(), source)
    assert list(stand.open().manifests()) == []


@pytest.mark.parametrize("key", ["../out", "/etc/passwd", "a/../../out", "a/../b"])
def test_a_document_stays_among_the_documents(stand, key):
    store = stand.open()
    for ask in (lambda: store.read(key), lambda: store.create(key, b""), lambda: store.replace(key, b"", etag=None)):
        with pytest.raises(ValueError, match="document's key"):
            ask()


@blob
@pytest.mark.parametrize(
    "name", ["ends with a dot.", "folder./file", "/".join(["n" * 200] * 5)], ids=["dot", "folder", "long"]
)
def test_names_that_azure_would_change_are_refused_with_what_to_do(stand, source, name):
    (source / name).parent.mkdir(parents=True, exist_ok=True)
    (source / name).write_bytes(b"")
    with pytest.raises(ValueError, match="Azure"):
        put(stand.open(), source)
    assert list(stand.open().manifests()) == []


# Identity, clocks


@proxy
@pytest.mark.parametrize("request_number", [1, 4, 8])
def test_credentials_that_expire_in_the_middle_lose_nothing(stand, source, tmp_path, request_number):
    store = stand.open()
    old, before = put(store, source), contents(source)
    changed = fill(source, **{"a.bin": b"changed", "more.bin": b"more"})
    expired = stand.relay.arm("expired", nth=request_number, times=10**6)
    with pytest.raises(HeadwayError) as refused:
        put(elsewhere(stand, tmp_path), changed)
    assert expired.fired and "credential" in told(refused)
    with pytest.raises(HeadwayError):
        elsewhere(stand, tmp_path).fetch(old)
    stand.relay.disarm()
    fresh = elsewhere(stand, tmp_path)
    assert [each.version for each in fresh.manifests()] == [old.version]
    assert contents(fresh.fetch(old)) == before
    assert contents(fresh.fetch(put(fresh, changed))) == contents(changed)


@proxy
@pytest.mark.parametrize("what", ["manifest", "files"])
def test_what_lies_in_the_archive_tier_is_named_with_what_brings_it_back(stand, source, tmp_path, what):
    old = put(stand.open(), source)
    archived = stand.relay.arm(
        "archived", method="GET", contains="manifest" if what == "manifest" else "a.bin", times=10**6
    )
    with pytest.raises(Missing) as refused:
        elsewhere(stand, tmp_path).fetch(elsewhere(stand, tmp_path).manifest(*parse_ref(old.ref)))
    assert archived.fired and "archive tier" in told(refused) and "set-tier" in told(refused)
    stand.relay.disarm()
    assert contents(elsewhere(stand, tmp_path).fetch(old)) == contents(source)


@versions
def test_a_clock_that_is_wrong_is_said_to_be(stand, source, tmp_path, monkeypatch):
    """The service refuses requests whose time is more than 15 minutes from its own."""
    with VersionedBlobs(stand.azurite, skew=3600).running() as ahead:
        monkeypatch.setenv(SECRET, ahead.endpoint.connection_string)
        store = elsewhere(stand, tmp_path)
        with pytest.raises(HeadwayError) as refused:
            put(store, source)
        assert "clock" in told(refused)


@versions
def test_clocks_that_differ_a_little_do_not_change_which_version_is_the_newest(stand, source, tmp_path, monkeypatch):
    """What is current is said by numbers in a history, not by anybody's time."""
    made = []
    for number, skew in enumerate((600, -600, 0)):
        with VersionedBlobs(stand.azurite, skew=skew).running() as service:
            monkeypatch.setenv(SECRET, service.endpoint.connection_string)
            store = elsewhere(stand, tmp_path)
            fill(source, **{"a.bin": b"%d" % number, "b.bin": b"%d" % number, "c.bin": b"%d" % number})
            made.append(publish(store, source, kind="model", inputs=(), provenance=Provenance(name="m")))
            assert find(store, "model", "m").version == made[-1].version
    assert [change.version for change in changes(store, "model", "m")] == [manifest.version for manifest in made]


@blob
def test_a_wrong_key_is_said_and_nothing_is_shown_of_it(stand, source, tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, stand.environment[SECRET].replace("Eby8vdM02xNO", "Wrong8vdM02x"))
    with pytest.raises(HeadwayError) as refused:
        put(elsewhere(stand, tmp_path), source)
    assert "connection_string" in told(refused)
    assert "Wrong8vdM02x" not in told(refused)


@blob
def test_a_secret_that_is_not_there_is_named(stand, tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET)
    with pytest.raises(Missing, match=SECRET):
        elsewhere(stand, tmp_path).list("audit")


@blob
def test_a_container_that_is_not_there_is_said(stand, source, tmp_path):
    uri = f"az://devstoreaccount1/{stand.container}x"
    write_stores(tmp_path / "h", uri, credential="connection_string", secret=f"env:{SECRET}")
    with pytest.raises(HeadwayError) as refused:
        put(open_named(tmp_path / "h", "cloud"), source)
    assert f"{stand.container}x" in told(refused)


def elsewhere(stand, tmp_path):
    """The store from a home where nothing was fetched yet."""
    home = tmp_path / f"home-{random.randrange(10**12)}"
    home.mkdir(parents=True)
    (home / "stores.yaml").write_bytes((stand.home / "stores.yaml").read_bytes())
    return open_named(home, "cloud")
