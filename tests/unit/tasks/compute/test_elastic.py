"""An elastic job's parts: what their states make of the job, which come again, and what was written of their submissions."""

import dataclasses
import time

import pytest

from tasks.common.errors import Missing
from tasks.common.process import write_json
from tasks.compute.elastic import Part, Seen, bad_machines, state_of
from tasks.compute.job import Admission, Job, JobState
from tasks.compute.ssh.elastic import SshElastic, _in_order, _may_come
from tasks.compute.ssh.hosts import Host
from tasks.compute.ssh.rounds import Look, Placed, Silence
from tasks.config.cluster import ElasticConfig

pytestmark = pytest.mark.unit
JOB = Job(
    name="train", token="ab" * 16, program="tasks.jobs.train", settings={}, inputs={}, progress="checkpoints/LATEST",
    elastic=ElasticConfig(min_nodes=1, max_nodes=3), restarts=1,
)  # fmt: skip
HOSTS = (Host("a", "a"), Host("b", "b"), Host("c", "c"))
PLACED = Placed(JOB.submission_id, HOSTS, "started")
LOST = JobState(state="lost", reason="it is gone", failure="node")


def seen(folder, *states):
    return [Seen(Part(JOB, folder, number), state, "Resources") for number, state in enumerate(states)]


def state(folder, *states, coming=0):
    ended = []
    result = state_of(JOB, folder, seen(folder, *states), again=lambda gone: coming, end=ended.extend)
    return result, ended


def name_bad(folder, name, type_="NotQualified"):
    write_json(folder / "errors" / f"node-{name}.json", {"class": "node", "type": type_, "nodes": [name]})


@pytest.mark.parametrize(
    "states, coming, expected, said",
    [
        (("running", "queued", "gone"), 1, "running", "1 of at most 3 machines"),
        (("running", "ending", "running"), 0, "running", ""),
        (("starting", "queued", "gone"), 0, "starting", "1 of at most 3 machines boot or are made ready"),
        (("queued", "queued", "gone"), 0, "queued", "its machines wait: Resources"),
        (("gone", "gone", "gone"), 2, "queued", "2 machine(s) are submitted again"),
        (("gone", "gone", "gone"), 0, "lost", "nobody knows its machines any more"),
    ],
)
def test_the_state_of_a_job_is_made_of_those_of_its_parts(tmp_path, states, coming, expected, said):
    result, _ = state(tmp_path, *states, coming=coming)
    assert (result.state, result.reason) == (expected, said)


def test_a_machine_that_a_check_named_is_in_the_state_and_one_that_was_lost_is_not(tmp_path):
    (tmp_path / "errors").mkdir()
    name_bad(tmp_path, "n3")
    name_bad(tmp_path, "n4", "NodeLost")
    assert list(bad_machines(tmp_path)) == ["n3"]
    assert state(tmp_path, "running", "gone", "gone")[0].reason.endswith("; without n3, which checks found bad")


def test_when_nobody_is_left_the_last_end_is_the_jobs(tmp_path):
    (tmp_path / "rendezvous").mkdir()
    known = [
        dataclasses.replace(one, over=JobState(state="ended", code=code, reason=f"{code}"), at=at)
        for one, code, at in zip(seen(tmp_path, "gone", "gone", "gone"), (1, 2, 3), (5.0, 9.0, 7.0), strict=True)
    ]
    result = state_of(JOB, tmp_path, known, again=lambda gone: 0, end=lambda parts: None)
    assert (result.state, result.code) == ("ended", 2)
    assert state(tmp_path, "running", "queued")[0] == result.model_copy(update={"attempts": 1}), "it stays the end"


def test_after_its_end_what_waits_is_ended_at_once_and_what_runs_gets_a_moment(tmp_path):
    (tmp_path / "rendezvous").mkdir()
    write_json(tmp_path / "rendezvous" / "exit.json", {"code": 0, "reason": "ended", "ended": time.time()})
    result, ended = state(tmp_path, "running", "queued", "gone")
    assert (result.state, [one.state for one in ended]) == ("running", ["queued"])
    write_json(tmp_path / "rendezvous" / "exit.json", {"code": 0, "reason": "ended", "ended": time.time() - 60})
    result, ended = state(tmp_path, "running", "queued", "gone")
    assert (result.state, result.code, len(ended)) == ("ended", 0, 2)


def test_submissions_of_a_part_are_counted_since_the_job_got_on(tmp_path):
    part = Part(JOB, tmp_path, 2)
    assert (part.begin(), part.tries(), part.unheard()) == (True, 1, True)
    assert (part.begin(), part.tries()) == (True, 2)
    part.withdraw()
    assert part.tries() == 1
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("25")
    assert (part.tries(), part.begin(), part.tries()) == (0, True, 1)
    assert Part(JOB, tmp_path, 1).tries() == 0


def test_those_that_qualified_before_come_first():
    job = JOB.model_copy(update={"admission": Admission(proven=("c",), settings={})})
    assert [host.name for host in _in_order(job, HOSTS)] == ["c", "a", "b"]
    assert job.spec_digest == JOB.spec_digest


def may(folder, reason="", look=None):
    over = JobState(state="ended", code=1, reason=reason) if reason else None
    gone = Seen(Part(JOB, folder, 1), "gone", over=over)
    return _may_come(gone, PLACED, {HOSTS[1]: look or Look("boot-1")})


def test_which_machines_of_a_list_come_again(tmp_path):
    part = Part(JOB, tmp_path, 1)
    part.place.mkdir(parents=True)
    write_json(part.place / "handle.json", {"pid": 1, "boot_id": "boot-1", "owner": JOB.submission_id})
    assert may(tmp_path) and may(tmp_path, "ended") and may(tmp_path, "it is gone")
    assert not may(tmp_path, "timeout")
    assert not may(tmp_path, "cancelled") and may(tmp_path, "cancelled", Look("boot-2")), "it was booted since"
    for _ in range(JOB.restarts + 1):
        assert may(tmp_path)
        part.begin()
    assert not may(tmp_path), "it was tried often enough"
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "LATEST").write_text("25")
    assert may(tmp_path)
    (tmp_path / "errors").mkdir()
    name_bad(tmp_path, "b")
    assert not may(tmp_path)


def test_a_part_on_a_machine_of_a_list_is_judged_by_its_marks_and_its_beat(tmp_path):
    part, away = Part(JOB, tmp_path, 1), Missing("no answer", remedy="")
    elastic = SshElastic(HOSTS, None, Silence())

    def judged(look):
        return elastic._seen(part, HOSTS[1], look)

    assert judged(Look("boot-1")).state == judged(away).state == "gone"
    part.place.mkdir(parents=True)
    handle = {"pid": 7, "started": "9", "boot_id": "boot-1", "owner": JOB.submission_id}
    write_json(part.place / "handle.json", {**handle, "owner": "headway-train-abababababab-0"})
    assert judged(Look("boot-1", {7: "9"})).state == "gone", "of an earlier submission"
    write_json(part.place / "handle.json", handle)
    assert judged(Look("boot-1", {7: "9"})).state == "starting", "it measures itself, or waits"
    write_json(part.place / "node.json", {"submission": 1})
    assert judged(Look("boot-1", {7: "9"})).state == judged(away).state == "running"
    assert judged(Look("boot-1")).state == "running", "its end may be on its way"
    ended = {"code": 76, "reason": "ended", "attempts": 2, "ended": 5.0, "owner": JOB.submission_id}
    write_json(part.place / "exit.json", ended)
    gone = judged(Look("boot-1"))
    assert (gone.state, gone.over.code, gone.at) == ("gone", 76, 5.0)
