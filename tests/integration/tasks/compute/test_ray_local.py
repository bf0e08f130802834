"""A Ray cluster of this machine's own: started once, found again, closed to others, and gone when it is stopped."""

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from ray_stand import using
from waiting import limit, until

from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.ray.local import living_cluster, spec, start_local_cluster, stop_local_cluster
from tasks.config.cluster import ClusterConfig

pytestmark = pytest.mark.unit

STARTER = """
import sys
from pathlib import Path
from tasks.compute.ray.local import start_local_cluster
print(start_local_cluster(Path(sys.argv[1])).address)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    yield tmp_path
    stop_local_cluster(tmp_path)


@pytest.mark.long
def test_two_who_need_a_cluster_get_one_and_jobs_end_with_it(home):
    """It is found again by later processes; a job that runs when it is stopped is lost, with words; no process is left."""
    assert living_cluster(home) is None and not stop_local_cluster(home)
    argv = [sys.executable, "-c", STARTER, str(home)]
    starters = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {starter.communicate(timeout=limit(180))[0].strip() for starter in starters}
    cluster = living_cluster(home)
    assert said == {cluster.address} and start_local_cluster(home) == cluster
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{cluster.address}/api/jobs/", timeout=limit(10))

    backend = open_backend(ClusterConfig(backend="ray", ray={"strategy": "PACK"}))
    work = Job(name="t", token="e" * 32, program=str(home / "sleep.py"), module=False, settings={}, inputs={})
    (home / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    assert backend.find(work, home / "job") is None
    handle = backend.submit(work, home / "job")
    assert backend.find(work, home / "job") == handle
    until(lambda: backend.states([(handle, home / "job")])[0].state == "running")
    until(lambda: (home / "job" / "nodes" / "0" / "node.json").exists())
    assert stop_local_cluster(home)
    state = backend.states([(handle, home / "job")])[0]
    assert state.over and state.code != 0
    assert state.state == "ended" or "jobs end with their cluster" in state.reason
    assert backend.find(work, home / "job") is None
    backend.cancel(handle, home / "job")
    until(lambda: not using(home), timeout=60)


def test_a_home_with_a_long_path_has_its_sockets_elsewhere(tmp_path):
    """A socket's path has 107 letters at most, and Ray needs 66 of them; the folder is this user's alone."""
    told = spec(tmp_path / ("x" * 60) / "ray", dict.fromkeys(("gcs", "client", "dashboard", "agent"), 1))
    short = Path(told.argv[told.argv.index("--temp-dir") + 1])
    try:
        assert str(short).startswith("/tmp/headway-ray-") and len(str(short)) < 38
        assert short.stat().st_mode & 0o77 == 0
    finally:
        short.rmdir()
