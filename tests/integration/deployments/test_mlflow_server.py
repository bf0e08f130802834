"""The local MLflow server: asks for the platform's login, shows what publishers write beside it, comes back when it is killed."""

import base64
import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import mlflow
import psutil
import pytest
from support import python_path
from waiting import limit

from deployments.services import mlflow_server
from deployments.services.prefect_server import password
from tasks.common import process
from tasks.lineage.spool import Spool

ROOT = Path(__file__).parents[3]
SEARCH = "/api/2.0/mlflow/experiments/search?max_results=10"
WRITER = """# fork: commands
import sys
from pathlib import Path
from tasks.lineage.spool import Spool
home, number = Path(sys.argv[1]), sys.argv[2]
spool = Spool(home, sys.argv[3], experiment="load")
flow = spool.start_run(f"flow {number}", tags={"n": number}, params={"n": number})
for step in range(150):
    spool.log_metrics(flow, [(f"m{k}", float(step), step) for k in range(4)])
spool.end_run(flow, "FINISHED", tags={})
spool.close()
print(spool.folder, flow)
"""


def get(server, path="/", login="", **headers):
    """Status and body of an answer."""
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server["url"] + path, headers=headers), timeout=limit(30)
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("served") / "home"


@pytest.fixture(scope="module")
def server(home):
    started = mlflow_server.start(home)
    try:
        mlflow_server.wait(started)
        yield started
    finally:
        mlflow_server.down(home)


def tracking(home):
    return f"sqlite:///{home}/mlflow/mlflow.db"


def test_nobody_comes_in_without_the_login(home, server):
    for path in ("/", SEARCH, "/ajax-api/2.0/mlflow/experiments/search", "/metrics", "/get-artifact?path=x&run_uuid=1"):
        assert get(server, path)[0] == 401, path
        assert get(server, path, "headway:wrong")[0] == 401, path
    assert get(server, SEARCH, password(home))[0] == 200
    status, page = get(server, "/", password(home))
    assert status == 200 and b"<title>MLflow</title>" in page


def test_other_hosts_and_other_pages_are_kept_out(home, server):
    assert get(server, "/", password(home), Host="evil.example")[0] == 403
    address = f"{server['url']}/api/2.0/mlflow/experiments/create"
    login = base64.b64encode(password(home).encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Origin": "http://evil.example", "Content-Type": "application/json"}
    request = urllib.request.Request(address, data=b'{"name": "evil"}', headers=headers)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request, timeout=limit(30))


def test_it_listens_on_loopback_only(server):
    listening = {one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert [ip for ip, port in listening if port == server["port"]] == ["127.0.0.1"]


def test_its_secrets_are_for_their_owner_only(home, server):
    folder = home / "platform" / "mlflow"
    for path in (folder / "secret", folder / "process.json", home / "mlflow" / "auth.db"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    word = password(home).partition(":")[2]
    assert all(word not in path.read_text(errors="replace") for path in folder.iterdir() if path.is_file())


def test_it_is_adopted_keeps_its_port_after_down_and_takes_credentials_made_anew_from_the_next_start_on(home, server):
    assert mlflow_server.start(home) == server
    assert mlflow_server.status(home) == server
    assert mlflow_server.down(home) and not mlflow_server.down(home) and mlflow_server.status(home) is None
    old = password(home)
    (home / "prefect" / "credentials").unlink()
    again = mlflow_server.start(home)
    mlflow_server.wait(again)
    assert again["port"] == server["port"]
    assert get(again, SEARCH, password(home))[0] == 200 and get(again, SEARCH, old)[0] == 401


def test_a_server_that_is_killed_comes_back(home, server):
    handle = process.read_json(home / "platform" / "mlflow" / "handle.json")
    (child,) = process.descendants(handle["pid"])
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + limit(120)
    while child in (now := process.descendants(handle["pid"])) or not now:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    mlflow_server.wait(server)
    assert get(server, SEARCH, password(home))[0] == 200


def test_publishers_and_the_server_on_one_file_lose_nothing(home, server):
    """Two publishers write while the server reads: every run and every point is there, and the server shows them."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(home), str(number), tracking(home)],
            env={**os.environ, "PYTHONPATH": python_path(ROOT)}, stdout=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    told = [writer.communicate(timeout=limit(60))[0].split() for writer in writers]
    deadline = time.monotonic() + limit(240)
    while not all((Path(folder) / "done").exists() for folder, _ in told):
        assert time.monotonic() < deadline
        get(server, SEARCH, password(home))
        time.sleep(0.2)
    client = mlflow.MlflowClient(tracking(home))
    for folder, flow in told:
        assert not (Path(folder) / "refused.jsonl").exists()
        run = process.read_json(Path(folder) / "published.json")["runs"][flow]["id"]
        assert client.get_run(run).info.status == "FINISHED"
        for name in ("m0", "m3"):
            assert [point.step for point in client.get_metric_history(run, name)] == list(range(150))
        status, said = get(server, f"/api/2.0/mlflow/runs/get?run_id={run}", password(home))
        assert status == 200 and json.loads(said)["run"]["info"]["status"] == "FINISHED"


def test_an_attached_file_is_shown_by_the_server(home, server, tmp_path):
    report = tmp_path / "report.html"
    report.write_text("<p>done</p>")
    spool = Spool(home, tracking(home), experiment="files")
    flow = spool.start_run("flow", tags={}, params={})
    spool.log_file(flow, report)
    spool.end_run(flow, "FINISHED", tags={})
    spool.close()
    run = spool.published(timeout=limit(60))[flow]["id"]
    assert get(server, f"/get-artifact?path=report.html&run_uuid={run}", password(home)) == (200, b"<p>done</p>")
    assert get(server, f"/get-artifact?path=../../mlflow.db&run_uuid={run}", password(home))[0] == 400
