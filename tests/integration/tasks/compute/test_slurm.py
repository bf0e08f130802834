"""The Slurm backend on a real Slurm of three nodes: how jobs end, are found again, are refused, and are asked about."""

import json
import os
from pathlib import Path

import pytest
import waiting
from slurm_jobs import over, reachable, running, slurm_backend, small, until
from slurm_stand import slurm
from waiting import limit

from tasks.common.errors import JobFailed, Missing
from tasks.common.process import read_json
from tasks.compute import machines_of
from tasks.compute.slurm.commands import NoAnswer
from tasks.config.cluster import ClusterConfig


@pytest.fixture(scope="module")
def cluster():
    with (
        slurm(3, settings="PartitionName=gentle Nodes=ALL MaxTime=60 PriorityTier=1 GraceTime=8") as stand,
        reachable(stand),
    ):
        yield stand


@pytest.fixture
def stand(cluster):
    yield cluster
    cluster.cancel_all()


@pytest.fixture
def counted(tmp_path, monkeypatch, stand):
    """A log of the Slurm commands that are called, from executables before them on PATH."""
    log = tmp_path / "calls"
    log.touch()
    (tmp_path / "bin").mkdir()
    for name in ("squeue", "sinfo", "scontrol", "sbatch", "scancel", "sacct"):
        path = tmp_path / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} >>{log}\nexec /usr/bin/{name} "$@"\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return log


def test_job_runs_to_its_end_and_all_jobs_are_asked_about_by_one_call(tmp_path, stand, counted):
    backend = slurm_backend()
    jobs = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        job = small(tmp_path / name, token=name * 64, memory_gib=0.5, time_limit=600)
        jobs.append((backend.submit(job, tmp_path / name / "job"), tmp_path / name / "job"))
    backend.states(jobs)  # finds out that there is no accounting
    counted.write_text("")
    states = backend.states(jobs)
    assert counted.read_text().split().count("squeue") == 1
    assert {state.state for state in states} <= {"queued", "starting", "running"}
    for handle, folder in jobs:
        last = until(backend, handle, folder, over)[-1]
        assert (last.state, last.code, last.reason, last.failure) == ("ended", 0, "ended", None)
        assert read_json(folder / "result.json")["node"] in stand.nodes


def test_program_that_fails_is_a_failed_slurm_job_with_its_code(tmp_path, stand):
    (tmp_path / "program.py").touch()
    backend, job = slurm_backend(), small(tmp_path, restarts=0)
    (tmp_path / "program.py").write_text("import sys; sys.exit(3)")
    handle = backend.submit(job, tmp_path / "job")
    last = until(backend, handle, tmp_path / "job", over)[-1]
    assert (last.state, last.code, last.failure) == ("ended", 3, None)
    assert "FAILED" in stand.command("squeue", "--states=all", f"--jobs={handle['job']}", "--format=%T")


@pytest.mark.parametrize(
    ("section", "changes", "said"),
    [
        (
            {"partition": "gpu"},
            {},
            "slurm.partition is gpu, which this cluster does not have: it has main, short, urgent",
        ),
        ({}, {"nodes": 4}, "wants 4 nodes of partition main: it has 3. Lower cluster.nodes"),
        ({"partition": "short"}, {"nodes": 2}, "it has 3 and allows 1 a job"),
        (
            {"partition": "short"},
            {"time_limit": 7200.0},
            "time_limit_minutes is 120, partition short allows 1: lower it",
        ),
        (
            {"constraint": "h100"},
            {},
            "refuses slurm.constraint h100: Invalid feature specification. Features .*cpu,stand",
        ),
        ({"reservation": "monday"}, {}, "refuses slurm.reservation monday"),
        ({}, {"memory_gib": 4000.0}, "refuses cluster.memory_gib 4000: Memory specification .* in MiB: 8000"),
        ({}, {"gpus_per_node": 8}, "refuses cluster.gpus_per_node 8"),
        ({}, {"excluded_nodes": ("n9",)}, "refuses cluster.exclude n9: Invalid node name specified. Its nodes: .*n"),
        (
            {},
            {"nodes": 2, "excluded_nodes": ("n1", "n2")},
            "cluster.nodes 2 with .* without n1, n2: Requested node conf",
        ),
        ({"options": ("--no-such-option",)}, {}, "refuses slurm.options --no-such-option: .*unrecognized"),
    ],
)
def test_what_slurm_refuses_is_said_with_the_value_and_the_remedy(tmp_path, stand, section, changes, said):
    backend, job = slurm_backend(**section), small(tmp_path, **changes)
    with pytest.raises(ValueError, match=said):
        backend.submit(job, tmp_path / "job")
    assert backend.find(job, tmp_path / "job") is None, (
        "what was refused is no job, although Slurm keeps a record of it"
    )


