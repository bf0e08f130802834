"""A publisher that is killed at random moments leaves no torn artifact, and takes no older one: `make soak N=200 SEED=1`.

Each round kills a process that publishes, with SIGKILL, after a random part of the time that publishing takes, until a
quarter of the rounds have died before they were done. Whoever looks then sees whole artifacts only, every older version is
as it was, and publishing again brings what the killed one wanted. On a local store, and on blobs with versions. Ten rounds
run in `make test`.
"""

import multiprocessing
import os
import random
import sys
import time
from statistics import median

import azurite
import pytest
from store_stand import contents, fill, put, standing
from waiting import limit

ROUNDS, SEED = int(os.environ.get("N", "10")), int(os.environ.get("SEED", "1"))
FILES, BYTES = 8, 60_000
fork = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(10, id="ten"), pytest.param(ROUNDS, id="all", marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
)
@pytest.mark.parametrize("kind", ["local", pytest.param("versions", marks=pytest.mark.long)])
def test_a_killed_publisher_leaves_nothing_torn_and_nothing_lost(kind, rounds, request, tmp_path):
    dice = random.Random(f"{SEED}-{kind}")
    with standing(kind, tmp_path / "home", lambda: request.getfixturevalue("service")) as stand:
        source = fill(tmp_path / "source", **{f"f{n}.bin": dice.randbytes(BYTES) for n in range(FILES)})
        store = stand.open()
        whole = {put(store, source).version: contents(source)}
        usual, killed, number = median(time_of(stand, changed(source, dice), whole) for _ in range(3)), 0, 0
        while number < rounds or killed < rounds // 4:
            number += 1
            changed(source, dice)
            died = publish_and_kill(stand, source, dice.uniform(0, 1.2 * usual))
            killed += died
            usual *= 1.1 if died else 0.8  # the machine may be five times as fast now as it was when that was measured
            assert_whole(stand, whole, f"round {number}")
            whole[put(stand.open(), source).version] = contents(source)
            assert_whole(stand, dict(list(whole.items())[-2:]), f"round {number}, published again")
            if len(whole) > 3:
                forget(stand, whole)
        print(f"\n{kind}: {killed} of {number} publishers died before they were done", file=sys.stderr)


def changed(source, dice):
    """Some files change, some stay: the next version is to refer to those."""
    for number in dice.sample(range(FILES), dice.randrange(1, 6)):
        (source / f"f{number}.bin").write_bytes(dice.randbytes(BYTES))
    return source


def start(stand, source):
    """A process that publishes; its exit code is 0 when it got to its end."""
    process = fork.Process(target=lambda: put(stand.open(), source))
    process.start()
    return process


def time_of(stand, source, whole):
    """Seconds that publishing takes when nobody kills it."""
    began = time.monotonic()
    process = start(stand, source)
    process.join(limit(60))
    took = time.monotonic() - began
    assert process.exitcode == 0
    whole[next(stand.open().manifests("dataset", "corpus")).version] = contents(source)
    return took


def publish_and_kill(stand, source, after):
    """Whether the process died before it was done."""
    process = start(stand, source)
    time.sleep(after)
    process.kill()
    process.join(limit(30))
    if stand.is_blob:
        stand.break_leases()
    return process.exitcode != 0


def assert_whole(stand, wanted, when):
    """Every artifact that is visible is whole, and all that were published are."""
    store = stand.open()
    seen = {manifest.version: manifest for manifest in store.manifests()}
    for manifest in seen.values():
        assert store.verify(manifest) == [], when
    assert wanted.keys() <= seen.keys(), when
    for version, files in wanted.items():
        assert contents(store.fetch(seen[version])) == files, when


def forget(stand, whole):
    """An old version is deleted, so that a long sweep stays quick, and deletions are between the kills too."""
    oldest = next(iter(whole))
    del whole[oldest]
    store = stand.open()
    store.delete(store.manifest("dataset", "corpus", oldest))
