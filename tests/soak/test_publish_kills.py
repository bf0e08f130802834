"""A publisher that is killed at random moments leaves no torn artifact, and takes no older one: `make soak N=200 SEED=1`.

Each round kills a process that publishes, with SIGKILL, after a random part of the time that publishing takes. Whoever looks
then sees whole artifacts only, every older version is as it was, and publishing again brings what the killed one wanted. On a
local store, and on blobs with versions. Ten rounds run in `make test`.
"""

import os
import random
import signal
import subprocess
import sys
import time

import azurite
import pytest
from store_stand import contents, fill, put, standing

ROUNDS, SEED = int(os.environ.get("N", "10")), int(os.environ.get("SEED", "1"))
FILES, BYTES = 12, 300_000
PUBLISH = """
import sys
from pathlib import Path
from tasks.storage import open_named
from tasks.storage.manifest import Provenance
store = open_named(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
store.publish(Path(sys.argv[3]), kind="dataset", inputs=(), provenance=Provenance(name="corpus"))
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with azurite.running(tmp_path_factory.mktemp("azurite")) as running:
        yield running


@pytest.mark.parametrize("rounds", [pytest.param(10, id="ten"), pytest.param(ROUNDS, id="all", marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["local", "versions"])
def test_a_killed_publisher_leaves_nothing_torn_and_nothing_lost(kind, rounds, request, tmp_path):
    dice = random.Random(f"{SEED}-{kind}")
    with standing(kind, tmp_path / "home", lambda: request.getfixturevalue("service")) as stand:
        source = fill(tmp_path / "source", **{f"f{n}.bin": dice.randbytes(BYTES) for n in range(FILES)})
        store = stand.open()
        whole = {put(store, source).version: contents(source)}
        usual, killed = min(time_of(stand, changed(source, dice), whole) for _ in range(3)), 0
        for number in range(rounds):
            changed(source, dice)
            killed += publish_and_kill(stand, source, dice.uniform(0, usual))
            assert_whole(stand, whole, f"round {number}")
            whole[put(stand.open(), source).version] = contents(source)
            assert_whole(stand, dict(list(whole.items())[-2:]), f"round {number}, published again")
            if len(whole) > 4:
                forget(stand, whole)
        print(
            f"\n{kind}: {killed} of {rounds} publishers died before they were done (it takes {usual:.2f} s)",
            file=sys.stderr,
        )
        assert killed >= rounds // 4


def changed(source, dice):
    """Some files change, some stay: the next version is to refer to those."""
    for number in dice.sample(range(FILES), dice.randrange(1, 6)):
        (source / f"f{number}.bin").write_bytes(dice.randbytes(BYTES))
    return source


def start(stand, source):
    """A process that is about to publish."""
    words = [sys.executable, "-c", PUBLISH, str(stand.home), "cloud" if stand.is_blob else "local", str(source)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def time_of(stand, source, whole):
    """Seconds that publishing takes when nobody kills it."""
    process = start(stand, source)
    began = time.monotonic()
    said, _ = process.communicate("\n", timeout=60)
    took = time.monotonic() - began
    assert said == "done\n"
    whole[next(stand.open().manifests("dataset", "corpus")).version] = contents(source)
    return took


def publish_and_kill(stand, source, after):
    """Whether the process died before it was done."""
    process = start(stand, source)
    process.stdin.write("\n")
    process.stdin.flush()
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=30)
    return said == ""


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
