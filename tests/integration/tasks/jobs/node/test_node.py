"""The agents of a job's machines: two of them on this one, as a backend starts them, and what each makes of the other's fate."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from two_machines import Machines, belonging
from waiting import limit, until

from tasks.common.process import process_started, read_json, write_json
from tasks.config.cluster import WatchConfig
from tasks.jobs.node.launching import end_leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc, which Linux has")
PROGRAM = """
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    {body}

if __name__ == "__main__":
    sys.exit(main(run))
"""
WAIT = "time.sleep(60)"
STORE = """
from torch.distributed import TCPStore
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(address, port, is_master=False, wait_for_workers=False)
return {"address": address, "keys": store.list_keys(), "cache": os.environ["TORCHINDUCTOR_CACHE_DIR"]}
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(90)"], start_new_session=True)
open(os.path.join(os.environ["HEADWAY_JOB"], "up-" + os.environ.get("RANK", "0")), "w").write(str(hidden.pid))
time.sleep(90)
"""


def program(body, *, torch=False):
    mark = "# fork: jobs" if torch else ""
    return mark + PROGRAM.format(body=body.replace("\n", "\n    "))


@pytest.fixture
def machines(tmp_path):
    stand = Machines(tmp_path)
    yield stand
    stand.end()


def test_a_rank_that_fails_is_started_again_on_both_machines_with_the_real_torchrun(tmp_path):
    machines = Machines(tmp_path, torch=True)
    body = 'if rank.attempt == 1 and rank.rank == 1: raise OSError("a link")\nreturn {"attempt": rank.attempt}'
    try:
        ended = machines.run(machines.job(program(body, torch=True)))
    finally:
        machines.end()
    assert [(end["code"], end["reason"]) for end in ended] == [(0, "ended")] * 2
    assert ended[0]["attempts"] == 2
    assert machines.file("result.json") == {"attempt": 2}
    assert machines.file("errors/rank-1.json")["class"] == "infrastructure"
    assert not list((machines.folder / "errors").glob("node-*"))


def test_what_the_ranks_of_one_machine_meet_in_is_never_unpickled(tmp_path, monkeypatch):
    """torch's store has no password: where its agents load their state from it, whoever reaches the port runs code as they."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it in a process that compiled something
    machines = Machines(tmp_path, torch=True)
    try:
        machines.run(machines.job(program(STORE, torch=True), nodes=1, ranks_per_node=2), TMPDIR=str(tmp_path))
    finally:
        machines.end()
    result = machines.file("result.json")
    assert result["address"] == "127.0.0.1" and result["keys"], result
    assert [key for key in result["keys"] if "torch.rendezvous." in key] == []
    cache = Path(result["cache"])
    assert cache.parent == tmp_path and cache.stat().st_mode & 0o777 == 0o700, "libraries are loaded from it"


def test_a_compile_cache_that_somebody_else_made_is_not_used(machines, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / f"headway-compile-{os.geteuid()}").symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").mkdir()
    (ended,) = machines.run(machines.job(program("return {}"), nodes=1, restarts=0), TMPDIR=str(tmp_path))
    assert ended["code"] != 0 and not (machines.folder / "result.json").exists()
    report = machines.file("errors/node-n0.json")
    assert "is somebody else's: delete it" in report["message"] and "TORCHINDUCTOR_CACHE_DIR" in report["remedy"], (
        report
    )


def test_a_machine_whose_part_ended_well_comes_again_when_the_leader_needs_it(machines):
    body = 'if rank.rank == 0:\n    time.sleep(2)\n    if rank.attempt == 1: raise OSError("late")\nreturn {}'
    ended = machines.run(machines.job(program(body)))
    assert [end["code"] for end in ended] == [0, 0]
    assert ended[0]["attempts"] == 2
    assert machines.file("nodes/1/node.json")["attempt"] == 2


def test_a_users_error_is_not_tried_again_on_any_machine(machines):
    ended = machines.run(machines.job(program('if rank.rank == 1: raise ValueError("batch 7")\ntime.sleep(60)')))
    assert ended[0]["attempts"] == 1
    assert ended[0]["code"] != 0
    assert machines.file("errors/rank-1.json")["message"] == "batch 7"
    assert belonging(machines.folder) == []


