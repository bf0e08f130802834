"""The start script of Ray on Azure ML, run for real: two node ranks as two processes on this machine."""

import os
import subprocess
import sys

import pytest
from ray_stand import free_port, using

from tasks import process
from tasks.cluster_config import RayConfig, WatchConfig
from tasks.compute.job import Job
from tasks.compute.nodes import write_nodes
from tasks.compute.ray_azureml import ray_on_nodes

PROGRAM = """
import os, sys
from tasks.jobs.runtime import main

def run(rank):
    if rank.settings["fails"]:
        raise ValueError("as it was told")
    return {"node": os.environ["HEADWAY_NODE_NAME"]}

if __name__ == "__main__":
    sys.exit(main(run))
"""


def start_nodes(folder, *, fails=False, ranks=(0, 1), join_seconds=100.0):
    """What Azure ML does: the rendered command once a node, with the environment of its PyTorch distribution."""
    (folder.parent / "program.py").write_text(PROGRAM)
    job = Job(
        name="t", token="f" * 32, program=str(folder.parent / "program.py"), module=False, settings={"fails": fails},
        inputs={}, nodes=1, watch=WatchConfig(join_node_seconds=join_seconds),
    )  # fmt: skip
    rendered = ray_on_nodes(job.model_copy(update={"nodes": 2}), folder, RayConfig())
    write_nodes(job, folder)
    for name, text in rendered.files.items():
        process.write_text(folder / name, text)
    port = str(free_port())
    return [
        subprocess.Popen(
            rendered.command,
            env={**os.environ, **rendered.environment, "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=process.die_with_parent,
        )
        for rank in ranks
    ]
