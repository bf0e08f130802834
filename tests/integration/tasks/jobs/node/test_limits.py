"""What a local job's ranks may use: cores, memory, GPUs, and how a rank that wants more ends."""

import os
import socket
import sys

import pytest
from waiting import until

from tasks.common import process
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig, WatchConfig
from tasks.jobs.node import launching

PROGRAM = """
import os, resource, sys
from tasks.jobs.node.runtime import main

def run(rank):
    taken = bytearray(rank.settings["takes_mib"] * 2**20)
    seen = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if key in os.environ}
    return {"cores": len(os.sched_getaffinity(0)), "taken": len(taken), "gpus": seen}

if __name__ == "__main__":
    sys.exit(main(run))
"""


@pytest.fixture
def stand(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield tmp_path
    process.stop(tmp_path / "job")


def ended(stand, **fields):
    plain = {"name": "train", "token": "d" * 32, "module": False, "inputs": {}, "restarts": 1}
    settings = {"takes_mib": 1, **fields.pop("settings", {})}
    job = Job(
        **plain, program=str(stand / "program.py"), settings=settings, watch=WatchConfig(grace_seconds=1), **fields
    )
    backend = open_backend(ClusterConfig())
    handle = backend.submit(job, stand / "job")
    return until(lambda: said if (said := backend.states([(handle, stand / "job")])[0]).over else None)


def result(stand):
    return process.read_json(stand / "job" / "result.json")


def report(stand):
    (path,) = (stand / "job" / "errors").glob("*.json")
    return process.read_json(path)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are limited on Linux only")
def test_a_job_keeps_to_its_cores(stand):
    assert ended(stand, cpus_per_node=1).code == 0
    assert result(stand)["cores"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
def test_a_rank_that_needs_more_memory_than_the_job_has_is_out_of_memory(stand):
    state = ended(stand, memory_gib=0.5, settings={"takes_mib": 600})
    assert state.code != 0
    said = report(stand)
    assert (said["type"], said["class"]) == ("MemoryError", "out_of_memory")


def test_a_rank_within_its_memory_is_left_alone(stand):
    assert ended(stand, memory_gib=0.5, settings={"takes_mib": 200}).code == 0


def test_more_gpus_than_there_are_is_the_users_error_with_the_number(stand, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    state = ended(stand, gpus_per_node=3)
    said = report(stand)
    assert (state.attempts, said["class"]) == (1, "user")
    assert said["message"] == f"the job asks for 3 GPUs on a machine, {socket.gethostname()} has 2"
    assert said["remedy"] == "Set cluster.gpus_per_node to 2 or less."


def test_ranks_see_the_gpus_of_the_job_and_no_others(stand, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert ended(stand, gpus_per_node=1).code == 0
    assert result(stand)["gpus"] == {"CUDA_VISIBLE_DEVICES": "4"}


def test_amds_gpus_are_handed_out_by_amds_variable(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1,2,3")
    assert launching.gpus() == ("0", "1", "2", "3")
    assert launching.visible(("0", "1")) == {"ROCR_VISIBLE_DEVICES": "0,1"}


def test_a_rank_that_the_kernel_killed_is_named(tmp_path):
    for rank, host in ((0, socket.gethostname()), (1, "elsewhere")):
        process.write_json(tmp_path / "ranks" / f"{rank}.json", {"rank": rank, "pid": 70 + rank, "host": host})
    assert launching.out_of_memory(tmp_path, {71: "python"}) is None
    said = launching.out_of_memory(tmp_path, {70: "python", 71: "python"})
    assert said["class"] == "out_of_memory"
    assert "the kernel killed rank 0 on" in said["message"]
