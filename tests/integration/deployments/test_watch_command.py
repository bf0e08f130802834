"""`headway watch` and the flow watch: what people see of answers, and one event whoever looks."""

import json
import subprocess
import sys

import pytest
from support import Home
from waiting import limit
from watched import Watched, loop

FLOW = """# fork: commands
import json
from deployments.services import prefect_server
from tasks.config.base import home

server = prefect_server.prepare(home())
from flows.watch import watch
url = prefect_server.wait(server)
print(json.dumps(watch(config={"endpoints": ["api"]})))
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print(json.dumps([[one.key, one.type, str(one.data)] for one in client.read_artifacts()]))
"""


@pytest.fixture
def home(tmp_path):
    made = Home(tmp_path / "home")
    yield made
    made.run("down", "--yes")


@pytest.fixture
def watched(home):
    made = Watched(home.path)
    assert home.ok("watch", "api").said["verdict"] == "nothing written"
    made.write(300)
    assert home.ok("watch", "api").said["verdict"] == "insufficient"
    return made


def test_a_look_tells_the_verdict_the_columns_and_the_windows_and_says_what_stands_out_once(home, watched):
    watched.write(100, loop)
    assert home.ok("watch", "api").said["said"] == []
    watched.write(100, loop, right=lambda place: True)
    dry = home.ok("watch", "endpoint/api", "--dry-run", "--window", "100", "--windows", "2").said
    assert (dry["verdict"], dry["requests"], dry["labels"], dry["dry_run"]) == ("anomaly", 100, 100, True)
    assert [row["requests"] for row in dry["windows"]] == [100, 100] and dry["windows"][-1]["accuracy"] == 1.0
    assert watched.events() == []
    ran = subprocess.run(
        home.command("watch", "api"), env=home.environment(), capture_output=True, text=True, check=True
    )
    assert "ANOMALY" in ran.stdout and "Said: repetition. Evidence: endpoints/api/anomalies/" in ran.stdout
    assert len(watched.events()) == 1
    after = home.ok("watch", "api").said
    assert (after["said"], after["standing"]) == ([], ["repetition"])
    assert home.run("watch", "other").code == 2


def test_the_flow_says_it_with_the_evidence_and_leaves_a_note(home, watched):
    watched.write(100, loop)
    home.ok("watch", "api")
    watched.write(100, loop)
    ran = subprocess.run(
        [sys.executable, "-c", FLOW], env=home.environment(), capture_output=True, text=True, timeout=limit(300)
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told, notes = (json.loads(one) for one in ran.stdout.splitlines()[-2:])
    assert [(one["endpoint"], one["verdict"], one["said"]) for one in told] == [("api", "anomaly", ["repetition"])]
    assert (home.path / told[0]["evidence"]).is_file() and len(watched.events()) == 1
    kinds = {key: data for key, _, data in notes}
    assert "| repetition | anomaly |" in kinds["answers"] and "begins" in kinds["answers-over-time"]
