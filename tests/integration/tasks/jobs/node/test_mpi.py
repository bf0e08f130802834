"""Open MPI as the launcher: real mpirun on this machine and in a real Slurm; over ssh: compute/test_ssh.py."""

import json
import os
import shutil
import subprocess
import sys
import time

import elastic_material
import pytest
from slurm_jobs import over, reachable, slurm_backend, small, until
from slurm_stand import slurm
from waiting import limit

from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig, WatchConfig
from tasks.jobs.node.launching import Place, launcher

RANKS = """
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    if rank.rank == 1:
        raise RuntimeError("rank 1 has enough")
    time.sleep(60)

if __name__ == "__main__":
    sys.exit(main(run))
"""
OUTLIVES_A_BREAK = """
import os, sys, time
from tasks.common.process import read_json
from tasks.jobs.node.runtime import main

def run(rank):
    second = rank.folder / "nodes" / "1"
    while not (second / "beat").exists():
        time.sleep(0.1)
    open(os.environ["STAND"] + "/log", "w").write(f"[{time.monotonic():.6f}] " + rank.settings["says"])
    while (read_json(second / "node.json") or {}).get("code") != 1:
        time.sleep(0.1)
    return {"rank": rank.rank}

if __name__ == "__main__":
    sys.exit(main(run))
"""
FELL_OFF = "NVRM: Xid (PCI:0002:00:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PLACES = """
import os, pathlib
place = [os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")]
pathlib.Path(os.environ["HEADWAY_JOB"], f"said-{place[0]}").write_text(" ".join([*place, os.environ["SLURMD_NODENAME"]]))
"""


def make_job(**changes):
    given = {"name": "t", "token": "b" * 32, "program": "tasks.jobs.train", "settings": {}, "inputs": {}, "restarts": 0}
    return Job(**{**given, "ranks_per_node": 2, "launcher": "mpi", **changes})


def ended(job, folder, seconds):
    backend = open_backend(ClusterConfig())
    handle, deadline = backend.submit(job, folder), time.monotonic() + limit(seconds)
    while not (state := backend.states([(handle, folder)])[0]).over:
        if time.monotonic() > deadline:
            backend.cancel(handle, folder)
            raise AssertionError((folder / "launcher.log").read_text())
        time.sleep(0.2)
    return state


@pytest.fixture
def open_mpi():
    if not shutil.which("mpirun"):
        pytest.skip("needs the Debian package openmpi-bin")


def test_command_of_two_machines(monkeypatch):
    monkeypatch.setenv("HEADWAY_MPI_HOSTS", "gpu-1,gpu-2")
    monkeypatch.setenv("PYTHONPATH", "/code")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    for name in ("HEADWAY_SUBMISSION", "HEADWAY_TOKEN", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    job = make_job(nodes=2, environment={"NCCL_DEBUG": "INFO"}).model_dump(mode="json")
    command = launcher(job, Place(0, "10.0.0.4", 2000, 1))
    ours = ["HEADWAY_ATTEMPT", "HEADWAY_JOB", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED"]
    exports = sorted([*ours, "NCCL_DEBUG", "NCCL_IB_DISABLE"])
    assert command == [
        *(sys.executable, "-m", "tasks.jobs.node.mpi", "mpirun", "--host", "gpu-1:2,gpu-2:2", "-np", "4"),
        *("--map-by", "ppr:2:node:oversubscribe", "--bind-to", "none"),
        *("-x", "MASTER_ADDR=10.0.0.4", "-x", "MASTER_PORT=2000"),
        *(word for name in exports for word in ("-x", name)),
        *(sys.executable, "-m", "tasks.jobs.train"),
    ]


@pytest.mark.long
def test_mpirun_trains_with_two_ranks(open_mpi, tmp_path, tmp_path_factory):
    training, tokens = elastic_material.training(8), elastic_material.write_tokens(tmp_path_factory.mktemp("tokens"))
    settings = {"training": training.model_dump(mode="json"), "checkpoint_every_steps": 4, "keep_checkpoints": 2}
    job = make_job(settings=settings, inputs={"tokens": str(tokens)})
    state = ended(job, tmp_path / "job", 120)
    assert state.code == 0, (tmp_path / "job" / "launcher.log").read_text()
    losses = [json.loads(line)["loss"] for line in (tmp_path / "job" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == training.steps
    ranks = [json.loads(path.read_text())["rank"] for path in sorted((tmp_path / "job" / "ranks").glob("*.json"))]
    assert ranks == [0, 1]


def test_mpirun_starts_ranks_on_both_nodes_of_a_slurm_job(open_mpi, tmp_path):
    with slurm(2) as stand, reachable(stand):
        job, backend = small(tmp_path, nodes=2, ranks_per_node=2, launcher="mpi", restarts=0), slurm_backend()
        (tmp_path / "program.py").write_text(PLACES)
        handle = backend.submit(job, tmp_path / "job")
        last = until(backend, handle, tmp_path / "job", over)[-1]
        assert last.code == 0, [log.read_text() for log in (tmp_path / "job").rglob("*.log")]
        said = [(tmp_path / "job" / f"said-{rank}").read_text() for rank in range(4)]
        first, second = stand.nodes
        assert said == [f"0 4 0 {first}", f"1 4 1 {first}", f"2 4 0 {second}", f"3 4 1 {second}"]


def test_a_result_does_not_count_when_another_machine_was_found_broken(open_mpi, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "dmesg"
    tool.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n1 ] || cat {tmp_path}/log 2>/dev/null || true\n')
    tool.chmod(0o755)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND", str(tmp_path))
    watch = WatchConfig(probe_seconds=0.2, grace_seconds=60)
    with slurm(2) as stand, reachable(stand):
        facts = {"settings": {"says": FELL_OFF}, "restarts": 0, "watch": watch}
        job, backend = small(tmp_path, nodes=2, launcher="mpi", **facts), slurm_backend(requeue=False)
        (tmp_path / "program.py").write_text(OUTLIVES_A_BREAK)
        handle = backend.submit(job, tmp_path / "job")
        last = until(backend, handle, tmp_path / "job", over)[-1]
    assert last.code != 0 and not (tmp_path / "job" / "result.json").exists()
    (report,) = [json.loads(path.read_text()) for path in (tmp_path / "job" / "errors").glob("node-*.json")]
    assert report["nodes"] == ["n2"] and "Xid 79" in report["message"]


def test_all_ranks_end_when_one_does(open_mpi, tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    state = ended(make_job(program=str(program), module=False), tmp_path / "job", 40)
    assert state.code == 1
    assert json.loads((tmp_path / "job/errors/rank-1.json").read_text())["message"] == "rank 1 has enough"


def test_without_open_mpi_the_job_says_so(tmp_path):
    """The error is one that is not tried again."""
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    job = make_job(program=str(program), module=False, environment={"PATH": str(tmp_path)})
    state = ended(job, tmp_path / "job", 30)
    assert (state.code, state.attempts) == (1, 1)
    report = json.loads(next((tmp_path / "job/errors").glob("*.json")).read_text())
    assert (report["class"], "openmpi-bin" in report["remedy"]) == ("missing", True)


@pytest.mark.parametrize("home", [{}, {"HOME": "/tmp"}])
def test_a_user_without_a_name_needs_a_home(tmp_path, home):
    """As Azure ML's serverless nodes may have it: Open MPI asks the system for the home of such a user, and crashes."""
    if not shutil.which("bwrap"):
        pytest.skip("needs the Debian package bubblewrap")
    (tmp_path / "errors").mkdir()
    (tmp_path / "mpirun").write_text("#!/bin/sh\nid -u\n")
    (tmp_path / "mpirun").chmod(0o755)
    nameless = ["--unshare-user", "--uid", "9000", "--gid", "9000", "--unsetenv", "HOME"]
    words = [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        *nameless,
        *[word for key, value in home.items() for word in ("--setenv", key, value)],
    ]
    words += [sys.executable, "-m", "tasks.jobs.node.mpi", str(tmp_path / "mpirun")]
    environment = {**os.environ, "HEADWAY_JOB": str(tmp_path), "HEADWAY_NODE_NAME": "vm1"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=limit(30))
    reports = [json.loads(path.read_text()) for path in (tmp_path / "errors").glob("*.json")]
    if home:
        assert (ran.returncode, ran.stdout, reports) == (0, "9000\n", [])
    else:
        assert ran.returncode == 1 and reports[0]["class"] == "missing", ran.stderr
        assert "machine vm1 knows no user 9000" in reports[0]["message"]
        assert "Set HOME in the image" in reports[0]["remedy"]
