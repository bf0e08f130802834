"""The bridge as a process of the platform: killed in the middle of its work it loses nothing, and it is started again."""

import hashlib
import hmac
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import pytest
import yaml
from caused_flow import deploy, install
from live_prefect import kill, lines, live, until
from prefect.client.orchestration import SyncPrefectClient
from support import Home, publish_tiny
from waiting import limit

from deployments.catalogue.flows import POOL
from deployments.catalogue.triggers import apply
from deployments.configuration.platform import PlatformConfig, kept
from deployments.services import prefect_server
from deployments.services.parts import PARTS, bridge
from tasks.common import process
from tasks.events import batches
from tasks.events.batches import Now, told
from tasks.events.ledger import Ledger

KEY = "a key of this test, and of nothing else"
AT_ONCE = 20


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with live(tmp_path_factory.mktemp("bridge") / "home") as made:
        made.environment["BRIDGE_TEST_KEY"] = KEY
        install(made)
        made.start_worker()
        try:
            yield made
        finally:
            process.stop(made.home / "platform" / "bridge")


def start(platform, settings):
    """Start the bridge with these settings, as `headway up` does."""
    kept(platform.home).write_text(yaml.safe_dump(settings))
    words = [
        "# fork: commands",
        "from pathlib import Path",
        "from deployments.services.parts import bridge",
        f"bridge.start(Path({str(platform.home)!r}))",
    ]
    subprocess.run([os.sys.executable, "-c", "\n".join(words)], env=platform.environment, check=True)


def child(home):
    """The bridge's own process, below its small parent."""
    parent = process.read_json(home / "platform" / "bridge" / "handle.json")["pid"]
    return until(lambda: next(iter(process.descendants(parent)), None), every=0.05)


def kill_bridge(home):
    kill(child(home))


def post(home, numbers):
    """Send events as a system of one's own does: signed, and again until they were taken."""
    said = [cloud_event(number) for number in numbers]
    body = json.dumps(said).encode()
    stamp = str(int(time.time())).encode()
    mac = hmac.new(KEY.encode(), stamp + b"." + body, hashlib.sha256).hexdigest()
    headers = {
        "Content-Type": "application/cloudevents-batch+json",
        "X-Headway-Signature": f"t={stamp.decode()},v1={mac}",
    }
    url = process.read_json(home / "events" / "webhook.json")["url"]
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=limit(30)) as answer:
        return 200 <= answer.status < 300


def cloud_event(number):
    version = f"{number:064x}"
    return {
        "specversion": "1.0",
        "id": f"{number}-{random.random()}",
        "source": "test",
        "type": "headway.dataset.published",
        "subject": "dataset/web",
        "time": datetime.now(UTC).isoformat(),
        "data": {"object": f"dataset/web@{version}"},
    }


def sent(home, numbers):
    def once():
        try:
            return post(home, numbers)
        except urllib.error.HTTPError as error:
            assert error.code >= 500, error.read()
        except (OSError, TypeError):  # it does not run, or not yet
            pass
        return False

    until(once, every=0.1)


def listed(ledger):
    return told(ledger, Now(time.time(), {}, lambda trigger: ""), limit=10_000)


@pytest.mark.parametrize(("first", "events"), [(0, 300), pytest.param(10_000, 1000, marks=pytest.mark.long)])
def test_a_bridge_that_is_killed_while_it_takes_events_loses_none_and_doubles_none(platform, tmp_path, first, events):
    trigger = {"event": "dataset.published", "start": "caused/killed", "cooldown_minutes": 0}
    settings = {"events": {"triggers": [trigger], "webhook": {"hmac": "env:BRIDGE_TEST_KEY"}}}
    ledger = Ledger(platform.home)
    with platform.client() as client:
        deploy(client, "killed", tmp_path)
        apply(client, PlatformConfig.model_validate(settings).events)
    start(platform, settings)
    until(lambda: (platform.home / "events" / "webhook.json").exists())
    numbers = [number for number in range(first, first + events) for _ in range(1 + number % 2)]
    random.Random(6).shuffle(numbers)
    kills = 0
    for begin in range(0, len(numbers), AT_ONCE):
        sent(platform.home, numbers[begin : begin + AT_ONCE])
        if begin // AT_ONCE % 8 == 5 or (kills < 2 and batches.open_batches(ledger)):
            kill_bridge(platform.home)
            kills += 1
    assert kills >= 3
    until(lambda: all(one["batches"] for one in accepted(ledger)) and not batches.open_batches(ledger))
    found = [one for one in accepted(ledger) if int(one["object"].rpartition("@")[2], 16) >= first]
    assert len({one["object"] for one in found}) == len(found) == events
    assert {one["batches"][0]["outcome"] for one in found} == {"completed"} and {
        len(one["batches"]) for one in found
    } == {1}
    named = {one["batches"][0]["flow_run"] for one in found}
    works = lines(tmp_path / "works")
    assert {work[0] for work in works} == named and len(works) == len(named)


