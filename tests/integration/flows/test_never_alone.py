"""A model in production is never left alone: files land, the champion is revalidated, found degraded, a person agrees in the
browser, and another champion serves. With the real servers, from a dropped file to the served model.
"""

import base64
import json
import os
import random
import re
import time
import urllib.request
import warnings
from pathlib import Path

import browser
import pytest
import yaml
from live_prefect import until
from support import Home, publish_tiny
from waiting import limit

from deployments.catalogue.flows import catalogue
from deployments.configuration.platform import PlatformConfig
from tasks.registry.revalidations import revalidations
from tasks.storage import open_store

DOCS = Path(__file__).parents[3] / "docs"
APPROVE, PAGE = DOCS / "make_evidence.mjs", DOCS / "revalidation.md"
PICTURES = os.environ.get("HEADWAY_PICTURES")
"""A folder for the pictures of docs/revalidation.md; without it none are kept."""
REASON, PERSON = "the tickets are German now", "mara"
DATA, MODEL = "dataset/tickets", "model/tiny"
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
LOOSE = ("revalidation.drift.min_documents=20", "revalidation.drift.splits=100")
AGREED = ("approval.before_retrain=true", "training.seed=7")
WORDS = (
    "der die das und nicht ein eine ist auf mit sich dem des von zu im für auch als wenn aber oder nach bei über noch Gleis Zug "
    "Weiche Signal Fahrplan Strecke Lokomotive Bahnhof Schranke Betrieb wurde heute gestern wieder gesperrt repariert gemeldet "
    "bestätigt verspätet umgeleitet angehalten fährt steht wartet kommt geht Störung Ursache Meldung Kunde Antwort"
)
PLATFORM = {
    "events": {
        "folders": [{"path": "dropped", "dataset": "tickets", "include": "*.txt"}],
        "settle_seconds": 1.0,
        "triggers": [
            {
                "event": "dataset.published",
                "subject": "dataset/tickets",
                "start": "revalidate/tiny",
                "cooldown_minutes": 0.0,
                "set": list(LOOSE),
            },
            {
                "event": "model.degraded",
                "subject": "model/tiny",
                "start": "retrain/tiny",
                "cooldown_minutes": 0.0,
                "set": list(AGREED),
            },
        ],
    }
}


class Platform(Home):
    """A home with its platform up."""

    def api(self, path, body=None):
        server = json.loads((self.path / "prefect" / "server.json").read_text())
        login = base64.b64encode((self.path / "prefect" / "credentials").read_bytes()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{server['url']}/api/{path}", data, headers), timeout=limit(30)
        ) as answer:
            return json.loads(answer.read() or "null")

    def runs(self, flow):
        """Flow runs of a flow, oldest first."""
        wanted = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 50}
        return self.api("flow_runs/filter", wanted)

    def events(self, name, subject):
        """What `headway events` says of accepted events, oldest first."""
        told = self.ok("events", "--limit", 1000).said["events"]
        return [one for one in told if (one["name"], one["subject"], one["status"]) == (name, subject, "accepted")]

    def verdicts(self):
        return [noted["verdict"] for noted in reversed([*revalidations(open_store(self.path), "tiny")])]

    def champion(self):
        return json.loads(self.wait_for("store/documents/refs/tiny/champion.json").read_text())["target"]

    def drop(self, number, files=60):
        """German tickets into the watched folder in place of those that were there, each file whole at once."""
        draw, words, folder = random.Random(number), WORDS.split(), self.path.parent / "dropped"
        for one in folder.glob("*.txt"):
            one.rename(self.path.parent / one.name)
        for place in range(files):
            sentences = (
                " ".join(draw.choices(words, k=draw.randint(5, 14))) + ". " for _ in range(draw.randint(15, 30))
            )
            (folder / f".{number}-{place}.part").write_text("".join(sentences), encoding="utf-8")
        for place in range(files):  # at once, so that they are one arrival however slow the machine is
            (folder / f".{number}-{place}.part").rename(folder / f"{number}-{place}.txt")


