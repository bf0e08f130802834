"""Inputs on a machine's own disk: copied before ranks start, deleted after, also after a kill; too little room is said."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from waiting import until

from tasks.common import process
from tasks.common.process import boot_id
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.config.cluster import ClusterConfig, ScratchConfig, WatchConfig
from tasks.jobs.node import scratch

PROGRAM = """
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    data = rank.inputs["tokens"]
    seen = {str(file.relative_to(data)): file.read_bytes().decode() for file in data.rglob("*") if file.is_file()}
    with open(rank.folder.parent / "at", "w") as file:
        file.write(str(data))
    if rank.attempt == 1 and rank.settings["fails"]:
        raise OSError("once")
    time.sleep(rank.settings["sleeps"])
    return {"seen": seen, "at": str(data)}

if __name__ == "__main__":
    sys.exit(main(run))
"""
GIB = 1024**3


@pytest.fixture
def stand(tmp_path):
    """Inputs, and a disk."""
    (tmp_path / "inputs" / "deep").mkdir(parents=True)
    (tmp_path / "inputs" / "a.bin").write_text("alpha")
    (tmp_path / "inputs" / "deep" / "b.idx").write_text("beta")
    (tmp_path / "nvme").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    process.stop(tmp_path / "job")


def job(stand, size_gib=0.001, path=None, **settings):
    return Job(
        name="train",
        token="c" * 32,
        program=str(stand / "program.py"),
        module=False,
        settings={"fails": False, "sleeps": 0} | settings,
        inputs={"tokens": str(stand / "inputs")},
        scratch=ScratchConfig(path=str(path or stand / "nvme"), size_gib=size_gib),
        watch=WatchConfig(grace_seconds=1),
    )


def submit(stand, job):
    backend = open_backend(ClusterConfig())
    handle = backend.submit(job, stand / "job")
    return lambda: backend.states([(handle, stand / "job")])[0]


def ended(stand, job):
    state = submit(stand, job)
    return until(lambda: said if (said := state()).over else None)


def report(stand):
    (path,) = (stand / "job" / "errors").glob("*.json")
    return process.read_json(path)


def test_ranks_read_the_copies_and_nothing_is_left_of_them(stand):
    state = ended(stand, job(stand, fails=True))
    assert (state.code, state.attempts) == (0, 2)
    result = process.read_json(stand / "job" / "result.json")
    assert result["seen"] == {"a.bin": "alpha", "deep/b.idx": "beta"}
    assert result["at"].startswith(f"{stand / 'nvme'}/headway-train-")
    assert list((stand / "nvme").iterdir()) == []
    log = (stand / "job" / "launcher.log").read_text()
    assert log.count("scratch: 2 files") == 1, "the second attempt takes the copies of the first"


def test_what_a_killed_job_left_is_deleted_by_the_next_one_and_what_lives_is_not(stand):
    state = submit(stand, job(stand, sleeps=60))
    until(lambda: (stand / "at").exists())
    (left,) = (stand / "nvme").iterdir()
    assert scratch.sweep(stand / "nvme") == []
    parent = process.read_json(stand / "job" / "handle.json")["pid"]
    below = process.descendants(parent)
    os.kill(parent, signal.SIGKILL)
    until(lambda: state().over and not any(map(process.process_started, below)))  # which write in its folder until then
    assert left.exists()
    mine = stand / "nvme" / "somebody-elses"
    mine.mkdir()
    shutil.rmtree(stand / "job")
    assert ended(stand, job(stand)).code == 0
    assert list((stand / "nvme").iterdir()) == [mine]


def test_folders_of_an_earlier_start_of_the_machine_are_swept_and_those_of_others_who_cannot_be_seen_are_not(tmp_path):
    here = scratch._pid_namespace()
    earlier = tmp_path / f"headway-train-cc-0.{os.getpid()}.1.11111111-boot.{here}"
    elsewhere = tmp_path / f"headway-train-cc-0.999999.1.{boot_id()}.1"
    living = tmp_path / f"headway-a.b-cc-0.{os.getpid()}.{process.process_started(os.getpid())}.{boot_id()}.{here}"
    for path in (earlier, elsewhere, living, tmp_path / "headway-notes.txt"):
        path.mkdir()
    assert scratch.sweep(tmp_path) == [earlier]
    assert elsewhere.exists()
    assert living.exists()


def test_too_little_room_is_said_before_anything_is_copied(stand):
    free = shutil.disk_usage(stand).free / GIB
    state = ended(stand, job(stand, size_gib=free + 1000))
    said = report(stand)
    assert (state.attempts, said["class"]) == (1, "missing")
    told = re.search(rf"{stand / 'nvme'} has ([\d.]+) GiB free", said["message"])
    assert told and abs(float(told[1]) - free) < 5
    assert f"the job needs {free + 1000:g} GiB" in said["message"]
    assert list((stand / "nvme").iterdir()) == []


def test_a_disk_that_is_only_wanted_is_done_without(stand):
    wanted = ScratchConfig(path=str(stand / "none"), size_gib=0.001, required=False)
    state = ended(stand, job(stand).model_copy(update={"scratch": wanted}))
    result = process.read_json(stand / "job" / "result.json")
    assert (state.code, result["at"]) == (0, str(stand / "inputs"))
    log = (stand / "job" / "launcher.log").read_text()
    assert f"there is no folder {stand / 'none'} on this machine; the job reads its inputs where they are" in log


def test_inputs_larger_than_the_room_that_was_asked_for_are_an_error_with_the_number_to_set(stand):
    with open(stand / "inputs" / "big", "wb") as file:
        file.truncate(GIB)
    ended(stand, job(stand))
    said = report(stand)
    assert "the inputs have 1.00 GiB, scratch.size_gib is 0.001" in said["message"]
    assert said["remedy"] == "Set cluster.scratch.size_gib to 1.1 or more."


def test_a_disk_that_is_not_there_is_named(stand):
    ended(stand, job(stand, path=stand / "nowhere"))
    assert f"there is no folder {stand / 'nowhere'}" in report(stand)["message"]


def test_a_disk_that_fills_up_while_inputs_are_copied_is_a_clear_error(stand):
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root on Linux can mount a small file system")
    disk = stand / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=4", "tmpfs", disk], check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:  # room for four files and folders: the disk is full although bytes are free
        told = job(stand, path=disk).model_dump(mode="json")
        with pytest.raises(
            scratch.Refused, match=r"No space left on device; 0\.00 GiB were needed in .*small, 0\.01 GiB"
        ):
            scratch.stage(told, stand, rank=0, meanwhile=lambda: True)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_copying_ends_when_the_job_is_stopped(stand):
    (stand / "inputs" / "more").write_bytes(b"x" * 2**20)
    with pytest.raises(scratch.Refused, match="it was stopped"):
        scratch.stage(job(stand, size_gib=0.01).model_dump(mode="json"), stand, rank=0, meanwhile=lambda: False)
    assert list((stand / "nvme").iterdir()) == []