def test_job_that_an_administrator_cancels_ends_as_cancelled(tmp_path, stand):
    backend, folder = slurm_backend(), tmp_path / "job"
    handle = backend.submit(small(tmp_path, steps=1000), folder)
    until(backend, handle, folder, running)
    stand.command("scancel", handle["job"])
    last = until(backend, handle, folder, over)[-1]
    assert (last.failure, last.reason) == ("cancelled", "cancelled in Slurm")


def test_cancel_ends_every_process_and_cancelling_again_is_no_error(tmp_path, stand):
    backend, folder = slurm_backend(), tmp_path / "job"
    handle = backend.submit(small(tmp_path, steps=1000), folder)
    until(backend, handle, folder, running)
    pid = waiting.until(lambda: (read_json(folder / "ranks" / "0.json") or {}).get("pid"))
    backend.cancel(handle, folder)
    until(backend, handle, folder, over)
    waiting.until(lambda: not Path(f"/proc/{pid}").exists())
    backend.cancel(handle, folder)


def test_the_same_work_of_another_home_is_neither_found_nor_cancelled(tmp_path, stand):
    backend, homes = slurm_backend(), [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    jobs = [
        small(home, steps=1000, token="f" * 64, home=digits * 3)
        for home, digits in zip(homes, ("0a", "0b"), strict=True)
    ]
    handle = backend.submit(jobs[0], homes[0] / "job")
    until(backend, handle, homes[0] / "job", running)
    assert backend.find(jobs[1], homes[1] / "job") is None
    other = backend.submit(jobs[1], homes[1] / "job")
    backend.cancel(other, homes[1] / "job")
    until(backend, other, homes[1] / "job", over)
    assert backend.states([(handle, homes[0] / "job")])[0].state == "running"


def test_handle_that_was_lost_is_found_by_name_in_every_state(tmp_path, stand):
    backend, folder, job = slurm_backend(), tmp_path / "job", small(tmp_path)
    assert backend.find(job, folder) is None
    handle = backend.submit(job, folder)
    assert backend.find(job, folder) == handle
    assert backend.find(job.model_copy(update={"submission": 2}), folder) is None
    until(backend, handle, folder, over)
    assert backend.find(job, folder) == handle


def test_scheduler_that_hangs_is_unknown_and_the_lost_answer_makes_no_second_job(tmp_path, stand):
    backend, folder, job = slurm_backend(), tmp_path / "job", small(tmp_path, steps=30)
    (tmp_path / "other").mkdir()
    handle = backend.submit(small(tmp_path / "other", token="e" * 64), tmp_path / "other" / "job")
    stand.command("scontrol", "show", "partition")
    backend._login = _Late(backend._login, stand)
    with pytest.raises(NoAnswer, match="does not answer"):
        backend.submit(job, folder)  # the controller takes the connection and stands still
    assert backend.states([(handle, folder)])[0].state == "unknown"
    with pytest.raises(NoAnswer):
        backend.find(job, folder)
    stand.continue_controller()
    found = waiting.until(lambda: backend.find(job, folder), why="the submission whose answer was lost had arrived")
    assert len(stand.command("squeue", "--states=all", "--noheader", f"--name={job.submission_id}").splitlines()) == 1
    assert until(backend, found, folder, over)[-1].code == 0


class _Late:
    """A login whose scheduler stops just before sbatch asks it, and that waits no longer than a test may."""

    def __init__(self, login, stand):
        self._login, self._stand = login, stand

    def run(self, words, *, seconds=0.0, **more):
        if words[0] == "sbatch":
            self._stand.stop_controller()
        return self._login.run(words, seconds=limit(3.0), **more)

    def __getattr__(self, name):
        return getattr(self._login, name)


def test_submission_that_is_there_twice_runs_once_and_is_cancelled_whole(tmp_path, stand):
    backend, folder, job = slurm_backend(), tmp_path / "job", small(tmp_path, steps=20)
    handle = backend.submit(job, folder)
    twin = {**handle, "job": stand.command("sbatch", "--parsable", str(folder / "job.sbatch"))}
    assert [until(backend, each, folder, over)[-1].code for each in (handle, twin)] == [0, 0]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(20))
    codes = stand.command("squeue", "--states=all", "--noheader", f"--name={job.submission_id}", "--Format=exit_code")
    assert sorted(codes.split()) == ["0", str(122 << 8)], "the twin ended at once"
    again = job.model_copy(update={"submission": 2})
    (folder / "nodes" / "0" / "exit.json").unlink()
    handle = backend.submit(again, folder)
    stand.command("sbatch", "--hold", str(folder / "job.sbatch"))
    backend.cancel(handle, folder)
    until(backend, handle, folder, over)
    assert not stand.command("squeue", "--noheader", f"--name={again.submission_id}", "--states=PENDING,RUNNING")