def accepted(ledger):
    return [one for one in listed(ledger) if one["status"] == "accepted"]


def test_a_source_that_fails_stops_no_other_and_new_settings_start_the_process_anew(platform, tmp_path):
    """The port is taken, so the webhook cannot listen; a watched folder is a source like any other."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    port = int(platform.url.rpartition(":")[2])
    watched = [{"path": str(folder), "dataset": "dropped"}]
    webhook = {"hmac": "env:BRIDGE_TEST_KEY", "port": port}
    start(platform, {"events": {}})
    until((platform.home / "platform" / "bridge" / "sources.json").exists)
    before = child(platform.home)
    kept(platform.home).write_text(
        yaml.safe_dump({"events": {"folders": watched, "webhook": webhook, "settle_seconds": 0.5}})
    )
    log = platform.home / "platform" / "bridge" / "bridge.log"
    until(lambda: "the settings have changed" in log.read_text() and f"{port}" in log.read_text())
    assert child(platform.home) == before, "the same process, as a program of its own again"
    (folder / "a.txt").write_text("A file that landed.\n" * 50)
    ledger = Ledger(platform.home)
    (arrived,) = until(lambda: [one for one in listed(ledger) if one["name"] == "data.arrived" and one["became"]])
    assert arrived["became"].startswith("dataset/dropped@") and arrived["channel"] == "folder"
    published = [one for one in listed(ledger) if one["object"] == arrived["became"]]
    assert published and until(lambda: listed(ledger)[-1]["looked_at"])


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("up") / "home")
    home.ok("up", "--detach")
    yield home
    home.run("down", "--yes")


def parts(home):
    return {part["name"]: part for part in home.ok("status").said["parts"]}


def test_up_starts_a_bridge_without_settings_that_tells_of_datasets_and_what_dies_comes_back(up):
    until(lambda: (up.path / "events" / "store.json").exists())
    publish_tiny(up)
    found = until(lambda: up.ok("events").said["events"], every=1.0)
    assert [(one["name"], one["subject"], one["status"], one["batches"], one["waits"]) for one in found] == [
        ("dataset.published", "dataset/tiny", "accepted", [], [])
    ]
    before = parts(up)["bridge"]["pid"]
    os.kill(before, signal.SIGKILL)
    until(lambda: parts(up)["bridge"]["running"] and parts(up)["bridge"]["pid"] != before, every=1.0)


def test_up_refuses_a_trigger_that_could_not_start_anything(up, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({"events": {"triggers": [{"event": "model.stale", "start": "retrain/none"}]}}))
    ran = up.run("up", "--detach", "-c", wrong)
    assert ran.code == 2 and "events.triggers.0: there is no deployment 'retrain/none'" in ran.said["error"]["message"]


def test_broken_sources_are_named_by_up_status_and_doctor_until_they_work(up, tmp_path):
    """A folder that is missing, a secret that is not set, a port that another program has: all were silent."""
    inbox, config = tmp_path / "inbox", tmp_path / "sources.yaml"
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
    until(lambda: up.ok("status").said["broken_sources"].keys() == {"webhook, hmac"}, every=0.5)


def test_new_settings_reach_the_watch_and_the_worker_that_run(up, tmp_path):
    """Both were read once, at the first start."""
    before, changed = parts(up), tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump({"alerts": {"disk_free_gb": 1e6}, "parallel_runs": 2}))
    up.ok("up", "--detach", "-c", changed)
    url = process.read_json(up.path / "prefect" / "server.json")["url"]
    with SyncPrefectClient(api=f"{url}/api", auth_string=prefect_server.password(up.path)) as client:
        assert client.read_work_pool(POOL).concurrency_limit == 2
    assert parts(up)["worker"]["pid"] == before["worker"]["pid"]
    until(lambda: "disk_nearly_full" in [alert["alert"] for alert in up.ok("status").said["alerts"]], every=1.0)
    assert parts(up)["watch"]["pid"] == before["watch"]["pid"], "it starts anew by itself, under the same parent"


def test_down_leaves_no_bridge(up):
    def bridges():
        said = subprocess.run(["ps", "-eww", "-o", "args="], capture_output=True, text=True, check=True).stdout
        return [line for line in said.splitlines() if line.endswith(f"deployments.bridge {up.path}")]

    until(lambda: len(bridges()) == 1, why=bridges)  # one that starts a program has a twin for a moment
    up.ok("down", "--yes")
    assert bridges() == [] and bridge.status(up.path) is None
    assert PARTS.index("platform/bridge") < PARTS.index("platform/worker"), "it stops before what it could start"
