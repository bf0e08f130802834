"""The start script of Ray on Azure ML, run for real: two node ranks as two processes on this machine."""

import os
import subprocess

import pytest
from ray_stand import free_port, using
from waiting import limit

from tasks.common import process
from tasks.compute.job import Job
from tasks.compute.nodes import write_nodes
from tasks.compute.ray_driver import ray_on_nodes
from tasks.config.backends.ray import RayConfig
from tasks.config.cluster import WatchConfig

PROGRAM = """
import sys
from tasks.jobs.node.runtime import main

def run(rank):
    return {}

if __name__ == "__main__":
    sys.exit(main(run))
"""


def start_nodes(folder, *, ranks=(0, 1), join_seconds=100.0, tokens=("a" * 64, "a" * 64), **ray):
    """What Azure ML does: the rendered command once a node, with its distribution's environment and the token of the mirror."""
    (folder.parent / "program.py").write_text(PROGRAM)
    job = Job(
        name="t", token="f" * 32, program=str(folder.parent / "program.py"), module=False, settings={}, inputs={},
        nodes=2, watch=WatchConfig(join_node_seconds=join_seconds),
    )  # fmt: skip
    rendered = ray_on_nodes(job, folder, RayConfig(**ray))
    write_nodes(job, folder)
    for name, text in rendered.files.items():
        process.write_text(folder / name, text)
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            rendered.command,
            env={
                **os.environ,
                **rendered.environment,
                **place,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": tokens[rank],
                "NODE_RANK": str(rank),
                "HEADWAY_NODE_NAME": f"az{rank}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=process.die_with_parent,
        )
        for rank in ranks
    ]


def said(node, *, timeout=150):
    text = node.communicate(timeout=limit(timeout))[0]
    return node.returncode, text


@pytest.mark.long
def test_two_nodes_make_a_cluster_and_run_the_job(tmp_path):
    first, second = start_nodes(tmp_path / "job")
    code, text = said(first)
    assert (code, said(second)[0]) == (0, 0), text
    assert (tmp_path / "job" / "result.json").exists()
    marks = [process.read_json(tmp_path / "job" / "nodes" / rank / "node.json") for rank in "01"]
    assert [mark["name"] for mark in marks] == ["az0", "az1"]  # each node rank where Azure ML counts it so
    assert using(tmp_path) == []


@pytest.mark.long
def test_a_machine_without_the_jobs_token_does_not_join(tmp_path):
    first, second = start_nodes(tmp_path / "job", join_seconds=20.0, tokens=("a" * 64, "b" * 64))
    code, text = said(first)
    assert (code, text.rstrip().endswith("node rank 1")) == (1, True), text
    assert said(second)[0] == 0  # how the job ended is the head's word


@pytest.mark.long
def test_the_heads_exit_code_is_the_jobs_and_the_others_leave_well(tmp_path):
    first, second = start_nodes(tmp_path / "job", resources={"absent": 1})
    code, text = said(first)
    assert (code, said(second)[0], "No machine has enough absent" in text) == (1, 0, True), text
    assert process.read_json(tmp_path / "job" / "errors" / "driver.json")["class"] == "user"


@pytest.mark.long
def test_a_node_that_does_not_come_is_named(tmp_path):
    (first,) = start_nodes(tmp_path / "job", ranks=(0,), join_seconds=8.0)
    code, text = said(first)
    assert (code, "for 2 nodes, without:" in text, text.rstrip().endswith("node rank 1")) == (1, True, True), text
    assert not (tmp_path / "job" / "ray-state.json").exists()


def test_a_head_that_does_not_come_is_named(tmp_path):
    (second,) = start_nodes(tmp_path / "job", ranks=(1,), join_seconds=1.0)
    code, text = said(second)
    assert code == 1 and "did not answer within 1 s" in text
