"""The flow of a rehearsal: the command's options, its gate, its note in Prefect and its run in MLflow."""

import json
import subprocess
import sys

import pytest
from waiting import limit, until

from tasks.config.flows import RehearseConfig

FLOW = """
import json, sys
from deployments.services import prefect_server
from tasks.common.home import home

server = prefect_server.prepare(home())
from flows.rehearse import rehearse
prefect_server.wait(server)
try:
    print(json.dumps(rehearse(config=json.loads(sys.argv[1]))))
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
"""


def run_flow(home, **config):
    command = [sys.executable, "-c", FLOW, json.dumps(config)]
    ran = subprocess.run(command, env=home.environment(), capture_output=True, text=True, timeout=limit(900))
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_settings_become_options_of_the_command():
    from flows.rehearse import words

    config = RehearseConfig(where="slurm", set=("training.steps=9",), only=("rank-killed",), dataset="mine", quick=True)
    assert " ".join(words(config)) == (
        "-c tiny -c slurm --set training.steps=9 --only rank-killed --seed 1 --hours 0.0 --dataset mine --quick"
    )


@pytest.mark.long
def test_a_rehearsal_of_prefect_has_a_run_in_mlflow_with_its_report(fresh):
    report = run_flow(fresh, only=["secret-given"])
    assert report["passed"] and [one["verdict"] for one in report["results"]] == ["passed"]
    assert fresh.ok("status").said["rehearsal"]["passed"] == 1
    until(lambda: list(fresh.path.glob("mlflow/artifacts/**/report.html")), 120)


@pytest.mark.long
def test_settings_that_would_reach_production_end_the_flow_run_with_the_words_of_the_command(fresh):
    refused = run_flow(fresh, set=["deployment.port=8080"])["refused"]
    assert "deployment.port is 8080" in refused and "--set deployment.port=null" in refused