@pytest.mark.parametrize("partition", ["main", "gentle"])
def test_preempted_job_without_requeue_ends_as_preempted(tmp_path, stand, partition):
    backend, folder = slurm_backend(requeue=False, partition=partition), tmp_path / "job"
    handle = backend.submit(small(tmp_path, steps=1000, exclusive=True), folder)
    until(backend, handle, folder, running)
    waiting.until((folder / "metrics.jsonl").exists)
    stand.command("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    last = until(backend, handle, folder, over)[-1]
    assert (last.failure, last.reason) == ("preempted", "preempted by another job")
    assert (folder / "saved").exists(), "the rank was told before it was ended"


@pytest.mark.long
def test_preempted_job_that_slurm_starts_again_is_not_ended_by_its_old_marks(tmp_path, stand):
    backend, folder = slurm_backend(), tmp_path / "job"
    handle = backend.submit(small(tmp_path, steps=60, exclusive=True), folder)
    until(backend, handle, folder, running)
    waiting.until((folder / "metrics.jsonl").exists)
    stand.command("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    seen = until(backend, handle, folder, over)
    again = [state for state in seen[1:] if state.state == "queued"]
    assert again and "started again by Slurm 1 time(s)" in again[-1].reason
    assert not [state for state in seen[:-1] if state.over]
    assert (seen[-1].code, seen[-1].attempts) == (0, 2)
    assert read_json(folder / "result.json")["attempt"] == 2
    assert "started again by Slurm" in (folder / "launcher.log").read_text()


def test_image_that_cannot_be_pulled_is_said(tmp_path, stand, monkeypatch):
    """pyxis cannot be installed here: an srun that speaks as it does stands before Slurm's own, on the node too."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(
        """#!/bin/sh
test "$1" = --help && { echo "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH"; exit 0; }
echo "pyxis: importing docker image: x" >&2
echo "slurmstepd: error: pyxis: failed to import docker image" >&2
echo "slurmstepd: error: pyxis:     [ERROR] URL https://x returned error code: 404 Not Found" >&2
exit 1
"""
    )
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    backend, folder = slurm_backend(), tmp_path / "job"
    last = until(backend, backend.submit(small(tmp_path, image="reg#x:1"), folder), folder, over)[-1]
    assert (last.code, last.failure) == (1, "missing")
    assert last.reason.startswith("the image could not be started: failed to import docker image; ")
    assert "404 Not Found" in last.reason


def test_image_on_a_cluster_without_pyxis_and_an_image_file_that_is_not_there(tmp_path, stand, monkeypatch):
    with pytest.raises(Missing, match=r"cluster.image is reg#x:1, and srun .* pyxis is not installed"):
        slurm_backend().submit(small(tmp_path, image="reg#x:1"), tmp_path / "job")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho --container-image\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ValueError, match=r"cluster.image is /no/x.sqsh, and there is no such file .*enroot import"):
        slurm_backend().submit(small(tmp_path, image="/no/x.sqsh"), tmp_path / "job")


def test_job_is_told_to_save_before_the_time_limit(tmp_path, stand):
    backend, folder = slurm_backend(partition="short", signal_seconds=25), tmp_path / "job"
    handle = backend.submit(small(tmp_path, steps=1000, time_limit=50.0), folder)
    last = until(backend, handle, folder, over, 90)[-1]
    assert (last.code, last.failure) == (124, "timeout")
    assert (folder / "saved").exists()
    assert "the time limit comes" in (folder / "launcher.log").read_text()


def test_node_that_does_not_see_the_job_folder_is_said(tmp_path, stand):
    backend, folder = slurm_backend(options=("--hold",)), tmp_path / "job"
    handle = backend.submit(small(tmp_path), folder)
    held = backend.states([(handle, folder)])[0]
    assert (held.state, held.reason) == ("queued", "it is held: scontrol release lets it go")
    folder.rename(tmp_path / "elsewhere")
    stand.command("scontrol", "release", handle["job"])
    last = until(backend, handle, folder, over)[-1]
    assert (last.state, last.failure) == ("ended", "missing")
    assert "does not see the job folder" in last.reason


def test_array_runs_each_element_and_its_state_is_that_of_all(tmp_path, stand):
    backend, folder = slurm_backend(), tmp_path / "a job's 100%"
    handle = backend.submit(small(tmp_path, array=3), folder)
    assert until(backend, handle, folder, over)[-1].code == 0
    assert [each["index"] for each in read_json(folder / "result.json")["elements"]] == ["0", "1", "2"]


def test_array_with_an_element_that_failed_has_failed_and_has_no_result(tmp_path, stand):
    (tmp_path / "program.py").touch()
    backend, job, folder = slurm_backend(), small(tmp_path, array=3, restarts=0), tmp_path / "job"
    (tmp_path / "program.py").write_text("import os, sys; sys.exit(os.environ['HEADWAY_ARRAY_INDEX'] == '1')")
    last = until(backend, backend.submit(job, folder), folder, over)[-1]
    assert (last.code, last.reason) == (1, "ended: element(s) 1")
    assert not (folder / "result.json").exists()


def test_answer_of_sbatch_that_is_no_id_is_an_error(tmp_path, stand, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(JobFailed, match="answered Submitted, which is no job's id"):
        slurm_backend().submit(small(tmp_path), tmp_path / "job")


def test_a_script_runs_beside_the_job_on_the_machine_it_is_for(stand, tmp_path):
    backend, folder = slurm_backend(), tmp_path / "job"
    handle = backend.submit(small(tmp_path, 600, nodes=2), folder)
    until(backend, handle, folder, running)
    machines = machines_of(ClusterConfig(backend="slurm"))
    machines.execute("n2", f"echo $SLURMD_NODENAME of $SLURM_JOB_ID > {tmp_path}/where", handle=handle)
    assert (tmp_path / "where").read_text() == f"n2 of {handle['job']}\n"
    with pytest.raises(Missing, match="ended with exit code 3"):
        machines.execute("n1", "exit 3", handle=handle)
    backend.cancel(handle, folder)
    until(backend, handle, folder, over)
