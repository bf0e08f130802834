"""What compose.yaml starts, started for real: its commands, environments and health checks, without a container engine."""

import base64
import email.utils
import hashlib
import hmac
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

import azurite as installer
import pytest
from containers import ROOT, compose
from stand import launch
from waiting import limit

LOG_A_RUN = """
import mlflow, pathlib, sys
mlflow.set_experiment("images")
with mlflow.start_run(run_name="first") as run:
    mlflow.log_metric("loss", 1.5)
    mlflow.log_text("hello", "note.txt")
client = mlflow.MlflowClient()
print(client.download_artifacts(run.info.run_id, "note.txt", sys.argv[1]))
"""


def ask(url, *, login="", data=None, **headers):
    """Status and body of a request."""
    told = {key.replace("_", "-"): value for key, value in headers.items()}
    if login:
        told["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    request = urllib.request.Request(url, data=data, headers=told)
    try:
        with urllib.request.urlopen(request, timeout=limit(20)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def sql(database, user, password, query):
    """Rows of a query in the database of a user, as text."""
    argv = ["psql", "--no-psqlrc", "-At", "-U", user, "-d", user, "-c", query]
    env = {**database, "PGPASSWORD": password}
    said = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=limit(30))
    return said.stdout.split() if said.returncode == 0 else said.stderr


def login_of(stand, service):
    told = stand.services[service]["environment"]
    if service == "prefect":
        return told["PREFECT_SERVER_API_AUTH_STRING"]
    return f"{told['MLFLOW_AUTH_ADMIN_USERNAME']}:{told['MLFLOW_AUTH_ADMIN_PASSWORD']}"


@pytest.mark.long
def test_prefect_stands_on_postgresql_and_asks_for_the_login(stand, servers, database):
    url = f"http://127.0.0.1:{stand.ports['prefect:4200']}"
    assert ask(f"{url}/api/flows/filter", data=b"{}", Content_Type="application/json")[0] == 401
    assert ask(f"{url}/api/flows/filter", login="headway:wrong", data=b"{}")[0] == 401
    login = login_of(stand, "prefect")
    new = json.dumps({"name": "made-by-the-test"}).encode()
    assert ask(f"{url}/api/flows/", login=login, data=new, Content_Type="application/json")[0] == 201
    password = stand.services["prefect"]["environment"]["PGPASSWORD"]
    assert sql(database, "prefect", password, "SELECT name FROM flow") == ["made-by-the-test"]


@pytest.mark.long
def test_the_page_of_prefect_calls_the_published_address_and_lies_where_the_image_may_write(stand, servers):
    url = f"http://127.0.0.1:{stand.ports['prefect:4200']}"
    assert json.loads(ask(f"{url}/ui-settings")[1])["api_url"] == f"{url}/api"
    assert "<title>" in ask(url)[1]
    assert [*(stand.folder / "prefect" / "tmp" / "prefect-ui").rglob("index.html")]


@pytest.mark.long
def test_mlflow_stands_on_postgresql_asks_for_the_login_and_takes_a_run(stand, servers, database, tmp_path):
    url = f"http://127.0.0.1:{stand.ports['mlflow:5000']}"
    told = stand.services["mlflow"]["environment"]
    search = f"{url}/api/2.0/mlflow/experiments/search?max_results=5"
    assert ask(search)[0] == 401
    assert ask(search, login="headway:wrong")[0] == 401
    assert ask(search, login=login_of(stand, "mlflow"))[0] == 200
    python = stand.environments["mlflow"] / "python"
    client = {"MLFLOW_TRACKING_URI": url, "MLFLOW_TRACKING_USERNAME": "headway", "MLFLOW_DISABLE_TELEMETRY": "true"}
    client |= {"MLFLOW_TRACKING_PASSWORD": told["MLFLOW_AUTH_ADMIN_PASSWORD"], "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        [python, "-c", LOG_A_RUN, tmp_path],
        env=client,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    assert said.returncode == 0, said.stderr
    assert (tmp_path / "note.txt").read_text() == "hello"
    assert sql(database, "mlflow", told["PGPASSWORD"], "SELECT value FROM metrics") == ["1.5"]
    assert sql(database, "mlflow", told["PGPASSWORD"], "SELECT username FROM users") == ["headway"]
    assert [*(stand.folder / "mlflow" / "var/lib/headway/artifacts").rglob("note.txt")]


@pytest.mark.long
def test_mlflow_answers_only_to_the_names_that_it_is_reached_by(stand, servers):
    url = f"http://127.0.0.1:{stand.ports['mlflow:5000']}/api/2.0/mlflow/experiments/search?max_results=5"
    assert ask(url, login=login_of(stand, "mlflow"), Host="evil.example")[0] == 403
    assert ask(url, login=login_of(stand, "mlflow"), data=b"{}", Origin="http://evil.example")[0] == 403


@pytest.mark.long
def test_each_user_of_the_databases_sees_only_its_own(stand, database):
    told = {name: stand.services[name]["environment"]["PGPASSWORD"] for name in ("prefect", "mlflow")}
    for user, other in (("prefect", "mlflow"), ("mlflow", "prefect")):
        argv = ["psql", "--no-psqlrc", "-At", "-U", user, "-d", other, "-c", "SELECT 1"]
        said = subprocess.run(
            argv, env={**database, "PGPASSWORD": told[user]}, capture_output=True, text=True, timeout=limit(30)
        )
        assert said.returncode != 0 and "permission denied" in said.stderr
        assert "password authentication failed" in sql(database, user, told[other], "SELECT 1")


@pytest.mark.long
def test_a_password_stands_in_no_list_of_processes(stand, servers):
    secrets = dict(line.split("=", 1) for line in (stand.folder / "env").read_text().splitlines())
    said = subprocess.run(["ps", "-e", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert "prefect.server.api.server:create_app" in said
    assert [name for name, value in secrets.items() if value in said] == []


def azurite_programs(version):
    """npm's Azurite, which all tests share, of the version that compose.yaml names."""
    assert version == installer.VERSION
    if not installer.installed(installer.cache()):
        installer.install(installer.cache())
    return installer.cache() / "node_modules" / ".bin"


def busybox_nc(folder):
    """The image has busybox, whose nc the health check calls; where this machine has none, one that can do just that."""
    if shutil.which("nc"):
        return []
    folder.mkdir()
    (folder / "nc").write_text('#!/bin/bash\n[ "$1" = -z ] && exec 3<>"/dev/tcp/$2/$3"\n')
    (folder / "nc").chmod(0o755)
    return [folder]


@pytest.fixture(scope="module")
def azurite(stand):
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("Azurite needs node and npm, which are not installed")
    image = stand.services["azurite"]["image"]
    programs = azurite_programs(image.partition("@")[0].rpartition(":")[2])
    running = stand.start("azurite", path=[programs, *busybox_nc(stand.folder / "busybox")])
    try:
        yield running.wait(60)
    finally:
        running.stop()


def test_azurite_takes_blobs_from_who_has_the_key_and_from_nobody_else(stand, azurite):
    account, key = stand.services["azurite"]["environment"]["AZURITE_ACCOUNTS"].split(":")
    url = f"http://127.0.0.1:{stand.ports['azurite:10000']}/{account}"
    assert ask(f"{url}?comp=list")[0] == 403
    assert blob_request("PUT", f"{url}/images?restype=container", account, key)[0] == 201
    assert (
        blob_request("PUT", f"{url}/images?restype=container", account, base64.b64encode(b"wrong").decode())[0] == 403
    )
    assert blob_request("PUT", f"{url}/images/a.txt", account, key, b"hello")[0] == 201
    assert blob_request("GET", f"{url}/images/a.txt", account, key) == (200, b"hello")


def blob_request(method, url, account, key, body=b""):
    """A request signed with an account's key, as Azure's "Authorize with Shared Key" has it."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2026-06-06"}
    if body:
        headers |= {"x-ms-blob-type": "BlockBlob", "Content-Type": "text/plain"}
    place, _, query = url.partition("?")
    path = "/" + place.split("/", 3)[3]
    signed = [method, "", "", str(len(body) or ""), "", headers.get("Content-Type", ""), "", "", "", "", "", ""]
    signed += [f"{name}:{headers[name]}" for name in sorted(headers) if name.startswith("x-ms-")]
    signed += [f"/{account}{path}", *sorted(part.replace("=", ":") for part in query.split("&") if part)]
    code = hmac.new(base64.b64decode(key), "\n".join(signed).encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(code).decode()}"
    request = urllib.request.Request(url, data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=limit(20)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def workers(stand):
    """Status of each worker of our pool, as Prefect's server knows it."""
    url = f"http://127.0.0.1:{stand.ports['prefect:4200']}/api/work_pools/headway/workers/filter"
    status, said = ask(url, login=login_of(stand, "prefect"), data=b"{}", Content_Type="application/json")
    return [one["status"] for one in json.loads(said)] if status == 200 else []


@pytest.mark.long
def test_headway_up_registers_the_deployments_keeps_the_worker_and_stops_with_its_container(stand, servers):
    running = stand.start("headway")
    try:
        deadline = time.monotonic() + limit(200)
        while workers(stand) != ["ONLINE"] and running.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        assert workers(stand) == ["ONLINE"], running.log.read_text()
        running.wait(120)
        url = f"http://127.0.0.1:{stand.ports['prefect:4200']}/api/deployments/filter"
        said = ask(url, login=login_of(stand, "prefect"), data=b"{}", Content_Type="application/json")[1]
        assert {"tiny", "local"} <= {one["name"] for one in json.loads(said)}
        running.stop(60)
        assert not running.healthy(), "the worker or the watch outlived its container's program"
        home = stand.folder / "headway" / "var/lib/headway"
        assert (home / "platform").is_dir() and not (home / "prefect" / "prefect.db").exists()
    finally:
        stop_platform(stand)
        running.stop()


def stop_platform(stand):
    """What ends with its container: the parts that `headway up` supervises."""
    home = stand.folder / "headway" / "var/lib/headway"
    python = stand.environments["headway"] / "headway"
    subprocess.run(
        [python, "down"], env={"HEADWAY_HOME": str(home), "PATH": "/usr/bin:/bin"}, timeout=limit(90), check=False
    )


def test_compose_says_what_to_do_when_there_are_no_credentials(tmp_path):
    (tmp_path / "empty").touch()
    said = compose("config", "--quiet", env_file=tmp_path / "empty")
    assert said.returncode != 0 and "run docker/make-env.sh first" in said.stderr


def test_a_launched_program_inherits_nothing(tmp_path):
    running = launch("env", ["env"], env={"A": "1"}, path=[ROOT], folder=tmp_path / "in", check=["true"])
    running.process.wait(limit(10))
    said = dict(line.split("=", 1) for line in running.log.read_text().splitlines())
    assert said.keys() <= {"A", "PATH", "LANG", "PWD", "_", "SHLVL"}
