"""A machine dies while it is qualified, on a real Slurm: it is left out and drained, and the rest proves itself alone."""

import json
import os
import subprocess
import time

import pytest
import yaml
from slurm_stand import slurm
from waiting import limit

CLUSTER = {
    "cluster": {"name": "stand", "backend": "slurm", "nodes": 1, "ranks_per_node": 1},
    "benchmark": {
        "seconds": 0.2, "spare_nodes": 1, "checks": ["compute", "collectives"], "act": {"drain": True}, "min_of_peers": 0,
        "largest_megabytes": 1,
    },
}  # fmt: skip
PATIENCE = 300.0


@pytest.mark.long
def test_a_machine_that_dies_while_it_is_measured_is_left_out(fresh):
    path = fresh.path.parent / "stand.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    with slurm(2, cpus=2) as stand:
        words = fresh.command("qualify", "-c", "tiny", "-c", path, "--json")
        environment = {**fresh.environment(), **stand.environment}
        run = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + limit(PATIENCE)
        while len(list(fresh.path.glob("jobs/benchmark-*/nodes/*/node.json"))) < 2 and run.poll() is None:
            assert time.monotonic() < deadline, stand.logs()
            time.sleep(0.2)
        stand.kill_node("n2")
        out, err = run.communicate(timeout=limit(PATIENCE))
        assert run.returncode == 0, err
        told = json.loads(out)
        assert (told["verdict"], told["usable"], list(told["excluded"])) == ("healthy", ["n1"], ["n2"])
        assert {node["name"]: node["verdict"] for node in told["nodes"]} == {"n1": "healthy", "n2": "unknown"}
        assert [(one["node"], one["done"]) for one in told["drained"]] == [("n2", True)]
        assert stand.node_state("n2").startswith("drained")
        stand.start_node("n2")
        words = fresh.command("qualify", "--resume", "--reason", "rebooted", "--json")
        said = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        assert json.loads(said.stdout)["resumed"] == ["n2"], said.stderr
        stand.wait_idle()
