"""The book of jobs, cancelling from outside, and settling what nobody supervises: on the real local backend."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripted_backend import RUNNING, ScriptedBackend, done, fails
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled, JobFailed, Missing, Unknown
from tasks.compute import open_backend
from tasks.compute.job import Job, JobState, NotAccepted, before_submission, write_folder
from tasks.compute.jobs_book import cancel_job, find_job, list_jobs, reconcile
from tasks.compute.polling import Watch
from tasks.compute.submission import newest, settle
from tasks.compute.supervisor import run
from tasks.compute.supervisor_lock import is_supervised
from tasks.config.backends.slurm import SlurmConfig
from tasks.config.cluster import ClusterConfig, RetryConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    rank.metrics(step=3)
    while not (rank.folder.parent.parent / "go").exists():
        time.sleep(0.02)
    if "fails" in rank.settings:
        raise ValueError("steps must be above 0")
    return {"done": True}

if __name__ == "__main__":
    sys.exit(main(run))
"""
ORCHESTRATOR = """
import sys
from pathlib import Path
from tasks.config.cluster import ClusterConfig
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.supervisor import run
from tasks.compute.polling import Watch
from tasks.registry.records import StoreJournal
from tasks.storage import open_store
home, job, cluster = Path(sys.argv[1]), Job.model_validate_json(sys.argv[2]), ClusterConfig()
run(job, backend=open_backend(cluster), folder=home / "jobs" / job.id, journal=StoreJournal(open_store(home)),
    watch=Watch(flow_run="flow-7"), cluster=cluster)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "testjobs").mkdir()
    (tmp_path / "testjobs" / "__init__.py").touch()
    (tmp_path / "testjobs" / "waits.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for job in (tmp_path / "jobs").glob("*/job.json"):
        process.stop(job.parent)


@pytest.fixture
def journal(home):
    return StoreJournal(open_store(home))


def job(token="a1" * 16, **fields):
    return Job(**{"name": "train", "token": token, "program": "testjobs.waits", "settings": {}, "inputs": {}, **fields})


@pytest.fixture
def orphan(home, journal):
    """A job that runs, whose orchestrator was killed."""

    def start(**fields):
        work = job(**fields)
        killed = subprocess.Popen(
            [sys.executable, "-c", ORCHESTRATOR, str(home), work.model_dump_json()],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{home}"},
        )
        folder = home / "jobs" / work.id
        until(lambda: (folder / "metrics.jsonl").exists() and find_job(home, work.id, journal).state == "running")
        assert is_supervised(folder)
        assert [(e.flow_run, e.supervised) for e in list_jobs(home, journal)] == [("flow-7", True)]
        assert reconcile(home, journal) == []
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        return work

    return start


def adopt(home, journal, work):
    cluster, folder = ClusterConfig(), home / "jobs" / work.id
    return run(work, backend=open_backend(cluster), folder=folder, journal=journal, watch=Watch(), cluster=cluster)


def test_an_orphan_is_told_of_with_its_commands_and_adopted(home, journal, orphan):
    work = orphan()
    entry = find_job(home, "train-a1a1", journal)
    assert (entry.id, entry.stage, entry.backend, entry.token) == (work.id, "train", "local", work.token)
    assert (entry.submission, entry.attempt, entry.step, entry.state) == (1, 1, 3, "running")
    assert (entry.supervised, entry.over, len(entry.nodes)) == (False, False, 1)
    found = reconcile(home, journal)
    assert [one.verdict for one in found] == ["orphan"]
    assert f"headway job cancel {work.id}" in found[0].text
    assert newest(work.token, journal).outcome == "open"
    (home / "go").touch()
    assert adopt(home, journal, work).adopted
    assert find_job(home, work.id, journal).state == "ended"
    assert [one.verdict for one in reconcile(home, journal)] == ["waits"]
    settle(work.token, journal, "done", folder=home / "jobs" / work.id)
    assert find_job(home, work.id, journal).state == "done"
    assert reconcile(home, journal) == []


def test_an_orphan_is_cancelled_from_outside_and_leaves_no_process(home, journal, orphan):
    work = orphan()
    handle = process.read_json(home / "jobs" / work.id / "handle.json")
    everyone = [handle["pid"], *process.descendants(handle["pid"])]
    assert cancel_job(home, work.id, journal).state == "running"
    assert not any(process.process_started(pid) for pid in everyone)
    assert find_job(home, work.id, journal).state == "cancelled"
    with pytest.raises(ValueError, match="is over: it is cancelled"):
        cancel_job(home, work.id, journal)


def test_what_failed_while_nobody_looked_is_settled_with_its_class_and_goes_on_in_a_new_submission(
    home, journal, orphan
):
    work = orphan(settings={"fails": True})
    (home / "go").touch()
    until(lambda: not process.alive(process.read_json(home / "jobs" / work.id / "handle.json")))
    found = reconcile(home, journal)
    assert [(one.verdict, one.entry.failure) for one in found] == [("failed", "user")]
    assert "steps must be above 0" in found[0].text
    assert reconcile(home, journal) == []
    (home / "testjobs" / "waits.py").write_text(PROGRAM.replace('"fails" in rank.settings', "False"))
    assert adopt(home, journal, work).submissions == 2


class Home:
    """A home whose jobs are of a scripted scheduler."""

    def __init__(self, home, journal, *plays):
        self.home, self.journal, self.backend = home, journal, ScriptedBackend(*plays)
        self.cluster = ClusterConfig(name="c", backend="slurm", slurm=SlurmConfig(partition="gpu"))
        self.opened = []

    def opener(self, config):
        self.opened.append(config)
        return self.backend

    def run(self, work, **watch):
        folder, told = self.home / "jobs" / work.id, Watch(**watch)
        return run(work, backend=self.backend, folder=folder, journal=self.journal, watch=told, cluster=self.cluster)

    def left_alone(self, work):
        """A job that runs and is not supervised."""
        folder = self.home / "jobs" / work.id
        with pytest.raises(KeyboardInterrupt):
            self.run(work, cancelled=interrupt, stop_on_interrupt=lambda: False)
        return folder


def interrupt():
    raise KeyboardInterrupt


def in_thread(there, work):
    """A supervisor whose failure is kept."""
    failed = []

    def supervise():
        with pytest.raises(JobFailed) as error:
            there.run(work)
        failed.append(error.value)

    thread = threading.Thread(target=supervise)
    thread.start()
    return thread, failed


def test_a_scheduler_is_asked_only_on_demand_once_for_all_its_jobs(home, journal):
    there = Home(home, journal, lambda job, folder, look: JobState(state="queued", reason="Resources"))
    for token in ("b" * 32, "c" * 32):
        there.left_alone(job(token))
    assert [one.verdict for one in reconcile(home, journal, opener=there.opener)] == ["unknown", "unknown"]
    assert {entry.state for entry in list_jobs(home, journal)} == {"unknown"}
    assert there.opened == []
    there.backend.calls.clear()
    entries = list_jobs(home, journal, ask=True, opener=there.opener)
    assert {(entry.state, entry.reason, entry.backend) for entry in entries} == {("queued", "Resources", "slurm")}
    assert (there.backend.calls, there.opened) == ([2], [there.cluster])
    found = reconcile(home, journal, ask=True, opener=there.opener)
    assert [one.verdict for one in found] == ["orphan", "orphan"]
    there.backend.away = True
    assert [one.verdict for one in reconcile(home, journal, ask=True, opener=there.opener)] == ["unknown", "unknown"]


def test_a_cancel_that_the_scheduler_does_not_hear_changes_nothing(home, journal):
    there = Home(home, journal, lambda job, folder, look: RUNNING)
    folder = there.left_alone(job())
    there.backend.away = True
    with pytest.raises(Missing):
        cancel_job(home, job().id, journal, opener=there.opener)
    assert not (folder / "cancelled.json").exists()
    assert newest(job().token, journal).outcome == "open"


def test_a_supervised_job_that_is_cancelled_by_hand_ends_as_cancelled(home, journal):
    there = Home(home, journal, lambda job, folder, look: RUNNING, done)
    thread, failed = in_thread(there, job())
    until(lambda: there.backend.jobs and there.backend.calls)
    cancel_job(home, job().id, journal, opener=there.opener)
    thread.join(limit(20))
    assert failed[0].failure == "cancelled"
    assert find_job(home, job().id, journal).state == "cancelled"


def test_a_job_that_waits_for_its_next_submission_is_cancelled_too(home, journal):
    there = Home(home, journal, fails("preempted"), done)
    work = job(retry=RetryConfig(back_off_seconds=60))
    thread, failed = in_thread(there, work)
    until(
        lambda: (home / "jobs" / work.id).is_dir() and newest(work.token, journal) and newest(work.token, journal).end
    )
    assert find_job(home, work.id, journal).state == "retrying"
    cancel_job(home, work.id, journal, opener=there.opener)
    thread.join(limit(20))
    assert "while it waited" in failed[0].message
    assert [j.submission for j in there.backend.jobs] == [1]


def test_a_job_that_was_never_accepted_is_closed_and_submitted_anew(home, journal):
    class LoggedOut(ScriptedBackend):
        def submit(self, job, folder):
            with before_submission():
                self._answer()
            return self.take(job, folder)

    there = Home(home, journal, done)
    there.backend = LoggedOut(done, done)
    there.backend.away = True
    with pytest.raises(Missing) as raised:
        there.run(job())
    assert type(raised.value) is Missing
    entry = find_job(home, job().id, journal)
    assert (entry.over, entry.failure) == (True, "missing") and "never accepted" in entry.reason
    assert reconcile(home, journal, ask=True, opener=there.opener) == []
    there.backend.away = False
    there.run(job())
    assert [j.submission for j in there.backend.jobs] == [2]


def test_a_further_submission_that_is_refused_for_good_is_not_waited_for(home, journal):
    """As by the machine that takes a lost one's place, and may not use the store: `silent_minutes` are ten."""

    class Refusing(ScriptedBackend):
        def submit(self, job, folder):
            if job.submission > 1:
                raise NotAccepted(Missing("no right to the store", remedy="Grant it."), final=True)
            return self.take(job, folder)

    there = Home(home, journal, fails("preempted"))
    there.backend = Refusing(fails("preempted"))
    began = time.monotonic()
    with pytest.raises(Missing, match="no right to the store"):
        there.run(job(retry=RetryConfig(back_off_seconds=0)))
    assert time.monotonic() - began < limit(60)
    assert journal.get(f"jobs/{job().token}/0002/end")["message"] == "never accepted: no right to the store"


