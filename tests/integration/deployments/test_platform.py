"""The platform as people use it: up, a login on everything, what dies comes back, down leaves nothing."""

import base64
import json
import os
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from support import Home, publish_tiny
from waiting import limit

from deployments.catalogue.flows import POOL
from deployments.configuration.platform import PlatformConfig
from deployments.services import prefect_server
from deployments.services.parts import PARTS, bridge
from tasks.common import process

SLOW = ("--set", "training.steps=1000", "--set", "training.warmup_steps=5")


class Platform:
    """A home with its platform up."""

    def __init__(self, home):
        self.home = home

    def up(self, *words):
        return self.home.ok("up", "--detach", *words).said

    def state(self):
        return self.home.ok("status").said

    def api(self, path, body=None, method=None):
        server = json.loads((self.home.path / "prefect" / "server.json").read_text())
        return call(server["url"] + "/api" + path, self.login(), body, method)

    def login(self):
        return (self.home.path / "prefect" / "credentials").read_text()

    def run(self, deployment, *words):
        return self.home.ok("run", deployment, *words).said["flow_run"]["id"]

    def flow_run(self, identity):
        return self.api(f"/flow_runs/{identity}")

    def wait(self, identity, *names, timeout=180):
        def there():
            found = self.flow_run(identity)
            return found if found["state"]["name"] in names else None

        return until(there, timeout, lambda: self.flow_run(identity)["state"])

    def folder(self, identity):
        return self.home.path / "runs" / identity

    def events(self, identity, kind):
        path = self.folder(identity) / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def training(self, identity):
        """Whether the newest stage that began is the training."""
        return [event["stage"] for event in self.events(identity, "started")][-1:] == ["train"]

    def child(self, part):
        """The process that a part's supervising parent runs."""
        parent = json.loads((self.home.path / part / "handle.json").read_text())["pid"]
        return until(lambda: next(iter(psutil.Process(parent).children()), None), 30)

    def processes(self):
        """Every process that belongs to this home."""
        return [p.pid for p in psutil.process_iter() if str(self.home.path) in words_of(p)]


def words_of(process):
    try:
        return " ".join([*process.cmdline(), process.environ().get("HEADWAY_HOME", "")])
    except psutil.Error:
        return ""


def call(url, login="", body=None, method=None):
    headers = {"Content-Type": "application/json"}
    if login:
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=limit(20)) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def until(look, timeout, otherwise=lambda: "it did not happen", *, every=0.2):
    deadline = time.monotonic() + limit(timeout)
    while time.monotonic() < deadline:
        try:
            found = look()
        except (urllib.error.URLError, ConnectionError, TimeoutError, psutil.Error):
            found = None
        if found:
            return found
        time.sleep(every)
    raise AssertionError(otherwise())


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("platform") / "home")
    publish_tiny(home)
    made = Platform(home)
    made.first = subprocess.run(
        [*home.command("up", "--detach")], env=home.environment(), cwd=home.path.parent, capture_output=True, text=True
    )
    assert made.first.returncode == 0, made.first.stderr
    yield made
    home.run("down", "--yes", "--endpoints")
    assert made.processes() == []


def test_the_login_is_shown_once_and_asked_for_everywhere(platform):
    password = platform.login().partition(":")[2]
    assert password in platform.first.stdout
    again = subprocess.run(
        platform.home.command("up", "--detach"), env=platform.home.environment(), capture_output=True
    )
    assert again.returncode == 0 and password.encode() not in again.stdout
    kept = str(platform.home.path / "prefect" / "credentials")
    assert kept in platform.first.stdout and kept.encode() in again.stdout
    assert "/#/experiments?workflowType=machine_learning" in platform.first.stdout
    state = platform.state()
    for url in (f"{state['prefect']}/api/flows/count", f"{state['mlflow']}/api/2.0/mlflow/experiments/search"):
        assert refusal(url) == 401, url
        assert refusal(url, "headway:wrong") == 401, url
    assert (platform.home.path / "prefect" / "credentials").stat().st_mode & 0o077 == 0


