"""A job needs no route back: it trains on a machine that reaches neither Prefect nor MLflow, and no metric is missing there."""

import json
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import pytest
from ssh_stand import ssh_stand
from support import HEADWAY, publish_tiny
from waiting import limit

from deployments.services import mlflow_server
from deployments.services.prefect_server import password, status

STEPS = 40
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
except OSError:
    sys.exit(1)
"""


@pytest.fixture
def machine(tmp_path):
    """One machine whose only link is the one that SSH uses, and the file that names it."""
    with ssh_stand(tmp_path / "ssh", count=1) as stand:
        (tmp_path / "hosts").write_text(stand.machines[0].host + "\n")
        yield stand, tmp_path / "hosts"


@pytest.fixture
def tracking(tmp_path):
    """A tracking server on this machine's loopback, and the environment that names it."""
    home = tmp_path / "elsewhere"
    server = mlflow_server.start(home)
    mlflow_server.wait(server)
    user, _, word = password(home).partition(":")
    yield {"MLFLOW_TRACKING_URI": server["url"], "MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": word}
    mlflow_server.down(home)


def reaches(url, *prefix, host=None):
    said = urlsplit(url)
    words = [*prefix, "python3", "-c", CONNECT, host or said.hostname, str(said.port)]
    return subprocess.run(words, check=False, timeout=limit(30)).returncode == 0


@pytest.mark.long
def test_metrics_are_complete_without_a_route_to_prefect_and_mlflow(home, machine, tracking, monkeypatch):
    stand, hosts = machine
    publish_tiny(home)
    (there,) = stand.machines
    inside = ("ip", "netns", "exec", there.name)
    assert "default" not in there.inside("ip", "route").stdout

    before = set(home.path.glob("jobs/train-*"))
    ssh = {"hosts_file": hosts, "key": stand.key, "known_hosts": stand.known_hosts}
    cluster = {"name": "away", "backend": "ssh", "ranks_per_node": 1}
    settings = {f"cluster.{key}": value for key, value in cluster.items()}
    settings |= {f"cluster.ssh.{key}": value for key, value in ssh.items()}
    settings |= {"training.steps": STEPS, "training.seed": 4711}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = subprocess.Popen(
        [str(HEADWAY), "retrain", "-c", "tiny", *words, "--to", "train"],
        env=home.environment() | tracking, cwd=home.path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    rank = _first_rank(home, before, command)
    assert (
        str(Path(f"/proc/{rank['pid']}/ns/net").readlink())
        == there.inside("readlink", "/proc/self/ns/net").stdout.strip()
    )
    for url in (status(home.path)["url"], tracking["MLFLOW_TRACKING_URI"]):
        assert reaches(url)
        assert not reaches(url, *inside)
        assert not reaches(url, *inside, host=stand.here)
    _, err = command.communicate(timeout=limit(280))
    assert command.returncode == 0, err

    for name, value in tracking.items():
        monkeypatch.setenv(name, value)
    client = mlflow.MlflowClient(tracking["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (train,) = [run for run in runs if run.info.run_name == "train"]
    losses = client.get_metric_history(train.info.run_id, "loss")
    assert sorted({point.step for point in losses}) == list(range(1, STEPS + 1))
    assert train.info.status == "FINISHED"


def _first_rank(home, before, command):
    """What rank 0 says of itself, once it is there."""
    deadline = time.monotonic() + limit(200)
    while True:
        for path in home.path.glob("jobs/train-*/ranks/0.json"):
            if path.parents[1] not in before:
                return json.loads(path.read_text())
        assert time.monotonic() < deadline and command.poll() is None, command.communicate()
        time.sleep(0.05)
