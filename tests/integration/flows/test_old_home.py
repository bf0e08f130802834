"""Homes that earlier commits wrote (tests/support/old_home/make.py) are taken over: nothing is run again, and nothing is lost."""

import fcntl
import json
import shutil
import socket
import sqlite3
import tarfile
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path

import psutil
import pytest
from prefect.server.schemas.schedules import CronSchedule
from support import Home
from waiting import limit, until

from deployments.watch.schedules import GRACE_SECONDS

ARCHIVES = Path(__file__).parents[2] / "support" / "old_home"
REUSED = ("validate", "preprocess", "train", "evaluate", "export")
"""Stages that are reused whatever the qualification's age: it holds for a day, and is then made anew, with the plan."""
QUICK = ("benchmark.seconds=0.3", "benchmark.min_of_peers=0")


class Old(Home):
    """The home, and what the commands said that made it."""

    @property
    def told(self):
        return json.loads((self.path / "told.json").read_text())

    def environment(self):
        return {**super().environment(), "HEADWAY_TOKEN": self.told["token"]}

    def retraining(self, *words):
        sets = [word for value in (*self.told["small"], *QUICK) for word in ("--set", value)]
        return ("retrain", "-c", "tiny", *sets, *words, "--as", "anna")

    def again(self, *words):
        return self.run(*self.retraining(*words))

    def begun(self, *words):
        return self.start(*self.retraining(*words), "--json")


@contextmanager
def unpacked(archive):
    """At the path that its records name: another run of the tests waits for its end."""
    with tarfile.open(ARCHIVES / archive) as packed:
        place = Path(json.load(packed.extractfile("./told.json"))["home"])
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(place, ignore_errors=True)
            packed.extractall(place, filter="tar")
            yield place
            shutil.rmtree(place, ignore_errors=True)  # who publishes its lineage may still write there


@pytest.fixture(scope="module", params=["0245f4f", pytest.param("3bfaac9", marks=pytest.mark.long)])
def old(request):
    """Of a commit before the findings of docs/testing.md were mended, and of one before the code was moved and renamed."""
    with unpacked(f"home-of-{request.param}.tar.xz") as place:
        home = Old(place)
        yield home
        home.stop()


def test_everything_verifies(old):
    assert old.ok("verify").said["problems"] == {}
    assert old.ok("audit-log", "--verify").said["ok"]


def test_its_versions_names_and_history_are_there(old):
    first, second = (
        next(stage["outputs"][0] for stage in old.told[run]["stages"] if stage["name"] == "export")
        for run in ("first", "second")
    )
    aliases = {row["ref"]: row["aliases"] for row in old.ok("models", "tiny").said["models"]}
    assert aliases == {first: ["previous"], second: ["champion"]}
    changes = old.ok("artifacts", "model/tiny", "--history").said["history"]
    assert [change["action"] for change in changes] == ["publish", "publish"]
    (endpoint,) = old.ok("endpoint", "list").said["endpoints"]
    assert (endpoint["ref"], endpoint["ready"]) == ("endpoint/tiny", False)


def test_nothing_that_was_finished_is_run_again(old):
    # Not to its end: its endpoint wants its old port, which others may have now.
    ran = old.again("--set", "training.seed=2", "--to", "export")
    assert ran.code == 0, ran.stderr
    statuses = ran.statuses()
    assert statuses.pop("plan") in ("ran", "reused"), "made anew with the qualification after a day; it needs no job"
    assert {stage: statuses[stage] for stage in REUSED} == dict.fromkeys(REUSED, "reused")


