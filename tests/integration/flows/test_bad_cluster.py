"""One of four machines is bad: it is found, named, left out and drained, and training starts on the rest.

The machines are network namespaces under a real Slurm; what is bad about one is a link of 50 Mbit/s, or half a core.
"""

import pytest
from four_machines import four_machines
from support import publish_tiny


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with four_machines(tmp_path_factory.mktemp("four")) as (stand, path):
        yield stand, path


def drained(stand):
    """Names and reasons, as Slurm has them."""
    said = stand.command("sinfo", "-R", "--noheader", "-N", "--format=%N|%E|%T")
    return {name: reason for name, reason, state in (line.split("|") for line in said.splitlines()) if "drain" in state}


def ran_on(home, ran):
    job = ran.stage("train")["job"]["id"]
    return {path.read_text() for path in home.path.glob(f"jobs/{job}/nodes/*/name")}


@pytest.mark.long
def test_a_slow_link_is_drained_and_training_starts_on_the_rest(home, cluster):
    stand, path = cluster
    publish_tiny(home)
    stand.machines["n3"].slow("50mbit")
    try:
        ran = home.ok("retrain", "-c", "tiny", "-c", path, "--to", "train", "--dataset", "tiny")
    finally:
        stand.machines["n3"].restore()
    assert list(drained(stand)) == ["n3"]
    assert "headway" in drained(stand)["n3"]
    assert ran.statuses()["train"] == "ran"


@pytest.mark.long
def test_half_a_core_is_found_and_what_was_drained_comes_back(home, cluster):
    stand, path = cluster
    home.ok("qualify", "--resume", "n3", "--reason", "mended")
    assert drained(stand) == {}
    with stand.machines["n2"].throttled("tasks.jobs.benchmark"):
        ran = home.ok("qualify", "-c", "tiny", "-c", path)
    assert {node["name"]: node["verdict"] for node in ran.said["nodes"]}["n2"] == "failed"
    assert list(drained(stand)) == ["n2"]
    home.ok("qualify", "--resume", "--reason", "mended")
    assert drained(stand) == {}