def refusal(url, login=""):
    try:
        call(url, login, {"max_results": 1})
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_the_address_without_a_path_is_of_the_page_that_links_to_runs_lead_to(platform):
    """Prefect 3.8 has two pages: `/runs/...` is of the first, `/v2/runs/...` of the second."""
    server = platform.state()["prefect"]
    assert call(f"{server}/ui-settings")["default_ui"] == "v1"
    for path in ("", "/runs/flow-run/1"):
        asked = urllib.request.Request(server + path, headers={"Accept": "text/html"})
        with urllib.request.urlopen(asked, timeout=limit(20)) as answer:
            assert answer.url.rstrip("/") == server + path and b"/v2/" not in answer.read()


def test_the_types_of_blocks_can_be_made_in_the_page(platform):
    types = {one["slug"] for one in platform.api("/block_types/filter", {})}
    assert types >= {"headway-cluster", "headway-store", "headway-credentials"}


def test_everything_listens_on_loopback_only(platform):
    pids = set(platform.processes())
    listening = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid in pids}
    assert listening == {"127.0.0.1"}


@pytest.mark.long
def test_up_again_adopts_what_lives(platform):
    before = {part["name"]: part["pid"] for part in platform.state()["parts"]}
    commands = [platform.home.start("up", "--detach", "--json") for _ in range(2)]  # both at once
    assert [command.wait(limit(90)) for command in commands] == [0, 0]
    assert {part["name"]: part["pid"] for part in platform.state()["parts"]} == before


def test_the_pages_deployments_are_those_of_the_catalogue(platform):
    wanted = {one["full_name"]: one for one in platform.home.ok("deployments").said["deployments"]}
    found = {one["name"]: one for one in platform.api("/deployments/filter", {})}
    assert {"retrain/tiny", "revalidate/tiny", "qualify/tiny"} <= wanted.keys()
    for name, one in wanted.items():
        there = platform.api(f"/deployments/name/{name}")
        assert (there["parameters"], there["entrypoint"]) == (one["parameters"], f"flows.{one['flow']}.{one['flow']}")
    assert len(platform.api("/deployments/filter", {})) == len(wanted) and found


@pytest.mark.long
def test_prefect_deploy_makes_the_same_of_the_rendered_file(platform, tmp_path):
    told = ("parameters", "entrypoint", "tags", "description", "concurrency_options", "pull_steps", "work_pool_name")
    names = [one["full_name"] for one in platform.home.ok("deployments").said["deployments"]]
    before = {name: platform.api(f"/deployments/name/{name}") for name in names}
    ran = subprocess.run(
        platform.home.command("deployments", "--prefect-yaml"), env=platform.home.environment(), capture_output=True
    )
    (tmp_path / "prefect.yaml").write_bytes(ran.stdout)
    server = platform.state()["prefect"]
    environment = {
        **platform.home.environment(),
        "PREFECT_API_URL": f"{server}/api",
        "PREFECT_API_AUTH_STRING": platform.login(),
        "PREFECT_HOME": str(tmp_path / "profile"),
        "DO_NOT_TRACK": "1",
    }
    command = [str(Path(os.sys.executable).parent / "prefect"), "--no-prompt", "deploy", "--all"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit(180))
    assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        after = platform.api(f"/deployments/name/{name}")
        assert {key: after[key] for key in told} == {key: before[name][key] for key in told}, name
        schemas = [
            {key: part for key, part in each["parameter_openapi_schema"].items() if part or key != "definitions"}
            for each in (after, before[name])
        ]
        assert schemas[0] == schemas[1], name


def test_a_run_that_cannot_be_noted_in_the_audit_log_does_not_start(platform):
    """It started all the same, so a repetition of the failed command started two."""
    log = platform.home.path / "store" / "documents" / "audit"
    before = platform.api("/flow_runs/count", {})
    log.rename(log.with_name("aside"))
    log.write_text("as if nothing could be written here")
    try:
        ran = platform.home.run("run", "qualify/tiny")
    finally:
        log.unlink()
        log.with_name("aside").rename(log)
    assert ran.code and not ran.said.get("flow_run")
    assert platform.api("/flow_runs/count", {}) == before