def test_a_machine_that_is_gone_is_named(machines):
    machines.silent = 4
    job = machines.job(program(WAIT))
    machines.write(job)
    machines.start(job, 0, 1)
    machines.ranks_run(2)
    machines.lose(1)
    ended = machines.ended(0)
    said = machines.file("errors/node-n1.json")
    assert (said["class"], said["nodes"], said["type"]) == ("node", ["n1"], "NodeLost")
    assert (ended["attempts"], ended["reason"]) == (1, "ended")
    assert ended["code"] != 0
    assert belonging(machines.folder) == []


def test_a_fault_of_a_machine_that_follows_ends_the_job_on_all_and_names_it(machines, tmp_path):
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text('#!/bin/sh\n[ "$HEADWAY_NODE_NAME" = n1 ] && [ -e "$0.broken" ] && exit 15\nexit 0\n')
    smi.chmod(0o755)
    job = machines.job(program(WAIT), watch=WatchConfig(probe_seconds=0.3, grace_seconds=1))
    machines.write(job)
    machines.start(job, 0, 1, PATH=f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    machines.ranks_run(2)
    Path(f"{smi}.broken").touch()
    assert machines.ended(0)["attempts"] == 1
    said = machines.file("errors/node-n1.json")
    assert (said["type"], said["class"], said["nodes"]) == ("HealthCheckFailed", "node", ["n1"])
    assert machines.ended(1)["code"] is not None
    assert belonging(machines.folder) == []


def test_without_its_leader_a_machine_ends_and_stays_ended(machines):
    machines.silent = 4
    job = machines.job(program(WAIT))
    machines.write(job)
    machines.start(job, 0, 1)
    machines.ranks_run(2)
    machines.lose(0)
    ended = machines.ended(1)
    assert (ended["attempts"], ended["reason"]) == (1, "ended")
    assert ended["code"] != 0
    assert machines.file("errors/node-n0.json")["nodes"] == ["n0"]
    assert belonging(machines.folder) == []


def test_a_machine_that_never_came_is_said_and_no_name_is_invented(machines):
    job = machines.job(program(WAIT), watch=WatchConfig(join_node_seconds=3, grace_seconds=1))
    machines.write(job)
    machines.start(job, 0)
    assert machines.ended(0)["attempts"] == 1
    said = machines.file("errors/node-rank-1.json")
    assert (said["type"], said["class"], said["nodes"]) == ("NodeMissing", "node", [])
    assert "node rank 1 did not come within 3 s" in said["message"]


def test_an_agent_that_was_killed_alone_fails_the_attempt_and_not_the_machine(machines):
    body = "if rank.attempt > 1: return {}\ntime.sleep(60)"
    job = machines.job(program(body))
    machines.write(job)
    machines.start(job, 0, 1)
    machines.ranks_run(2)
    os.kill(machines.file("nodes/1/node.json")["pid"], signal.SIGKILL)
    assert [machines.ended(rank)["code"] for rank in (0, 1)] == [0, 0]
    assert not list((machines.folder / "errors").glob("node-*"))


def test_machines_of_an_older_submission_end_and_say_nothing_in_the_new_ones_folder(machines):
    job = machines.job(program(WAIT))
    machines.write(job)
    machines.start(job, 0, 1)
    machines.ranks_run(2)
    older = dict(machines.parents)
    newer = machines.job(program("return {}"), submission=2)
    machines.write(newer)
    machines.start(newer, 0, 1)
    assert [parent.wait(limit(60)) for parent in older.values()] == [0, 0]
    assert [machines.ended(rank)["code"] for rank in (0, 1)] == [0, 0]
    assert machines.file("nodes/0/node.json")["submission"] == 2
    assert machines.file("attempt.json")["submission"] == 2
    assert not (machines.folder / "errors").exists()


def test_a_parent_of_an_older_submission_writes_no_end(machines):
    job = machines.job(program(WAIT))
    machines.write(job)
    machines.start(job, 0, 1)
    machines.ranks_run(2)
    machines.write(machines.job(program(WAIT), submission=2))
    assert [machines.ended(rank) for rank in (0, 1)] == [None, None]
    assert belonging(machines.folder) == []


def test_marks_that_an_older_submission_left_are_not_believed(machines):
    job = machines.job(program("return {}"), submission=2)
    machines.write(job)
    write_json(machines.folder / "attempt.json", {"attempt": 9, "address": "1.1.1.1", "port": 1, "submission": 1})
    write_json(machines.folder / "nodes" / "0" / "beat", {"submission": "0001", "time": "1", "name": "other"})
    write_json(machines.folder / "nodes" / "1" / "node.json", {"attempt": 9, "submission": 1, "code": None})
    machines.start(job, 1)
    time.sleep(1)
    machines.start(job, 0)
    assert [machines.ended(rank)["code"] for rank in (0, 1)] == [0, 0]
    assert machines.file("nodes/1/node.json")["attempt"] == 1, "not the ninth, which was the older submission's"


def test_sigterm_ends_every_process_even_those_that_do_not_listen(machines):
    job = machines.job(STUBBORN)
    machines.write(job)
    machines.start(job, 0, 1)
    until(lambda: len(list(machines.folder.glob("up-*"))) == 2)
    began = time.monotonic()
    for parent in machines.parents.values():
        parent.send_signal(signal.SIGTERM)
    assert [machines.ended(rank)["reason"] for rank in (0, 1)] == ["cancelled"] * 2
    assert time.monotonic() - began < limit(30)
    assert belonging(machines.folder) == []


def test_what_a_killed_agent_left_is_ended_before_the_next_attempt(machines):
    text = "import os\nif os.environ['HEADWAY_ATTEMPT'] != '1': raise SystemExit(0)\n" + STUBBORN
    job = machines.job(text, nodes=1)
    machines.write(job)
    machines.start(job, 0)
    hidden = int(until(lambda: (path := machines.folder / "up-0").exists() and path.read_text()))
    os.kill(machines.file("nodes/0/node.json")["pid"], signal.SIGKILL)
    ended = machines.ended(0)
    assert (ended["code"], ended["reason"], ended["attempts"]) == (0, "ended", 2)
    assert process_started(hidden) is None


def test_leftovers_are_those_of_this_job_on_this_machine_only(machines):
    job = machines.job(STUBBORN, nodes=1)
    machines.write(job)
    machines.start(job, 0)
    hidden = int(until(lambda: (path := machines.folder / "up-0").exists() and path.read_text()))
    assert end_leftovers(Path(f"{machines.folder}-another"), 0) == []
    assert end_leftovers(machines.folder, 1) == []
    assert process_started(hidden) is not None
    assert hidden in end_leftovers(machines.folder, 0)
    assert read_json(machines.folder / "nodes" / "0" / "exit.json") is None or machines.ended(0)


def test_a_topology_file_that_the_machine_lacks_is_not_named_to_nccl(machines, tmp_path):
    """It lies in Azure's HPC images; a container may have none, and what the user names himself is left alone."""
    body = (
        'return {name: os.environ.get(name, "") for name in ("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_IB_DISABLE")}'
    )
    graph = tmp_path / "graph.xml"
    graph.write_text("<graphs/>")
    own = {"NCCL_TOPO_FILE": "/of/the/user.xml"}
    network = {"NCCL_TOPO_FILE": "/opt/gone.xml", "NCCL_GRAPH_FILE": str(graph), "NCCL_IB_DISABLE": "1"}
    for environment, topology in (({}, ""), (own, own["NCCL_TOPO_FILE"])):
        job = machines.job(program(body), nodes=1, environment=environment)
        machines.run(job, **network)
        assert machines.file("result.json") == {**network, "NCCL_TOPO_FILE": topology}
    assert "NCCL_TOPO_FILE is not set: /opt/gone.xml is not here" in (machines.folder / "nodes/0/node.log").read_text()
