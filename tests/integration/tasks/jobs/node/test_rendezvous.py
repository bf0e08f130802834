"""Machines of an elastic job, as agents on this machine: one joins, the first is killed, the rest finishes; and who says so."""

import json
import os
import signal
import subprocess
import time
from base64 import b64encode
from datetime import timedelta
from itertools import pairwise

import pytest
from elastic_material import consumed, elastic_job, expected, lines, training, world_sizes, write_tokens
from waiting import limit

from tasks.common import process
from tasks.common.errors import Missing
from tasks.common.process import GIVEN_UP
from tasks.compute import elastic
from tasks.compute.job import write_folder
from tasks.compute.nodes import node_command, node_environment, write_nodes
from tasks.jobs.node.launching import Place, environment, launcher, run_id

CONFIG = training(steps=600, hidden_size=64)
PATIENCE = 300.0


class Agents:
    """The parents of a job's machines on this one."""

    def __init__(self, job, folder):
        self.job, self.folder, self.running = job, folder, {}
        write_nodes(job, folder)
        elastic.open_rendezvous(job, folder)

    def start(self, rank):
        own = {**node_environment(self.job), "HEADWAY_NODE_NAME": f"machine-{rank}"}
        self.running[rank] = subprocess.Popen(node_command(self.job, self.folder, rank), env={**os.environ, **own})

    def kill(self, rank):
        """All of a machine at once, as when its power goes."""
        agent = self.running.pop(rank)
        for pid in (agent.pid, *process.descendants(agent.pid)):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        agent.wait()

    def wait(self, condition):
        deadline = time.monotonic() + limit(PATIENCE)
        while not condition():
            assert time.monotonic() < deadline and not self.ended(), self.said()
            time.sleep(0.05)

    def ended(self):
        return process.read_json(self.folder / "rendezvous" / "exit.json")

    def said(self):
        logs = [
            *self.folder.glob("nodes/*/*.log"),
            *self.folder.glob("logs/*.log"),
            *self.folder.glob("rendezvous/*.log"),
        ]
        return "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in logs)

    def end(self):
        process.stop(self.folder / "rendezvous")
        for rank in list(self.running):
            self.kill(rank)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory):
    """A job that grew from one machine to two, lost the first one, and finished on the other."""
    agents = Agents(
        elastic_job(tokens, CONFIG, most=2, every=10 * CONFIG.steps), tmp_path_factory.mktemp("jobs") / "job"
    )
    try:
        agents.start(0)
        agents.wait(lambda: lines(agents.folder))
        agents.start(1)
        agents.wait(lambda: lines(agents.folder)[-1]["world_size"] == 2)
        agents.kill(0)
        deadline = time.monotonic() + limit(PATIENCE)
        while not agents.ended() and time.monotonic() < deadline:
            time.sleep(0.05)
        agents.codes = [agent.wait(limit(30)) for agent in agents.running.values()]
    finally:
        agents.end()
    assert (agents.folder / "result.json").exists(), agents.said()
    return agents


@pytest.mark.long
def test_no_sample_is_lost_or_repeated(finished, tokens):
    assert consumed(finished.folder) == expected(tokens, CONFIG)
    assert world_sizes(finished.folder) == [1, 2, 1]


@pytest.mark.long
def test_the_job_ends_once_and_says_how(finished):
    assert finished.codes == [0]
    state = elastic.ended_state(finished.folder)
    assert (state.state, state.code, state.reason) == ("ended", 0, "ended")


@pytest.mark.long
def test_every_standstill_is_measured(finished):
    told = json.loads((finished.folder / "result.json").read_text())["standstills"]
    assert [change["world_size"] for change in told] == [2, 1]
    assert all(change["rendezvous_seconds"] > 0 and change["start_seconds"] > 0 for change in told)
    records = {(line["step"], line["attempt"]): line for line in lines(finished.folder) if "rendezvous_seconds" in line}
    assert [change["step"] for change in told] == sorted(step for step, _ in records)


@pytest.mark.long
def test_a_machine_that_joins_costs_no_step(finished):
    """The ranks that ran are asked to stop, and save before they do."""
    joined, lost = json.loads((finished.folder / "result.json").read_text())["standstills"]
    steps = [line["step"] for line in lines(finished.folder)]
    done = max(line["step"] for line in lines(finished.folder) if line["world_size"] == 2)
    assert 1 < joined["step"] <= done
    assert lost["step"] == joined["step"], "the checkpoint of the join is the newest one that there is"
    assert steps == [*range(1, done + 1), *range(joined["step"], CONFIG.steps + 1)]


@pytest.mark.long
def test_what_was_lost_was_rank_0s_machine(finished):
    """The store does not lie on a machine of the job."""
    assert {line["world_size"] for line in lines(finished.folder)[-3:]} == {1}
    names = [json.loads((finished.folder / "nodes" / rank / "node.json").read_text())["code"] for rank in "01"]
    assert names == [None, 0]


