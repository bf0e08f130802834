"""A home that commit 0245f4f wrote (tests/old_home/make.py) is taken over: nothing is run again, and nothing is lost."""

import fcntl
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from support import Home

ARCHIVE = Path(__file__).parents[1] / "old_home" / "home-of-0245f4f.tar.xz"
FINISHED = ("validate", "preprocess", "benchmark", "plan", "train", "evaluate", "export")


class Old(Home):
    """The home, and what the commands said that made it."""

    @property
    def told(self):
        return json.loads((self.path / "told.json").read_text())

    def environment(self):
        return {**super().environment(), "HEADWAY_TOKEN": self.told["token"]}

    def again(self, *words):
        sets = [word for value in self.told["small"] for word in ("--set", value)]
        return self.run("retrain", "-c", "tiny", *sets, *words, "--as", "anna")


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """At the path that its records name: another run of the tests waits for its end."""
    with tarfile.open(ARCHIVE) as packed:
        told = json.load(packed.extractfile("./told.json"))
        place = Path(told["home"])
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(place, ignore_errors=True)
            packed.extractall(place, filter="tar")
            home = Old(place)
            yield home
            home.stop()
            shutil.rmtree(place)


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
    ran = old.again(
        "--set", "training.seed=2", "--to", "export"
    )  # its endpoint wants its old port, which others may have now
    assert ran.code == 0, ran.stderr
    assert {ran.statuses()[stage] for stage in FINISHED} == {"reused"}


def test_the_training_that_was_in_flight_goes_on_where_it_was(old):
    job = max(old.path.glob("jobs/train-*"), key=lambda folder: (folder / "metrics.jsonl").stat().st_mtime)
    before = (job / "metrics.jsonl").read_text().splitlines()
    sets = [word for value in old.told["in_flight"] for word in ("--set", value)]
    ran = old.again(*sets, "--to", "train")
    assert ran.code == 0, ran.stderr
    after = (job / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in after]
    assert steps[-1] == 3000 and len(before) > 20
    assert after[0] == before[0] and steps.count(1) == 1, "it went on with a checkpoint, and did not begin anew"
