"""A GPU falls off the bus while a job trains: the machine is named and left out, and training goes on elsewhere.

On a real Slurm of two nodes, with the real training program; nvidia-smi and dmesg are executables that speak for the nodes.
"""

import json
import threading
import time

import pytest
from elastic_material import training, write_tokens
from slurm_jobs import reachable, slurm_backend
from slurm_stand import slurm

from tasks.common.process import read_json
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import RetryConfig, WatchConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

BREAKS_AT, EVERY = 60, 20
SMI = """#!/bin/sh
if grep -qx "$HEADWAY_NODE_NAME" {bad} 2>/dev/null; then echo "Unable to determine the device handle for GPU0"; exit 15; fi
case "$1" in *remapped*) echo "0, 0, 0, 0" ;; *) echo "0, 0, 0x4, 0, 0, 0, 0, No" ;; esac
"""
DMESG = """#!/bin/sh
grep -qx "$HEADWAY_NODE_NAME" {bad} 2>/dev/null && cat {bad}.log
true
"""


@pytest.fixture(scope="module")
def cluster():
    with slurm(2) as stand, reachable(stand):
        yield stand


@pytest.fixture
def breaking(tmp_path, monkeypatch):
    """Break the GPU of the machine that trains, when it has reached a step; returns where it is named."""
    bad = tmp_path / "bad"
    for name, text in (("nvidia-smi", SMI), ("dmesg", DMESG)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(bad=bad))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    folder, over = tmp_path / "job", threading.Event()

    def watch():
        while not over.wait(0.02):
            if steps(folder) and steps(folder)[-1] >= BREAKS_AT:
                uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
                error = "NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', GPU has fallen off the bus."
                (tmp_path / "bad.log").write_text(f"[{uptime:.6f}] {error}\n")
                bad.write_text(read_json(folder / "nodes" / "0" / "node.json")["name"] + "\n")
                return

    thread = threading.Thread(target=watch)
    thread.start()
    yield bad
    over.set()
    thread.join()


def steps(folder):
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.mark.long
def test_xid_79_at_a_step_excludes_the_machine_and_training_resumes_from_the_last_verified_checkpoint(
    cluster, breaking, tmp_path
):
    (tmp_path / "tokens").mkdir()
    config = training(160)
    job = Job(
        name="train",
        token="79" * 16,
        program="tasks.jobs.train",
        settings={"training": config.model_dump(mode="json"), "checkpoint_every_steps": EVERY, "keep_checkpoints": 2},
        inputs={"tokens": str(write_tokens(tmp_path / "tokens"))},
        progress="checkpoints/LATEST",
        watch=WatchConfig(probe_seconds=0.3, grace_seconds=2),
        retry=RetryConfig(back_off_seconds=0),
    )
    said = []
    result = run(
        job,
        backend=slurm_backend(),
        folder=tmp_path / "job",
        journal=StoreJournal(open_store(tmp_path / "store")),
        watch=Watch(event=said.append),
    )
    named = breaking.read_text().strip()
    assert (result.submissions, result.excluded_nodes) == (2, (named,))
    assert result.resumed_from_step >= BREAKS_AT - EVERY
    took_over = read_json(tmp_path / "job" / "nodes" / "0" / "node.json")["name"]
    assert {named, took_over} == set(cluster.nodes)
    assert any("Xid 79 of GPU 0002:00:00" in event.text for event in said)
    assert any(event.kind == "excluded" and named in event.text for event in said)
    assert sorted(set(steps(tmp_path / "job"))) == list(range(1, 161))