@pytest.mark.long
def test_one_key_is_one_flow_run(platform):
    said = [platform.home.ok("run", "qualify/tiny", "--key", "once").said for _ in range(2)]
    assert said[0]["flow_run"]["id"] == said[1]["flow_run"]["id"]
    assert [one["new"] for one in said] == [True, False]
    platform.wait(said[0]["flow_run"]["id"], "Completed")


@pytest.mark.long
def test_killed_servers_worker_and_flow_process_in_one_run(platform):
    """kill -9 of each, one after the other, while the network trains: the run ends right, and nothing is done twice."""
    identity = platform.run("retrain/tiny", *SLOW, "--set", "training.seed=77")
    for part in ("prefect", "platform/mlflow", "platform/worker", "platform/watch"):
        until(lambda: platform.training(identity), 120)
        victim = platform.child(part)
        victim.kill()
        until(lambda part=part, victim=victim: platform.child(part).pid != victim.pid, 60)
    flow = json.loads((platform.folder(identity) / "handle.json").read_text())["pid"]
    os.kill(flow, signal.SIGKILL)
    found = platform.wait(identity, "Completed", timeout=240)
    assert found["run_count"] >= 2
    train = [e["outcome"] for e in platform.events(identity, "ended") if e["outcome"]["name"] == "train"][-1]
    assert (train["job"]["submissions"], train["job"]["adopted"]) == (1, True)
    ran = [e["outcome"]["name"] for e in platform.events(identity, "ended") if e["outcome"]["status"] == "ran"]
    assert len(ran) == len(set(ran)), "a stage was computed twice"
    again = platform.run("retrain/tiny", *SLOW, "--set", "training.seed=77")
    platform.wait(again, "Completed")  # the slot is free


@pytest.mark.long
def test_down_leaves_no_process_and_up_has_all_history(platform):
    before = platform.api("/flow_runs/count", {})
    runs = len(platform.state()["runs"])
    platform.home.ok("down", "--yes", "--endpoints")
    assert platform.processes() == []
    address = platform.up()["prefect"]
    assert platform.api("/flow_runs/count", {}) == before and len(platform.state()["runs"]) == runs
    assert address == platform.state()["prefect"]


@pytest.mark.long
def test_down_asks_before_it_stops_work_and_up_resumes_it(platform):
    identity = platform.run("retrain/tiny", *SLOW, "--set", "training.seed=78")
    until(lambda: platform.training(identity), 120)
    asked = platform.home.run("down")
    assert asked.code == 2 and "retrain of tiny" in asked.said["error"]["message"]
    platform.home.ok("down", "--yes", "--endpoints")
    assert platform.processes() == []
    platform.up()
    assert platform.wait(identity, "Completed", timeout=240)["run_count"] >= 2


@pytest.mark.long
def test_the_foreground_up_may_die_and_an_interrupt_stops_everything(platform):
    command = platform.home.start("up")
    assert "Headway is up" in until(lambda: command.stdout.readline() + command.stdout.readline(), 90)
    pids = {part["name"]: part["pid"] for part in platform.state()["parts"]}
    command.kill()
    command.wait()
    assert {part["name"]: part["pid"] for part in platform.state()["parts"]} == pids
    command = platform.home.start("up")
    assert "Headway is up" in until(lambda: command.stdout.readline() + command.stdout.readline(), 90)
    command.terminate()  # as Ctrl-C, which a test in the background would not get through
    assert command.wait(limit(60)) in (0, 130)
    assert not any(part["running"] for part in platform.state()["parts"])
    command = platform.home.start("up")
    assert "Headway is up" in until(lambda: command.stdout.readline() + command.stdout.readline(), 90)
    platform.home.ok("down", "--yes")
    assert command.wait(limit(60)) == 0, "a `down` from elsewhere ends it"
    assert not any(part["running"] for part in platform.state()["parts"])
    platform.up()