def test_a_scheduler_that_does_not_answer_is_told_with_its_reason(home, journal):
    there = Home(home, journal, lambda job, folder, look: RUNNING)
    there.left_alone(job())
    (asked,) = reconcile(home, journal)
    assert "its scheduler was not asked. To ask it: headway reconcile" in asked.text
    there.backend.away = True
    (asked,) = reconcile(home, journal, ask=True, opener=there.opener)
    assert "gave no answer (no route)" in asked.text and "To ask it" not in asked.text


def test_a_stage_means_its_job_that_is_not_over(home, journal):
    first, second = (job(token + "0" * 30) for token in ("d1", "d2"))
    Home(home, journal, done).run(first)
    settle(first.token, journal, "done")  # as its stage does
    Home(home, journal, lambda job, folder, look: RUNNING).left_alone(second)
    assert find_job(home, "train", journal).token == second.token
    Home(home, journal, lambda job, folder, look: RUNNING).left_alone(job("d3" + "0" * 30))
    with pytest.raises(ValueError, match="may mean train-d20000000000, train-d30000000000"):
        find_job(home, "train", journal)


def test_a_name_means_one_job(home, journal):
    for token in ("d1" + "0" * 30, "d2" + "0" * 30):
        write_folder(job(token), home / "jobs" / job(token).id)
    assert find_job(home, "train-d1", journal).token.startswith("d1")
    assert find_job(home, "d200", journal).token.startswith("d2")
    assert find_job(home, "headway-train-d10000000000-1", journal).token.startswith("d1")
    with pytest.raises(ValueError, match="may mean train-d10000000000, train-d20000000000"):
        find_job(home, "train", journal)
    with pytest.raises(Unknown, match="no job 'evaluate'"):
        find_job(home, "evaluate", journal)