@pytest.fixture
def job(tokens):
    return elastic_job(tokens, CONFIG)


@pytest.fixture
def watched(job, tmp_path):
    """What the holder of the store sees of a job that has just begun."""
    from tasks.jobs.node.rendezvous import Watching

    write_folder(job, tmp_path)
    (tmp_path / "errors").mkdir()
    return Watching(tmp_path, process.read_json(tmp_path / "job.json"))


def start_rank(folder, pid):
    process.write_json(folder / "ranks" / "0.json", {"host": "n1", "pid": pid, "started": "1"})


def report(folder, kind, rank=0):
    process.write_json(folder / "errors" / f"rank-{rank}.json", {"class": kind, "message": "", "attempt": 1})


def test_with_a_result_the_job_ended_well(watched):
    assert watched.ended() is None
    process.write_json(watched.folder / "result.json", {})
    assert watched.ended() == 0


@pytest.mark.parametrize(
    ("kind", "ended"),
    [
        ("user", GIVEN_UP),
        ("diverged", GIVEN_UP),
        ("limit", GIVEN_UP),
        ("preempted", None),
        ("infrastructure", None),
        ("node", None),
    ],
)
def test_what_comes_back_on_every_machine_ends_the_job_and_a_bad_machine_does_not(watched, kind, ended):
    report(watched.folder, kind)
    assert watched.ended() == ended


def test_failures_without_progress_end_the_job(watched, job):
    start_rank(watched.folder, 99)
    for number in range(job.restarts + 1):
        assert watched.ended() is None
        report(watched.folder, "infrastructure", rank=number)
        start_rank(watched.folder, 100 + number)
    assert watched.ended() == GIVEN_UP


def test_progress_starts_the_count_again_and_machines_that_come_do_not_count(watched, job):
    for number in range(3 * job.restarts):
        report(watched.folder, "infrastructure", rank=number)
        start_rank(watched.folder, 100 + number)
        process.write_json(watched.folder / "checkpoints" / "LATEST", {"step": number})
        assert watched.ended() is None
    for number in range(3 * job.restarts):
        start_rank(watched.folder, 200 + number)
        assert watched.ended() is None


def test_a_newer_submission_ends_it(watched, job):
    write_folder(job.model_copy(update={"submission": 2}), watched.folder)
    assert watched.ended() == GIVEN_UP


def test_a_rendezvous_that_torch_closed_is_seen(job):
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    from tasks.jobs.node.rendezvous import closed, open_store

    store, name = open_store(0), run_id(job.model_dump(mode="json"), 1)
    assert not closed(store, name)
    backend = C10dRendezvousBackend(store, name)
    assert not closed(store, name), "nobody came yet"
    handler = DynamicRendezvousHandler.from_backend(name, store, backend, 1, 3)
    handler._state_holder.mark_dirty()
    handler._state_holder.sync()
    assert not closed(store, name)
    handler.set_closed()
    assert closed(store, name)


@pytest.mark.parametrize("state", ["no base64!", "AAAA", b64encode(b"c__builtin__\nexit\n(tR.").decode()])
def test_what_a_stranger_writes_into_the_store_is_not_loaded(job, state):
    from tasks.jobs.node.rendezvous import closed, open_store

    store, name = open_store(0), run_id(job.model_dump(mode="json"), 1)
    store.set(f"torch.rendezvous.{name}", state)
    assert not closed(store, name)


def test_the_store_takes_its_old_port_again():
    from tasks.jobs.node.rendezvous import open_store

    port = open_store(0).port
    for _ in range(50):  # the kernel lets the port go when the first server's thread is gone
        again = open_store(port).port
        if again == port:
            return
        time.sleep(0.1)
    raise AssertionError(f"port {port} was never free again")


def test_machines_of_an_elastic_job_meet_at_the_store(job, tmp_path):
    told = job.model_dump(mode="json")
    place = Place(node_rank=2, address="127.0.0.1", port=4711, attempt=1, opening=3)
    words = launcher(told, place)
    options = dict(pairwise(words))
    assert options["--nnodes"] == "1:3" and options["--nproc-per-node"] == "1"
    assert options["--rdzv-endpoint"] == "127.0.0.1:4711" and options["--rdzv-backend"] == "c10d"
    assert options["--rdzv-id"] == "e1a5e1a5e1a5-1-3" and options["--local-addr"] == "127.0.0.1"
    conf = dict(pair.split("=") for pair in options["--rdzv-conf"].split(","))
    lost = timedelta(seconds=int(conf["keep_alive_interval"]) * int(conf["keep_alive_max_attempt"]))
    assert conf["is_host"] == "0" and lost + timedelta(seconds=int(conf["last_call_timeout"])) < timedelta(seconds=20)
    assert environment(told, tmp_path, place)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_machine_without_torch_cannot_hold_the_store(job, tmp_path):
    with pytest.raises(Missing, match="/usr/bin/false has no torch"):
        elastic.open_rendezvous(job.model_copy(update={"python": "/usr/bin/false"}), tmp_path)