# Its bridge, and settings that change while it runs.


def parts(home):
    return {part["name"]: part for part in home.ok("status").said["parts"]}


def test_it_has_a_bridge_without_settings_that_tells_of_datasets_and_comes_back_when_it_dies(platform, tmp_path):
    home = platform.home
    until(lambda: (home.path / "events" / "store.json").exists(), 150)
    (tmp_path / "a.txt").write_text("some words")
    home.ok("dataset", "publish", "told", tmp_path / "a.txt")

    def of_it():
        return [one for one in home.ok("events").said["events"] if one["subject"] == "dataset/told"]

    (event,) = until(of_it, 150, every=1.0)
    assert (event["name"], event["status"]) == ("dataset.published", "accepted")
    assert event["batches"] == event["waits"] == []
    before = parts(home)["bridge"]["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: parts(home)["bridge"]["running"] and parts(home)["bridge"]["pid"] != before, 150, every=1.0)


def test_up_refuses_a_trigger_that_could_not_start_anything(platform, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({"events": {"triggers": [{"event": "model.stale", "start": "retrain/none"}]}}))
    ran = platform.home.run("up", "--detach", "-c", wrong)
    assert ran.code == 2 and "events.triggers.0: there is no deployment 'retrain/none'" in ran.said["error"]["message"]


def test_broken_sources_are_named_by_up_status_and_doctor_until_they_work(platform, tmp_path):
    """A folder that is missing, a secret that is not set, a port that another program has: all were silent."""
    up, inbox, config = platform.home, tmp_path / "inbox", tmp_path / "sources.yaml"
    webhook = {"hmac": "env:NOBODY_SET_THIS"}
    folders = [{"path": str(inbox), "dataset": "dropped"}]
    config.write_text(yaml.safe_dump({"events": {"folders": folders, "webhook": webhook}}))
    told = up.ok("up", "--detach", "-c", config).said["broken_sources"]
    assert told.keys() == {f"folder {inbox}", "webhook, hmac"}
    assert "No such file" in told[f"folder {inbox}"] and "NOBODY_SET_THIS is not set" in told["webhook, hmac"]
    assert up.ok("status").said["broken_sources"] == told
    findings = {finding["name"]: finding for finding in up.run("doctor").said["findings"]}
    assert not findings[f"events, folder {inbox}"]["ok"] and not findings["events, webhook, hmac"]["ok"]

    inbox.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config.write_text(yaml.safe_dump({"events": {"folders": folders, "webhook": {**webhook, "port": port}}}))
        told = up.ok("up", "--detach", "-c", config).said["broken_sources"]
        assert told.keys() == {"webhook"} and f"port {port} is taken" in told["webhook"]
    until(lambda: up.ok("status").said["broken_sources"].keys() == {"webhook, hmac"}, 150, every=0.5)


def test_new_settings_reach_the_watch_and_the_worker_that_run(platform, tmp_path):
    """Both were read once, at the first start."""
    up = platform.home
    before, changed = parts(up), tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({"alerts": {"disk_free_gb": 1e6}, "parallel_runs": 2}))
    up.ok("up", "--detach", "-c", changed)
    url = process.read_json(up.path / "prefect" / "server.json")["url"]
    with SyncPrefectClient(api=f"{url}/api", auth_string=prefect_server.password(up.path)) as client:
        assert client.read_work_pool(POOL).concurrency_limit == 2
    assert parts(up)["worker"]["pid"] == before["worker"]["pid"]
    until(lambda: "disk_nearly_full" in [alert["alert"] for alert in up.ok("status").said["alerts"]], 150, every=1.0)
    assert parts(up)["watch"]["pid"] == before["watch"]["pid"], "it starts anew by itself, under the same parent"


def test_down_leaves_no_bridge(platform):
    home = platform.home

    def bridges():
        said = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True).stdout
        return [line for line in said.splitlines() if line.endswith(f"deployments.bridge {home.path}")]

    until(lambda: len(bridges()) == 1, 150, bridges)  # one that starts a program has a twin for a moment
    home.ok("down", "--yes", "--endpoints")
    assert bridges() == [] and bridge.status(home.path) is None and platform.processes() == []
    assert PARTS.index("platform/bridge") < PARTS.index("platform/worker"), "it stops before what it could start"