@pytest.fixture
def platform(tmp_path):
    made = Platform(tmp_path / "home")
    (tmp_path / "dropped").mkdir()
    (tmp_path / "platform.yaml").write_text(yaml.safe_dump(PLATFORM))
    publish_tiny(made)
    try:
        made.ok("up", "--detach", "--config", tmp_path / "platform.yaml")
        yield made
    finally:
        made.run("down", "--yes", "--endpoints")


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(900)
def test_dropped_files_end_in_another_champion_when_a_person_agrees(platform, record_property):
    seconds = Stopwatch(record_property)
    first = platform.ok("run", "retrain/tiny").said["flow_run"]["id"]
    assert ended(platform, first)["state"]["type"] == "COMPLETED"
    champion = platform.champion()
    seconds("first champion")

    platform.drop(1)
    before = covered(platform, "dataset.published", DATA, 1, by=("revalidate", 1))
    assert ended(platform, before)["state"]["type"] != "COMPLETED"
    seconds("first revalidation")
    assert platform.verdicts() == ["degraded"] and platform.events("model.degraded", MODEL) == []

    platform.drop(2)
    again = covered(platform, "dataset.published", DATA, 2, by=("revalidate", 2))
    assert ended(platform, again)["state"]["type"] != "COMPLETED"
    seconds("second revalidation")
    revalidations = {run["id"] for run in platform.runs("revalidate")}
    assert revalidations == {before, again} and len(revalidations) == 2
    assert platform.champion() == champion

    assert platform.verdicts() == ["degraded", "degraded"]

    retraining = covered(platform, "model.degraded", MODEL, 1, by=("retrain", 2))
    waiting = until(lambda: (run := platform.api(f"flow_runs/{retraining}"))["state_type"] == "PAUSED" and run)
    seconds("approval asked for")
    beside = approved(platform, waiting["id"])
    for told in ("degraded", "bits per byte", "tickets", "model.degraded"):
        assert told in beside.lower(), beside

    assert ended(platform, retraining)["state"]["type"] == "COMPLETED"
    seconds("another champion")
    (serving,) = platform.ok("endpoint", "list").said["endpoints"]
    assert platform.champion() != champion and serving["model"] == platform.champion() and serving["ready"]
    assert platform.ok("complete", "tiny", "der Zug ").said["completion"]
    assert len(platform.runs("retrain")) == 2 and len(platform.runs("revalidate")) == 2
    assert who_agreed(platform) == [PERSON]
    assert told_to_mlflow(platform)
    record_property("seconds", seconds.told)


def test_the_platform_of_the_documentation_is_one_that_can_start():
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made = [PlatformConfig.model_validate(yaml.safe_load(block)) for block in blocks]
    assert [len(one.events.triggers) for one in made] == [3] and all(map(catalogue, made))


class Stopwatch:
    """Says how long each step took."""

    def __init__(self, note):
        self.began, self.told = time.monotonic(), {}

    def __call__(self, step):
        self.told[step] = round(time.monotonic() - self.began, 1)
        print(f"{self.told[step]:6.1f} s  {step}", flush=True)


def ended(platform, run):
    return until(lambda: (found := platform.api(f"flow_runs/{run}"))["state_type"] in FINAL and found)


def covered(platform, name, subject, count, *, by):
    """The flow run that covered the newest of so many events, as `headway events` names it.

    `by` is its flow, and how many runs of it there are by then: asking Prefect is cheaper than a command every time.
    """
    flow, runs = by
    until(lambda: len(platform.runs(flow)) >= runs)

    def batches():
        found = platform.events(name, subject)
        assert len(found) <= count, found
        return len(found) == count and [one for one in found[-1]["batches"] if one["flow_run"]]

    (one,) = until(batches)
    return one["flow_run"]


def approved(platform, run):
    """Agree, in the browser where there is one; returns what stood beside the form."""
    if not browser.chromium():
        warnings.warn("no Chromium: the answer is given in a terminal", stacklevel=2)
        keys = platform.api(f"flow_runs/{run}")["state"]["state_details"]["run_input_keyset"]
        text = platform.api(f"flow_runs/{run}/input/{keys['description']}")
        (name,) = [one["name"] for one in platform.ok("approve").said["waiting"] if one["flow_run"] == run]
        platform.ok("approve", name, "--approve", "--reason", REASON, "--as", PERSON)
        return text
    pages = platform.path.glob("store/artifacts/revalidation/tiny/*/files/evidence.html")
    pictures = [PICTURES, max(pages, key=os.path.getmtime)] if PICTURES else []
    return json.loads(browser.run(APPROVE, platform.path, run, PERSON, REASON, *pictures))["beside"]


def who_agreed(platform):
    entries = platform.ok("audit-log").said["entries"]
    return [one["claimed"] for one in entries if one["action"] == "approve" and one["reason"] == REASON]


def told_to_mlflow(platform):
    """Whether the run of the retraining says in MLflow who agreed, and why."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{platform.path / 'mlflow' / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    tags = [run.data.tags for run in client.search_runs(experiments, max_results=500)]
    wanted = {"headway.approved_by": PERSON, "headway.approval_reason": REASON}
    return any(wanted.items() <= one.items() for one in tags)
