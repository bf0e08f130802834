"""What counts as a hang, and what does not: by a clock that the test moves, and with a real rank that is stopped."""

import json
import os
import signal
import threading
import time

import pytest
from waiting import limit

from tasks.common import process
from tasks.common.process import write_json
from tasks.compute import open_backend
from tasks.compute.job import Job, JobState
from tasks.compute.job_monitor import HangWatch
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, RetryConfig, WatchConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

RUNNING, QUEUED = JobState(state="running"), JobState(state="queued")
WATCH = WatchConfig(hang_seconds=10, hang_factor=5, start_minutes=2)


class Clocked:
    """A job's folder, and a watch over it whose time is the test's."""

    def __init__(self, folder, **fields):
        self.folder, self.now, self.step = folder, 1000.0, 0
        plain = {"name": "train", "token": "3" * 32, "program": "p", "settings": {}, "inputs": {}, "watch": WATCH}
        job = Job(**{**plain, "progress": "LATEST", **fields})
        self.watch = HangWatch(job, folder, poll_seconds=5.0, clock=lambda: self.now)
        self.attempt(1)

    def attempt(self, number, **node):
        write_json(self.folder / "attempt.json", {"attempt": number})
        self.node(code=None)

    def node(self, code, **said):
        write_json(self.folder / "nodes" / "0" / "node.json", {"code": code, **said})

    def beat(self):
        (self.folder / "nodes" / "0" / "beat").write_text(json.dumps({"time": self.now}))

    def steps(self, number, *, each=1.0):
        said = ""
        for _ in range(number):
            self.now += each
            self.step += 1
            self.beat()
            said = said or self.watch.look(RUNNING, [{"step": self.step, "time": self.now}])
        return said

    def passes(self, seconds, state=RUNNING, *, beats=True):
        """Time goes by, in looks of one second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            if beats:
                self.beat()
            said = self.watch.look(state, [])
            if said:
                return said
        return ""


@pytest.fixture
def job(tmp_path):
    return lambda **fields: Clocked(tmp_path, **fields)


def test_no_step_for_the_least_time_is_a_hang_and_the_newest_step_is_named(job):
    clocked = job()
    assert clocked.steps(20) == ""
    assert clocked.passes(10) == ""
    assert clocked.passes(2) == "no step after step 20 for 11 s, where a step takes 1 s"


def test_slow_steps_have_more_time(job):
    clocked = job()
    assert clocked.steps(6, each=20.0) == ""
    assert clocked.passes(100) == ""
    assert "where a step takes 20 s" in clocked.passes(2)


def test_a_few_first_steps_prove_nothing(job):
    clocked = job()
    clocked.steps(4)
    assert clocked.passes(119) == ""
    assert clocked.passes(3) == "nothing moved for 121 s since its last step"


def test_before_the_first_step_the_time_to_start_counts_from_running(job):
    clocked = job()
    assert clocked.passes(600, QUEUED) == ""
    assert clocked.passes(120) == ""
    assert "since the start of its attempt" in clocked.passes(2)


def test_a_job_without_steps_is_left_to_its_time_limit(job):
    assert job(progress="").passes(600) == ""


@pytest.mark.parametrize("mark", ["the leader's mark of the submission before", "no mark"])
def test_steps_of_the_submission_before_are_not_this_ones(job, mark):
    """Where machines share no folder they come late, when the new nodes only begin."""
    clocked = job(submission=2)
    clocked.node(code=None, submission=1, time=1.0)
    if mark == "no mark":
        (clocked.folder / "nodes" / "0" / "node.json").unlink()
    assert clocked.steps(20) == clocked.passes(80) == ""
    clocked.node(code=None, submission=2, time=clocked.now)
    assert clocked.passes(19) == "" and "since the start of its attempt" in clocked.passes(3)
    assert clocked.steps(20) == "" and "no step after step 40" in clocked.passes(12)


def test_a_new_attempt_in_place_has_its_time_to_start(job):
    clocked = job()
    clocked.steps(20)
    clocked.node(code=1)
    assert clocked.passes(60) == ""
    clocked.attempt(2)
    assert clocked.passes(119) == ""
    clocked.steps(5)
    assert clocked.passes(20).startswith("no step after step 25")


def test_saving_after_the_last_step_is_no_hang_for_the_time_to_start(job):
    clocked = job()
    clocked.steps(20)
    write_json(clocked.folder / "progress.json", {"done": 20, "total": 20})
    assert clocked.passes(100) == ""
    write_json(clocked.folder / "progress.json", {"done": 20, "total": 20, "text": "half is written"})
    assert clocked.passes(119) == ""
    assert "nothing moved" in clocked.passes(3)


def test_a_checkpoint_that_is_written_between_steps_is_a_sign_of_life(job):
    clocked = job()
    clocked.steps(20)
    clocked.passes(8)
    (clocked.folder / "LATEST").write_text("step 20")
    assert clocked.passes(9) == ""
    assert clocked.passes(3)


def test_files_that_come_late_are_no_hang_and_a_silent_machine_is_one_later(job):
    clocked = job()
    clocked.steps(20)
    assert clocked.passes(79, beats=False) == ""
    assert clocked.passes(3, beats=False).endswith("and its machine is silent")


@pytest.mark.parametrize("jump", [-7200.0, 7200.0])
def test_a_clock_that_jumps_is_no_hang_and_hides_none(job, jump):
    clocked = job()
    clocked.node(code=None, time=clocked.now)
    clocked.steps(20)
    for _ in range(200):
        clocked.now += 1.0
        clocked.step += 1
        (clocked.folder / "nodes" / "0" / "beat").write_text(json.dumps({"time": clocked.now + jump}))
        assert clocked.watch.look(RUNNING, [{"step": clocked.step, "time": clocked.now + jump}]) == ""
    assert clocked.passes(100).startswith(f"no step after step {clocked.step} ")


def test_an_elastic_job_may_meet_anew(job):
    clocked = job(elastic={"min_nodes": 1, "max_nodes": 2})
    clocked.steps(20)
    assert clocked.passes(129) == ""
    assert clocked.passes(3)


PROGRAM = """
import ctypes, signal, sys, threading, time
from tasks.jobs.node.runtime import main
from tasks.common.process import write_text

