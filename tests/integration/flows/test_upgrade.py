"""The platform is upgraded from an earlier commit in place, as docs/operations.md has it, while it trains on another machine."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from ssh_stand import ssh_stand
from support import Home, publish_tiny
from waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[3]
PACKAGES = ("flows", "tasks", "deployments")
OLD = "5e3dc822"
STEPS = 3000


class Release(Home):
    """A home, and the `headway` of a folder whose code is replaced meanwhile."""

    @property
    def code(self):
        return self.path.parent / "release"

    def environment(self):
        return {**super().environment(), "PYTHONPATH": str(self.code)}

    def install(self, commit=""):
        """The packages of a commit, or of the working tree, in the place of what was there."""
        for name in PACKAGES:
            shutil.rmtree(self.code / name, ignore_errors=True)
            if not commit:
                shutil.copytree(ROOT / name, self.code / name, ignore=shutil.ignore_patterns("__pycache__"))
        if commit:
            self.code.mkdir()
            archive = subprocess.run(
                ["git", "-C", ROOT, "archive", commit, *PACKAGES], capture_output=True, check=False
            )
            if archive.returncode:
                pytest.skip(f"commit {commit} is not in this clone: {archive.stderr.decode().strip()}")
            subprocess.run(["tar", "-x", "-C", self.code], input=archive.stdout, check=True)

    def events(self, flow_run, kind):
        path = self.path / "runs" / flow_run / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in events if event["event"] == kind]

    def outcomes(self, flow_run):
        return [event["outcome"] for event in self.events(flow_run, "ended")]

    def steps(self):
        for path in self.path.glob("jobs/train-*/metrics.jsonl"):
            return [json.loads(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")]
        return []


@pytest.fixture
def release(tmp_path):
    made = Release(tmp_path / "home")
    made.install(OLD)
    yield made
    made.run("down", "--yes", "--endpoints")


def test_a_run_in_flight_ends_well_on_the_newer_release_and_nothing_is_done_twice(release, tmp_path):
    with ssh_stand(tmp_path / "ssh", count=1) as stand:
        ssh = {"hosts": [stand.machines[0].host], "key": str(stand.key), "known_hosts": str(stand.known_hosts)}
        settings = {
            "cluster.backend": "ssh", "cluster.nodes": 1, "cluster.ranks_per_node": 1,
            **{f"cluster.ssh.{name}": value for name, value in ssh.items()}, "training.steps": STEPS,
            "export.golden_tokens": 4, "export.speed_seconds": 0.1, "benchmark.seconds": 0.5,
        }  # fmt: skip
        publish_tiny(release)
        release.ok("up", "--detach")
        sets = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        run = release.ok("run", "retrain/tiny", *sets).said["flow_run"]["id"]
        until(lambda: len(release.steps()) > 50, 300, every=0.5, why=lambda: release.run("status").said)

        release.ok("down", "--yes")
        before = release.outcomes(run)
        alone = len(release.steps())
        release.ok("backup", "--to", tmp_path / "backups")
        release.install()
        until(lambda: len(release.steps()) > min(alone + 20, STEPS - 1), why="the job stopped with the platform")
        release.ok("up", "--detach")

        until(
            lambda: release.outcomes(run)[-1]["name"] == "deploy",
            900,
            every=1.0,
            why=lambda: release.run("status").said,
        )
    assert release.steps() == list(range(1, STEPS + 1)), "a step was made twice"
    outcomes = release.outcomes(run)
    ran = [one["name"] for one in outcomes if one["status"] == "ran"]
    assert len(ran) == len(set(ran)), "a stage was computed twice"
    assert {"validate", "preprocess", "benchmark", "plan"} <= {one["name"] for one in before if one["status"] == "ran"}
    (train,) = [one for one in outcomes if one["name"] == "train" and one["status"] == "ran"]
    assert (train["job"]["submissions"], train["job"]["attempts"], train["job"]["adopted"]) == (1, 1, True)
    assert release.ok("audit-log", "--verify").said["ok"] and release.ok("verify").said["problems"] == {}
    [endpoint] = release.ok("endpoint", "list").said["endpoints"]
    assert endpoint["ready"]
