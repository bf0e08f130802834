"""The bridge as a process of the platform: killed in the middle of its work it loses nothing, and it is started again."""

import hashlib
import hmac
import json
import os
import random
import subprocess
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import pytest
import yaml
from caused_flow import deploy, install
from live_prefect import kill, lines, live, until
from waiting import limit

from deployments.catalogue.triggers import apply
from deployments.configuration.platform import PlatformConfig, kept
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