class InFlight:
    """The training that was at work when the home was packed, and the command that goes on with it."""

    def __init__(self, old):
        self.job = max(old.path.glob("jobs/train-*"), key=lambda folder: (folder / "metrics.jsonl").stat().st_mtime)
        self.before = self.lines()
        self.words = [word for value in old.told["in_flight"] for word in ("--set", value)] + ["--to", "train"]

    def lines(self):
        return [line for line in (self.job / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]

    def steps(self):
        return [json.loads(line)["step"] for line in self.lines()]

    def went_on(self):
        """With a checkpoint: it did not begin anew."""
        return len(self.before) > 20 and self.lines()[0] == self.before[0] and self.steps().count(1) == 1


def test_the_training_that_was_in_flight_goes_on_where_it_was(old):
    """To its end in `make long`, for 3,000 steps of two ranks; here until it has made more steps than it had."""
    training = InFlight(old)
    was = max(training.steps())
    command = old.begun(*training.words)
    try:
        until(lambda: max(training.steps()) > was or command.poll() is not None, every=0.1)
        command.terminate()
        out, err = command.communicate(timeout=limit(60))
    finally:
        command.kill()
    assert command.returncode == 130 and json.loads(out)["status"] == "cancelled", err
    assert max(training.steps()) > was and training.went_on()


@pytest.mark.long
def test_the_training_that_was_in_flight_comes_to_its_end(old):
    training = InFlight(old)
    ran = old.again(*training.words)
    assert ran.code == 0, ran.stderr
    assert training.steps()[-1] == 3000 and training.went_on()


class OldPlatform:
    """A home that `headway down` of then stopped, with what Prefect's database held at that time."""

    def __init__(self, path):
        self.home, self.path, self.now = Home(path), path, datetime.now(UTC)
        self.before, self.told = self.rows(), json.loads((path / "told.json").read_text())

    def query(self, text, *values):
        with closing(sqlite3.connect(self.path / "prefect" / "prefect.db", timeout=30)) as database:
            return database.execute(text, values).fetchall()

    def rows(self):
        """Deployments by id, schedules by id, and the runs that schedules made, with when each is due."""
        named = (
            "SELECT deployment.id, flow.name || '/' || deployment.name FROM deployment JOIN flow ON flow.id = flow_id"
        )
        # Then, a schedule held every setting; now, what its `set` changes.
        override = "replace(json_extract(parameters, '$.overrides[0]'), 'training.seed=', '')"
        seed = f"CAST(coalesce(json_extract(parameters, '$.config.training.seed'), {override}) AS INTEGER)"
        rules = f"SELECT id, deployment_id, schedule, {seed} FROM deployment_schedule WHERE active"
        made = "SELECT id, deployment_id, expected_start_time, state_type FROM flow_run WHERE auto_scheduled"
        return {
            "deployments": dict(self.query(named)),
            "schedules": {key: (of, json.loads(rule), seed) for key, of, rule, seed in self.query(rules)},
            "runs": {
                key: (of, datetime.fromisoformat(due + "+00:00"), state) for key, of, due, state in self.query(made)
            },
        }

    def due(self, deployment, rows, *states):
        """Runs of a deployment that its schedule made, in states of these types: their times by id."""
        names = rows["deployments"]
        return {
            key: due for key, (of, due, state) in rows["runs"].items() if names[of] == deployment and state in states
        }

    def states(self, flow_run):
        return self.query("SELECT type, message FROM flow_run_state WHERE flow_run_id = ? ORDER BY timestamp", flow_run)

    def working(self):
        return [process.pid for process in psutil.process_iter() if str(self.path) in words_of(process)]


def words_of(process):
    try:
        return " ".join([*process.cmdline(), process.environ().get("HEADWAY_HOME", "")])
    except psutil.Error:
        return ""


def moved_here(home):
    """Runs are taken up again on their own machine alone, which goes by its name: let it be this one."""
    for path in home.glob("runs/*/handle.json"):
        handle = json.loads(path.read_text())
        path.write_text(json.dumps(handle | {"host": socket.gethostname()}))
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as database, database:
        text = f"""'{{"prefect.worker.name": "headway-{socket.gethostname()}"}}'"""
        database.execute(f"UPDATE flow_run SET labels = json_patch(labels, {text}) WHERE run_count > 0")


@pytest.fixture(scope="module")
def platform():
    with unpacked("platform-of-0245f4f.tar.xz") as place:
        moved_here(place)
        taken = OldPlatform(place)
        taken.home.ok("up", "--detach")
        yield taken
        down = taken.home.run("down", "--yes", "--endpoints")
        assert down.code == 0, down.said
        assert taken.working() == []


def test_its_deployments_and_schedules_are_the_same_ones(platform):
    now = platform.rows()
    assert {key: now["deployments"].get(key) for key in platform.before["deployments"]} == platform.before[
        "deployments"
    ]
    assert now["schedules"] == platform.before["schedules"] and len(now["schedules"]) == 2


def test_what_it_missed_is_settled_as_its_settings_say(platform):
    late = platform.now - timedelta(seconds=GRACE_SECONDS)
    for deployment, setting, kept in (("retrain/tiny", "skip", 0), ("validate/tiny", "run_once", 1)):
        due = platform.due(deployment, platform.before, "SCHEDULED")
        missed = sorted((run for run in due if due[run] < late), key=due.get)
        cancelled = [f"(missed: {setting})" in (platform.states(run)[-1][1] or "") for run in missed]
        assert cancelled == [index < len(missed) - kept for index in range(len(missed))], deployment


@pytest.mark.parametrize("deployment", ["retrain/tiny", "validate/tiny"])
def test_its_next_runs_are_there_once(platform, deployment):
    soon = datetime.now(UTC) + timedelta(minutes=1)
    [rule] = [
        rule
        for of, rule, *_ in platform.before["schedules"].values()
        if platform.before["deployments"][of] == deployment
    ]
    dates = CronSchedule(cron=rule["cron"], timezone=rule["timezone"])._get_dates_generator(n=3, start=soon)
    wanted = {when.astimezone(UTC) for when in islice(dates, 3)}
    wanted |= {when for when in platform.due(deployment, platform.before, "SCHEDULED").values() if when > soon}

    def coming():
        return [when for when in platform.due(deployment, platform.rows(), "SCHEDULED").values() if when > soon]

    until(lambda: wanted <= set(coming()), every=0.2)
    assert len(coming()) == len(set(coming()))


def test_the_run_that_waited_for_a_person_waits_again_and_goes_on_with_the_answer(platform):
    asked = platform.told["waiting"]
    [waiting] = until(
        lambda: platform.home.ok("approve").said["waiting"], every=1.0, why=lambda: platform.home.ok("status").said
    )
    assert (waiting["flow_run"], waiting["subject"]) == (asked["flow_run"], asked["subject"])
    model = asked["question"].partition("model/")[2].split()[0]
    assert f"model/{model}" in waiting["question"]
    # The question is listed a moment before Prefect has paused the run, and is refused an answer until then.
    answer = ("approve", waiting["name"], "--approve", "--reason", "it waited long enough")
    until(lambda: platform.home.run(*answer).code == 0, every=2.0, why=lambda: platform.home.ok("status").said)
    until(
        lambda: platform.states(asked["flow_run"])[-1][0] == "COMPLETED",
        every=0.2,
        why=lambda: platform.states(asked["flow_run"]),
    )
    events = [
        json.loads(line)
        for line in (platform.path / "runs" / asked["flow_run"] / "events.jsonl").read_text().splitlines()
    ]
    begun = max(index for index, event in enumerate(events) if event["event"] == "opened")
    ended = {
        event["outcome"]["name"]: event["outcome"]["status"] for event in events[begun:] if event["event"] == "ended"
    }
    assert ended["deploy"] == "ran"
    assert {stage: ended[stage] for stage in REUSED} == dict.fromkeys(REUSED, "reused")
    [endpoint] = platform.home.ok("endpoint", "list").said["endpoints"]
    assert endpoint["ready"] and endpoint["model"].startswith(f"model/{model}"), endpoint
    assert platform.home.ok("audit-log", "--verify").said["ok"]
