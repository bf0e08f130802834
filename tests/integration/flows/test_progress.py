"""What Prefect's page shows of a run, and that a run does not need Prefect's server to be there all the time."""

import json
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode

import psutil
import pytest
from support import publish_tiny
from waiting import limit

QUICK = ("--set", "benchmark.seconds=0.3", "--set", "benchmark.min_of_peers=0")


def page(home, path, body):
    """What the page asks the server."""
    server = json.loads((home.path / "prefect" / "server.json").read_text())
    login = b64encode((home.path / "prefect" / "credentials").read_bytes()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server['url']}/api/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=limit(20)) as answer:
        return json.load(answer)


def artifacts(home, flow_run):
    found = page(home, "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}, "limit": 200})
    return {artifact["key"]: artifact for artifact in found}


def trained_steps(home):
    found = list(home.path.glob("jobs/train-*/metrics.jsonl"))
    return len(found[0].read_text().splitlines()) if found else 0


def kill_the_server(home):
    """kill -9 of the server itself; its supervisor starts it again on the same port."""
    handle = json.loads((home.path / "prefect" / "handle.json").read_text())
    children = psutil.Process(handle["pid"]).children()
    assert children
    for child in children:
        child.kill()


@pytest.mark.long
def test_a_run_goes_on_while_the_prefect_server_is_killed_and_all_of_it_is_in_the_page(fresh):
    publish_tiny(fresh)
    command = fresh.start("retrain", "-c", "tiny", *QUICK, "--set", "training.steps=600", "--to", "train", "--json")
    deadline = time.monotonic() + limit(240)
    while trained_steps(fresh) < 20 and time.monotonic() < deadline:
        assert command.poll() is None, command.communicate()
        time.sleep(0.1)
    kill_the_server(fresh)
    out, err = command.communicate(timeout=limit(280))
    assert command.returncode == 0, err
    said = json.loads(out)
    assert said["status"] == "completed" and said["stages"][4]["job"]["submissions"] == 1
    identity = said["flow_run"]["id"]
    [run] = page(fresh, "flow_runs/filter", {"flow_runs": {"id": {"any_": [identity]}}})
    assert run["state_type"] == "COMPLETED" and run["name"].startswith("tiny 20")
    tasks = page(fresh, "task_runs/filter", {"flow_runs": {"id": {"any_": [identity]}}})
    ran = [stage["name"] for stage in said["stages"] if stage["status"] != "not_run"]
    assert sorted((task["name"], task["state_type"]) for task in tasks) == sorted((name, "COMPLETED") for name in ran)
    shown = artifacts(fresh, identity)
    assert set(ran) <= set(shown)
    assert shown["progress-train"]["data"] == 100 and "train: ran" in shown["progress-train"]["description"]
    checks = json.loads(shown["plan-checks"]["data"])
    assert {"passed", "name", "measured", "limit"} == set(checks[0]) and all(check["passed"] for check in checks)
    report = shown["report"]["data"]
    assert "completed" in report and said["report"] in report and "| train | ran |" in report


def test_a_configuration_that_does_not_fit_is_named_in_the_page(home, done):
    code = """# fork: commands
from deployments.services import prefect_server as server
from tasks.config.base import home
server.wait(server.prepare(home()))
from flows.retrain import retrain
retrain("tiny", config={"training": {"learning_rat": 1}})
"""
    ran = subprocess.run([sys.executable, "-c", code], env=home.environment(), capture_output=True, text=True)
    assert ran.returncode == 1 and "training.learning_rat" in ran.stderr
    [run] = page(home, "flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1})
    message = run["state"]["message"]
    assert run["state_type"] == "FAILED" and "training.learning_rat: there is no such key" in message
    assert "headway up" in message
