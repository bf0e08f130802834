"""What networks and services do to a transfer is mended or said, and in time, on the way up and on the way down.

A corrupt block is sent or asked for again within 2 seconds (issue 5, "Blob store"). The proxy stands before blobs with
versions; what it is armed with hits one chosen request. Stalls and dead endpoints are in test_silence.py.
"""

import random
import time
from contextlib import contextmanager

import pytest
from store_stand import SECRET, contents, fill, put, write_stores
from waiting import limit

from tasks.common.errors import IntegrityError, Missing
from tasks.storage import open_named

BUSY = 2.0
"""Of a machine that the whole suite runs on, as in test_silence.py."""
DEAD, CORRUPT, BROKEN = 30.0 * BUSY, 2.0 * BUSY, 5.0 * BUSY
LIMITS = {"cut": BROKEN, "flip": CORRUPT, "busy": BROKEN, "throttled": BROKEN}
"""Until the client asks the same again."""
UPLOADS = [("cut", "up"), ("cut", "down"), ("flip", "up"), ("busy", "up"), ("throttled", "up")]
ROUNDS = [("cut", "down"), ("busy", "up"), ("flip", "up"), ("throttled", "up"), ("cut", "up")]
DOWNLOADS = ["cut", "flip", "busy", "throttled"]
SMALL, LARGE = 50_000, 20_000_000

pytestmark = pytest.mark.parametrize("stand", ["proxy"], indirect=True)


@contextmanager
def within(seconds):
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= limit(seconds), f"{took:.1f} s"


def source_of(tmp_path, size):
    return fill(tmp_path / "source", **{"big.bin": random.Random(size).randbytes(size), "deep__small.txt": b"small"})


def elsewhere(stand, tmp_path):
    """The store from a home where nothing was fetched yet."""
    home = tmp_path / f"home{time.monotonic_ns()}"
    home.mkdir()
    (home / "stores.yaml").write_bytes((stand.home / "stores.yaml").read_bytes())
    return open_named(home, "cloud")


def of_both_sizes(faults, *, large):
    """Each fault at a small file; at the second block of a large one those of `large`, and the others in `make long`."""
    later = [pytest.param(LARGE, *fault, marks=[pytest.mark.long] * (fault not in large)) for fault in faults]
    return [*((SMALL, *fault) for fault in faults), *later]


@pytest.mark.parametrize(("size", "kind", "direction"), of_both_sizes(UPLOADS, large=[("flip", "up")]))
def test_an_upload_is_mended(stand, tmp_path, kind, direction, size):
    source, store = source_of(tmp_path, size), stand.open()
    fault = stand.relay.arm(kind, direction, method="PUT", contains="big.bin", nth=1 if size == SMALL else 2)
    manifest = put(store, source)
    assert fault.fired == 1 and fault.again <= limit(LIMITS[kind])
    assert contents(elsewhere(stand, tmp_path).fetch(manifest)) == contents(source)


@pytest.mark.parametrize(("size", "kind"), of_both_sizes([(kind,) for kind in DOWNLOADS], large=[("cut",)]))
def test_a_download_is_mended(stand, tmp_path, kind, size):
    source = source_of(tmp_path, size)
    manifest = put(stand.open(), source)
    store = elsewhere(stand, tmp_path)
    fault = stand.relay.arm(kind, "down", method="GET", contains="big.bin", nth=1 if size == SMALL else 2)
    assert contents(store.fetch(manifest)) == contents(source)
    assert fault.fired == 1 and fault.again <= limit(LIMITS[kind])


@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_what_arrives_broken_every_time_is_not_handed_on(stand, tmp_path, kind):
    manifest = put(stand.open(), source_of(tmp_path, SMALL))
    store = elsewhere(stand, tmp_path)
    stand.relay.arm(kind, "down", method="GET", contains="big.bin", times=1000)
    with within(DEAD), pytest.raises((IntegrityError, Missing)) as refused:
        store.fetch(manifest)
    assert "big.bin" in refused.value.message and refused.value.remedy


def test_what_is_corrupted_on_the_way_up_every_time_is_not_published(stand, tmp_path):
    store, source = stand.open(), source_of(tmp_path, SMALL)
    stand.relay.arm("flip", "up", method="PUT", contains="big.bin", times=1000)
    with within(DEAD), pytest.raises((IntegrityError, Missing)) as refused:
        put(store, source)
    assert "big.bin" in refused.value.message and refused.value.remedy
    stand.relay.disarm()
    assert list(store.manifests()) == []
    assert contents(store.fetch(put(store, source))) == contents(source)


@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_an_answer_that_there_is_none_and_breaks_off_is_asked_for_again(stand, kind):
    """Seen in a rehearsal: the text of a 404 broke off, and the run ended."""
    store = stand.open()
    fault = stand.relay.arm(kind, "down", method="GET", contains="ref.json")
    with within(DEAD):
        assert store.read("refs/ref.json") is None
    assert fault.fired == 1 and fault.again < float("inf")


def test_a_manifest_whose_answer_is_lost_is_published_all_the_same(stand, tmp_path):
    store, source = stand.open(), source_of(tmp_path, SMALL)
    fault = stand.relay.arm("cut", "down", method="PUT", contains="manifest.json")
    manifest = put(store, source)
    assert fault.fired == 1
    assert [each.version for each in store.manifests()] == [manifest.version]


def test_a_document_whose_answer_is_lost_counts_as_written_by_who_wrote_it(stand):
    """Else a change would stand twice in a history, and a ref would have been moved by somebody else."""
    store = stand.open()
    fault = stand.relay.arm("cut", "down", method="PUT", contains="ref.json")
    assert store.create("refs/ref.json", b"first")
    assert fault.fired == 1
    tag = store.read("refs/ref.json").etag
    fault = stand.relay.arm("cut", "down", method="PUT", contains="ref.json")
    assert store.replace("refs/ref.json", b"second", etag=tag)
    assert fault.fired == 1
    assert store.read("refs/ref.json").data == b"second"
    assert not store.create("refs/ref.json", b"third") and not store.replace("refs/ref.json", b"third", etag=tag)


def test_faults_one_after_the_other_are_all_mended(stand, tmp_path):
    """A fault of every kind, at a seeded request of each of several rounds."""
    dice, store = random.Random(11), stand.open()
    for number, (kind, direction) in enumerate(ROUNDS):
        source = fill(tmp_path / f"s{number}", **{f"{n}.bin": dice.randbytes(2000) for n in range(6)})
        stand.relay.arm(kind, direction, nth=dice.randrange(1, 12))
        manifest = put(store, source, name=f"n{number}")
        stand.relay.arm(kind, nth=dice.randrange(1, 8))
        fetched = elsewhere(stand, tmp_path).fetch(manifest)
        stand.relay.disarm()
        assert contents(fetched) == contents(source), kind


def test_without_a_store_that_is_named_right_nothing_is_tried_for_long(stand, tmp_path):
    write_stores(
        tmp_path / "wrong",
        f"az://devstoreaccount1/{stand.container}x/p",
        credential="connection_string",
        secret=f"env:{SECRET}",
    )
    with within(BROKEN), pytest.raises((Missing, ValueError)) as refused:
        open_named(tmp_path / "wrong", "cloud").create("a", b"")
    assert f"{stand.container}x" in str(refused.value)