def test_an_intent_that_nothing_came_of_is_said_to_be_one(home, journal):
    work, folder = job(), home / "jobs" / job().id
    write_folder(work, folder)
    process.write_json(folder / "cluster.json", ClusterConfig().model_dump(mode="json"))
    journal.put(f"jobs/{work.token}/0001/intent", {"job": work.model_dump(mode="json"), "time": time.time()})
    assert [one.verdict for one in reconcile(home, journal)] == ["not_submitted"]


def test_the_mark_of_an_end_is_not_believed_where_the_scheduler_starts_again(home, journal):
    """Slurm put a preempted job back into its queue: the mark of the first start's end still lies there."""
    work = job(token="b2" * 16)
    slurm = ClusterConfig(backend="slurm", slurm=SlurmConfig(partition="main"))
    folder = home / "jobs" / work.id
    backend = ScriptedBackend(lambda job, folder, look: RUNNING)
    with pytest.raises(Cancelled):
        told = Watch(cancelled=lambda: bool(backend.jobs), stop_on_interrupt=lambda: False)
        backend.cancel = lambda handle, folder: (_ for _ in ()).throw(Missing("away"))
        run(work, backend=backend, folder=folder, journal=journal, watch=told, cluster=slurm)
    process.write_json(folder / "nodes" / "0" / "exit.json", {"code": 143, "reason": "cancelled", "attempts": 1})
    assert [one.verdict for one in reconcile(home, journal)] == ["unknown"]
    assert newest(work.token, journal).outcome == "open"
