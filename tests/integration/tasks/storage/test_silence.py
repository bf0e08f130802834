"""Who says nothing is not waited for: a stalled chunk is given up after 10 seconds, a dead endpoint is told after 30.

All cases wait at the same time, each at a proxy of its own before blobs with versions. Other faults are in test_faults.py.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from fault_proxy import FaultProxy, dead_endpoint
from store_stand import SECRET, contents, fill, put, standing
from waiting import limit

from tasks.common.errors import Missing
from tasks.storage import open_named

BUSY = 2.0
"""Of a machine that the whole suite runs on: a promise kept on a quiet one is kept within twice the time there."""
DEAD, STALLED = 30.0 * BUSY, 10.0 * BUSY
SMALL, LARGE = 50_000, 20_000_000
UPLOADS = [(direction, size) for direction in ("up", "down") for size in (SMALL, LARGE)]


@pytest.fixture
def stands(azurite, tmp_path):
    """Makes stores behind proxies, each with a home and a container of its own."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(standing("proxy", tmp_path / f"home{time.monotonic_ns()}", lambda: azurite))


def together(cases):
    """Run all at once; the first error of any is raised."""
    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(case) for case in cases]:
            done.result(limit(120))


def source_of(tmp_path, size):
    return fill(tmp_path / f"source{size}", **{"big.bin": random.Random(size).randbytes(size)})


def test_a_stalled_chunk_is_given_up_and_sent_or_asked_for_again(stands, tmp_path):
    together(
        [
            *[uploading(stands(), tmp_path, *case) for case in UPLOADS],
            *[downloading(stands(), tmp_path, s) for s in (SMALL, LARGE)],
        ]
    )


def uploading(stand, tmp_path, direction, size):
    store, source = stand.open(), source_of(tmp_path, size)
    fault = stand.relay.arm("stall", direction, method="PUT", contains="big.bin", nth=1 if size == SMALL else 2)

    def case():
        manifest = put(store, source)
        assert fault.fired == 1 and fault.again <= limit(STALLED), (direction, size)
        assert contents(store.fetch(manifest)) == contents(source)

    return case


def downloading(stand, tmp_path, size):
    store, source = stand.open(), source_of(tmp_path, size)
    manifest = put(store, source)
    fault = stand.relay.arm("stall", method="GET", contains="big.bin", nth=1 if size == SMALL else 2)

    def case():
        assert contents(store.fetch(manifest)) == contents(source)
        assert fault.fired == 1 and fault.again <= limit(STALLED), size

    return case


def test_a_dead_endpoint_is_said_in_time(stands, tmp_path):
    """Where nobody listens, and where somebody takes what is sent and never answers."""
    stand, source = stands(), source_of(tmp_path, SMALL)
    manifest = put(stand.open(), source)
    asks = {
        "list": lambda store: store.list("audit"),
        "read": lambda store: store.read("audit/1"),
        "create": lambda store: store.create("audit/1", b""),
        "fetch": lambda store: store.fetch(manifest),
        "publish": lambda store: put(store, source),
        "manifest": lambda store: store.manifest("dataset", "corpus", manifest.version),
    }
    with FaultProxy(stand.endpoint).running() as silent:
        silent.arm("stall", "up", times=10**6)
        dead = at(dead_endpoint(), stand, tmp_path / "dead")
        mute = at(silent.endpoint, stand, tmp_path / "mute")
        together([refusing(store, name, ask) for store in (dead, mute) for name, ask in asks.items()])


def at(endpoint, stand, home):
    """The same store at another address, from a home of its own: who fetches into one waits for who does so already."""
    home.mkdir()
    (home / "stores.yaml").write_bytes((stand.home / "stores.yaml").read_bytes())
    os.environ[SECRET] = endpoint.connection_string
    return open_named(home, "cloud")


def refusing(store, name, ask):
    def case():
        began = time.monotonic()
        with pytest.raises(Missing) as refused:
            ask(store)
        took = time.monotonic() - began
        assert took <= limit(DEAD), f"{name} after {took:.1f} s: {refused.value.message}"
        assert refused.value.remedy and len(refused.value.message) < 600

    return case
