"""A retraining on `nodes: 1:2` of a real Slurm: it begins on one machine while another job has the second, which joins later."""

import json
import threading

import pytest
import yaml
from slurm_jobs import reachable
from slurm_stand import slurm
from support import publish_tiny
from waiting import until

CLUSTER = {
    "cluster": {"name": "range", "backend": "slurm", "nodes": "1:2", "ranks_per_node": 1},
    "benchmark": {"seconds": 0.5, "largest_megabytes": 1},
    "training": {"steps": 3000, "warmup_steps": 50},
    "planning": {"checkpoint": {"every_steps": 500}},
}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_training_begins_on_the_machine_that_is_free_and_takes_the_other_in_when_it_is(fresh, tmp_path):
    path = tmp_path / "range.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    publish_tiny(fresh)

    def metrics():
        return [
            json.loads(line)
            for file in fresh.path.glob("jobs/train-*/metrics.jsonl")
            for line in file.read_text().splitlines()
        ]

    with slurm(2, cpus=1) as stand, reachable(stand):
        options = ("--parsable", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 900")
        other = stand.command("sbatch", *options)

        def leave():
            until(metrics, 600, every=0.5)
            stand.command("scancel", other)

        leaving = threading.Thread(target=leave)
        leaving.start()
        words = ("retrain", "-c", "tiny", "-c", str(path), "--to", "train", "--dataset", "tiny")
        ran = fresh.ok(*words)
        leaving.join()
        again = fresh.ok(*words)
    assert set(again.statuses().values()) == {"reused", "not_run"}
    assert ran.statuses()["benchmark"] == ran.statuses()["train"] == "ran"
    (folder,) = fresh.path.glob("jobs/train-*")
    logs = {
        json.loads(path.read_text())["name"]: path.with_name("node.log") for path in folder.glob("nodes/*/node.json")
    }
    assert "n2 is healthy after" in logs["n2"].read_text()
    assert "measur" not in logs["n1"].read_text(), "the first was measured before"
    sizes = [record["world_size"] for record in metrics()]
    assert sizes[0] == 1 and sizes[-1] == 2
    assert [record["step"] for record in metrics()] == list(range(1, 3001)), "who joins costs no step"