# What is wrong is said before anything starts.


def test_a_taken_port_is_named(fresh):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = fresh.run("up", "--detach", "--port", port)
    assert ran.code == 2 and f"port {port} is taken" in ran.said["error"]["message"]


def test_a_home_of_a_newer_headway_is_left_alone(fresh):
    fresh.path.mkdir()
    (fresh.path / "layout.json").write_text('{"layout": 99, "headway": "9.0"}')
    for words in (("up", "--detach"), ("status",), ("retrain", "-c", "tiny"), ("dataset", "list")):
        ran = fresh.run(*words)
        assert ran.code == 2 and "newer Headway" in ran.said["error"]["message"], words
    assert [path.name for path in fresh.path.iterdir()] == ["layout.json"]


def test_sqlite_has_its_temporary_files_on_the_disk_of_the_home(tmp_path):
    """Seen: with a full TMPDIR the server's migrations failed, and `headway retrain` waited for it for 90 seconds."""
    told = prefect_server._server_environment(tmp_path / "prefect", 4200)
    assert told["SQLITE_TMPDIR"] == str(tmp_path / "prefect") and (tmp_path / "prefect").is_dir()


def test_a_locked_database_is_named(fresh):
    (fresh.path / "prefect").mkdir(parents=True)
    holder = sqlite3.connect(fresh.path / "prefect" / "prefect.db", isolation_level=None)
    holder.execute("CREATE TABLE held (x)")
    holder.execute("BEGIN EXCLUSIVE")
    ran = fresh.run("up", "--detach")
    assert ran.code == 6 and "prefect.db" in ran.said["error"]["message"] and "locked" in ran.said["error"]["message"]
    holder.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schedules: [{deployment: retrain/tiny, cron: 'every day'}]", "not a cron line"),
        ("schedules: [{deployment: retrain/tiny, cron: '0 3 * * *', timezone: Mars/Olympus}]", "not a time zone"),
        ("schedules: [{deployment: retrain/tinny, cron: '0 3 * * *'}]", "there is no deployment 'retrain/tinny'"),
        (
            "schedules: [{deployment: retrain/tiny, cron: '0 3 * * *', set: [training.learning_rat=1]}]",
            "did you mean training.learning_rate?",
        ),
        ("schedule: []", "did you mean schedules?"),
        ("alerts: {disk_free: 3}", "did you mean alerts.disk_free_gb?"),
    ],
)
def test_wrong_settings_are_named(fresh, tmp_path, text, said):
    path = tmp_path / "platform.yaml"
    path.write_text(text)
    ran = fresh.run("up", "--detach", "--config", path)
    assert ran.code == 2 and said in ran.said["error"]["message"]
    assert not (fresh.path / "prefect" / "handle.json").exists(), "nothing was started"


def test_a_server_that_is_named_and_does_not_answer(fresh):
    environment = {**fresh.environment(), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    ran = subprocess.run(
        [*fresh.command("up", "--detach", "--json")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(120),
    )
    said = json.loads(ran.stdout)
    assert ran.returncode == 6 and "127.0.0.1:9" in said["error"]["message"]


def test_commands_without_a_platform_say_how_to_start_it(fresh):
    ran = fresh.run("run", "retrain/tiny")
    assert ran.code == 6 and "headway up" in ran.said["error"]["remedy"]
    assert fresh.run("run", "retrain/no").code == 2
    assert fresh.ok("status").said["prefect"] is None
    assert fresh.ok("down").said["stopped"] == []


def test_the_settings_that_the_page_shows_are_read_as_they_are_meant():
    page = (Path(__file__).parents[3] / "docs" / "platform.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    config = PlatformConfig.model_validate(shown)
    assert config.schedules[0].missed == "run_once" and config.notifications[0].occasions[0] == "failed"
