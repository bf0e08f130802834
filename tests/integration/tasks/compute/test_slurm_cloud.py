"""The Slurm backend on nodes that boot when a job wants them, under a Slurm that soon forgets finished jobs."""

import time

import pytest
from slurm_jobs import over, reachable, running, slurm_backend, small, until
from slurm_stand import slurm
from waiting import limit

from tasks.common.process import read_json


@pytest.fixture(scope="module")
def stand():
    with slurm(2, boot_seconds=4, min_job_age=2) as stand, reachable(stand):
        yield stand


@pytest.mark.long
def test_node_that_boots_is_starting_and_a_forgotten_job_is_decided_by_its_marks(tmp_path, stand):
    backend, folder = slurm_backend(), tmp_path / "job"
    handle = backend.submit(small(tmp_path), folder)
    seen = until(backend, handle, folder, over, 120)
    states = [state.state for state in seen]
    assert "starting" in states and states[-1] == "ended"
    booting = next(state for state in seen if state.state == "starting")
    assert booting.reason.startswith("its nodes boot or are made ready: n")
    assert read_json(folder / "result.json")

    (tmp_path / "lost").mkdir()
    lost, job = tmp_path / "lost" / "job", small(tmp_path / "lost", steps=10_000, token="9" * 64)
    gone = backend.submit(job, lost)
    until(backend, gone, lost, running)
    while not (lost / "metrics.jsonl").exists():
        time.sleep(0.05)
    stand.command("scancel", "--signal=KILL", "--full", gone["job"])
    assert until(backend, gone, lost, over)[-1].state == "ended"
    (lost / "nodes" / "0" / "exit.json").unlink(missing_ok=True)  # as a machine without power leaves it
    deadline = time.monotonic() + limit(150)
    while stand.command("squeue", "--noheader", "--states=all"):
        assert time.monotonic() < deadline, "Slurm forgets after MinJobAge, at its next look (60 s)"
        time.sleep(0.5)
    ended, vanished = backend.states([(handle, folder), (gone, lost)])
    assert (ended.state, ended.code) == ("ended", 0)
    assert (vanished.state, vanished.reason) == ("lost", "Slurm does not know the job any more")
    assert backend.find(job, lost) == gone, "the mark of its start is still there"
