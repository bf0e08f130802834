"""Cancelling a flow run in Prefect's page ends its job on a real Slurm; a platform that goes down leaves it, and says so."""

import base64
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import browser
import pytest
from live_prefect import until
from slurm_stand import SlurmStand, slurm
from support import Home
from waiting import limit

CANCEL = Path(__file__).parents[2] / "support" / "cancel_run.mjs"
WITHIN_SECONDS = 15.0
ON_SLURM = ("cluster.backend=slurm", "cluster.nodes=2", "cluster.ranks_per_node=1")
LONG = ("benchmark.seconds=600", "benchmark.matmul_size=64")
SETTINGS = [word for setting in (*ON_SLURM, *LONG) for word in ("--set", setting)]


@dataclass(frozen=True)
class Platform(Home):
    """A home with its platform up, on a login node of a Slurm."""

    stand: SlurmStand

    def environment(self):
        return {**super().environment(), **self.stand.environment}

    def api(self, path):
        server = json.loads((self.path / "prefect" / "server.json").read_text())
        login = base64.b64encode((self.path / "prefect" / "credentials").read_bytes()).decode()
        request = urllib.request.Request(f"{server['url']}/api/{path}", headers={"Authorization": f"Basic {login}"})
        with urllib.request.urlopen(request, timeout=limit(30)) as answer:
            return json.load(answer)

    def queue(self):
        return self.stand.command("squeue", "--noheader", "--format=%T").split()


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    if not browser.chromium():
        pytest.skip("no browser here: Debian's package chromium")
    with slurm(2) as stand:
        made = Platform(tmp_path_factory.mktemp("cancel") / "home", stand)
        try:
            made.ok("up", "--detach")
            yield made
        finally:
            made.run("down", "--yes")


@pytest.mark.long
def test_cancel_in_prefects_page_ends_the_slurm_job_within_seconds(platform):
    run = platform.ok("run", "qualify/tiny", *SETTINGS).said["flow_run"]["id"]
    job = at_work(platform)
    assert (job["backend"], job["state"], job["supervised"], job["flow_run"]) == ("slurm", "running", True, run)
    assert_is_what_was_rendered(platform, job)

    pressed = float(browser.run(CANCEL, platform.path, run)) / 1000
    until(lambda: platform.queue() == [], WITHIN_SECONDS + 30)
    gone = time.time()
    assert gone - pressed < limit(WITHIN_SECONDS), f"the job was gone {gone - pressed:.1f} s after the press"
    until(lambda: platform.api(f"flow_runs/{run}")["state"]["type"] == "CANCELLED", 60)
    (job,) = platform.ok("jobs", "--all").said["jobs"]
    assert (job["state"], job["supervised"]) == ("cancelled", False)


@pytest.mark.long
def test_a_platform_that_goes_down_tells_of_the_slurm_job_that_goes_on(platform):
    platform.ok("run", "qualify/tiny", *SETTINGS)
    job = at_work(platform)
    assert platform.ok("down", "--yes").said["going_on"] == [f"{job['id']} on slurm"]
    assert platform.queue() == ["RUNNING"]
    (job,) = platform.ok("jobs", "--ask").said["jobs"]
    assert (job["state"], job["supervised"]) == ("running", False)
    assert platform.ok("job", "cancel", job["id"], "--reason", "nobody needs it").said["cancelled"]
    until(lambda: platform.queue() == [], WITHIN_SECONDS)
    (entry,) = [one for one in platform.ok("audit-log").said["entries"] if one["action"] == "cancel job"]
    assert job["id"] in entry["what"] and entry["reason"] == "nobody needs it"


def at_work(platform):
    """The job, once its ranks compute on the nodes of the Slurm."""
    until(lambda: platform.queue() == ["RUNNING"], 120)
    until(lambda: len(list(platform.path.glob("jobs/benchmark-*/ranks/*.json"))) == 2, 120)
    (job,) = platform.ok("jobs").said["jobs"]
    return job


def assert_is_what_was_rendered(platform, job):
    """`headway job render` shows the very job, and the very files, that were submitted."""
    told = platform.ok("job", "render", "-c", "tiny", "--stage", "benchmark", *SETTINGS).said
    folder = Path(job["folder"])
    assert told["pending"] == [] and told["folder"] == str(folder) and told["files"]
    assert told["job"] == json.loads((folder / "job.json").read_text())
    assert told["files"] == {name: (folder / name).read_text() for name in told["files"]}