def say(path):
    while True:
        path.touch()
        time.sleep(0.01)

def run(rank):
    threading.Thread(target=say, args=[rank.folder / "thread"], daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: None)  # as in training, where a request to stop is answered after the step
    begin = int((rank.folder / "saved").read_text()) if (rank.folder / "saved").exists() else 0
    for step in range(begin, 60):
        rank.metrics(step=step)
        write_text(rank.folder / "saved", str(step))
        time.sleep(0.05)
        while step == {hold} and not begin:
            ctypes.PyDLL(None).sleep(600)
    return {{"began": begin}}

if __name__ == "__main__":
    sys.exit(main(run))
"""
"""At step `hold` of its first start the rank waits in C and keeps Python's lock: it lives, and no thread of it can say a word."""
NEVER, GRACE_SECONDS = -1, 1.0


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """Runs a job that hangs, under the shipped supervisor, and looks at what became of it."""

    def hanging(hold, act):
        (tmp_path / "testjobs").mkdir()
        (tmp_path / "testjobs" / "__init__.py").touch()
        (tmp_path / "testjobs" / "hanging.py").write_text(PROGRAM.format(hold=hold))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        folder, events, hung = tmp_path / "job", [], []
        threading.Thread(target=lambda: hung.append(act(*tenth_step(folder))), daemon=True).start()
        quick = {
            "watch": WatchConfig(hang_seconds=limit(3.0), grace_seconds=GRACE_SECONDS),
            "retry": RetryConfig(back_off_seconds=0.1),
        }
        job = Job(
            name="train", token="3" * 32, program="testjobs.hanging", settings={}, inputs={}, progress="saved", **quick
        )
        journal = StoreJournal(open_store(tmp_path))
        cluster = ClusterConfig()
        watch = Watch(event=events.append)
        result = run(job, backend=open_backend(cluster), folder=folder, journal=journal, watch=watch, cluster=cluster)
        assert result.submissions == 2
        assert result.result["began"] > 0  # it goes on from what was saved, which may lie behind what was told
        said = {event.kind: event.text for event in events}
        assert "hangs: no step after step" in said["hung"]
        assert "It is submitted again" in said["retrying"]
        end = journal.get(f"jobs/{job.token}/0001/end")
        assert (end["failure"], end["message"].startswith("no step after step")) == ("infrastructure", True)
        assert not process.process_started(hung[0])
        return said["hung"]

    return hanging


def tenth_step(folder):
    """The job's folder and its rank's process, once ten steps are recorded."""
    records, path = [], folder / "metrics.jsonl"
    while len(records) < 10:
        time.sleep(0.05)
        records = path.read_text().splitlines() if path.exists() else []
    return folder, json.loads((folder / "ranks" / "0.json").read_text())["pid"]


def test_a_stopped_rank_is_found_ended_and_the_job_goes_on_in_a_new_submission(hanging):
    def stop(folder, pid):
        os.kill(pid, signal.SIGSTOP)
        return pid

    hanging(NEVER, stop)


def test_a_rank_that_holds_the_gil_is_found_by_missing_progress_and_the_job_goes_on_in_a_new_submission(hanging):
    """It is alive to every look at the process: only steps that do not come tell."""
    seen = []

    def look(folder, pid):
        while time.time() - (folder / "thread").stat().st_mtime < 0.5:
            time.sleep(0.01)
        seen.append((process.process_started(pid) is not None, (folder / "exit.json").exists()))
        return pid

    assert "no step after step 12 " in hanging(12, look)
    assert seen == [(True, False)], "alive, and its thread is mute"


def test_steps_without_a_time_are_no_hang_while_they_come(job):
    clocked = job()
    for step in range(1, 12):
        clocked.now += 40.0
        clocked.beat()
        assert clocked.watch.look(RUNNING, [{"step": step}]) == ""


def test_steps_of_an_attempt_before_do_not_count(job):
    """A job that is adopted while it loads its checkpoint: the old steps are in the file, the new ones not yet."""
    clocked = job()
    write_json(clocked.folder / "nodes" / "0" / "node.json", {"code": None, "time": clocked.now})
    old = [{"step": step, "time": clocked.now - 100 + step} for step in range(20)]
    assert clocked.watch.look(RUNNING, old) == ""
    assert clocked.passes(60) == ""
