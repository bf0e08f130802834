"""A flow run that is cancelled in Prefect's page ends its job on a real Slurm; a platform that goes down leaves it, and says so."""

import base64
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import browser
import pytest
from slurm_stand import SlurmStand, slurm
from support import Home

CANCEL = Path(__file__).parents[1] / "cancel_run.mjs"
WITHIN_SECONDS = 15.0
ON_SLURM = ("cluster.backend=slurm", "cluster.nodes=2", "cluster.ranks_per_node=1")
LONG = ("benchmark.seconds=600", "benchmark.matmul_size=64")


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
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def queue(self):
        return self.stand.command("squeue", "--noheader", "--format=%T").split()


@pytest.fixture
def platform(tmp_path):
    if not browser.chromium():
        pytest.skip("no browser here: Debian's package chromium")
    with slurm(2) as stand:
        made = Platform(tmp_path / "home", stand)
        try:
            made.ok("up", "--detach")
            yield made
        finally:
            made.run("down", "--yes")


@pytest.mark.timeout(300)
def test_cancel_in_prefects_page_ends_the_slurm_job_within_seconds(platform):
    settings = [word for setting in (*ON_SLURM, *LONG) for word in ("--set", setting)]
    run = platform.ok("run", "qualify/tiny", *settings).said["flow_run"]["id"]
    until(lambda: platform.queue() == ["RUNNING"], 120)
    until(lambda: len(list(platform.path.glob("jobs/benchmark-*/ranks/*.json"))) == 2, 120)

    (job,) = platform.ok("jobs").said["jobs"]
    assert (job["backend"], job["state"], job["supervised"], job["flow_run"]) == ("slurm", "running", True, run)

    pressed = float(browser.run(CANCEL, platform.path, run)) / 1000
    until(lambda: platform.queue() == [], WITHIN_SECONDS + 30)
    gone = time.time()
    assert gone - pressed < WITHIN_SECONDS, f"the job was gone {gone - pressed:.1f} s after the press"
    until(lambda: platform.api(f"flow_runs/{run}")["state"]["type"] == "CANCELLED", 60)
    (job,) = platform.ok("jobs", "--all").said["jobs"]
    assert (job["state"], job["supervised"]) == ("cancelled", False)


def until(look, seconds):
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        time.sleep(0.2)
