"""Claims on a real Azurite: one holder at a time, fenced by the service, and had again after an absence that was everybody's."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import azurite
import pytest
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT
from waiting import limit, until

from tasks.common.errors import Superseded
from tasks.storage.blob import claims
from tasks.storage.blob.claims import LEASE_SECONDS, BlobClaims
from tasks.storage.blob.client import open_container
from tasks.storage.settings import StoreConfig

ROOT = Path(__file__).parents[4]
SECRET = "HEADWAY_TEST_CONNECTION"
OUT = LEASE_SECONDS + 2.0
HOLDER = """
import sys, time
from tasks.common.errors import Superseded
from tasks.storage.blob.claims import BlobClaims
from tasks.storage.blob.client import open_container
from tasks.storage.settings import StoreConfig
claim = BlobClaims(open_container(StoreConfig.model_validate_json(sys.argv[1]))).take("jobs/held")
print("mine", flush=True)
while not claim.lost:
    time.sleep(0.1)
try:
    claim.require()
except Superseded as lost:
    print("lost", lost, flush=True)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    with (
        azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as blobs,
        pytest.MonkeyPatch.context() as variables,
    ):
        variables.setenv(SECRET, blobs.connection_string)
        BlobServiceClient.from_connection_string(blobs.connection_string).create_container("jobs")
        yield StoreConfig(uri=f"az://{ACCOUNT}/jobs/team", credential="connection_string", secret=f"env:{SECRET}")


@pytest.fixture
def given(config):
    return BlobClaims(open_container(config))


def test_of_many_that_want_it_one_gets_it_and_the_next_one_when_it_is_given_back(given):
    with ThreadPoolExecutor(8) as pool:
        got = [one for one in pool.map(lambda _: given.take("jobs/wanted"), range(8)) if one]
    assert len(got) == 1 and given.held("jobs/wanted") and not given.held("jobs/other")
    got[0].require()
    got[0].give_back()
    assert not given.held("jobs/wanted")
    after = given.take("jobs/wanted")
    assert after.before == {}, "it was given back in order"
    after.give_back()


@pytest.mark.long
def test_a_lease_that_ran_out_is_had_again_unless_somebody_had_it_meanwhile(given, monkeypatch):
    """The thread that renews stands still here; what counts is the word of the service."""
    monkeypatch.setattr(claims, "RENEW_SECONDS", 3600.0)
    first = given.take("jobs/out")
    time.sleep(OUT)
    assert not given.held("jobs/out")
    first.require()
    assert given.held("jobs/out"), "nobody had it"
    time.sleep(OUT)
    second = given.take("jobs/out")
    assert second.before["pid"] == os.getpid(), "it was not given back"
    with pytest.raises(Superseded, match="is another's now"):
        first.require()
    second.give_back()
    with pytest.raises(Superseded):
        first.require()
    third = given.take("jobs/out")
    time.sleep(OUT)
    given.take("jobs/out").give_back()
    with pytest.raises(Superseded):  # it is free, and was another's: what happened then is not known
        third.require()


@pytest.mark.long
def test_a_process_that_is_stopped_loses_it_and_learns_so_when_it_wakes_up(config, given):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, config.model_dump_json()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "mine\n"
        time.sleep(OUT)
        assert given.held("jobs/held") and given.take("jobs/held") is None, "while it runs it renews"
        holder.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        taken = until(lambda: given.take("jobs/held"), 60, every=0.5)
        assert time.monotonic() - began >= LEASE_SECONDS - claims.RENEW_SECONDS - 1
        assert taken.before["pid"] == holder.pid
        holder.send_signal(signal.SIGCONT)
        assert holder.stdout.readline().startswith("lost")
        taken.require()
        taken.give_back()
    finally:
        holder.kill()
        holder.wait(limit(30))
