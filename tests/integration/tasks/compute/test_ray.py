"""Jobs on a real Ray cluster of two nodes on this machine: from the placement to the end, whatever dies in between."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from elastic_material import write_tokens
from ray_stand import RayStand, using
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled, Missing
from tasks.compute import machines_of, open_backend
from tasks.compute.job import Job
from tasks.compute.submission import HOME_DIGITS, home_of
from tasks.compute.supervisor import Watch, run
from tasks.config.cluster import ClusterConfig, WatchConfig
from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_store

PROGRAM = """
import os, sys, time
from tasks.jobs.node.runtime import main

def run(rank):
    rank.metrics(step=1)
    while rank.settings.get("until") and not os.path.exists(rank.settings["until"]):
        time.sleep(0.05)
    return {"attempt": rank.attempt, "node": os.environ["HEADWAY_NODE_NAME"]}

if __name__ == "__main__":
    sys.exit(main(run))
"""
SCRIPT = """
import os, sys
import ray

@ray.remote(num_cpus=1)
def where():
    return ray.get_runtime_context().get_node_id()

ray.init(log_to_driver=False)
print("known nodes", len(ray.nodes()), "ran on", ray.get(where.remote()), "folder", os.environ["HEADWAY_JOB"])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def stand():
    made = RayStand()
    try:
        made.add("n2")
        yield made
    finally:
        made.close()


@pytest.fixture
def backend(stand):
    return open_backend(config(stand))


@pytest.fixture
def base(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "script.py").write_text(SCRIPT)
    yield tmp_path
    (tmp_path / "go").touch()


def config(stand, **ray):
    return ClusterConfig(backend="ray", ray={"address": stand.address, **ray})


def job(base, token="1", **fields):
    """A program of two CPUs on one node, that ends when `go` is there."""
    own = {"program": str(base / "program.py"), "module": False, "settings": {"until": str(base / "go")}, "inputs": {}}
    shape = {"ranks_per_node": 1, "threads_per_rank": 2, "restarts": 0}
    return Job(name="t", token=token * 32, **{**own, **shape, **fields})


def reached(backend, handle, folder, *states, timeout=150):
    """Poll as the supervisor does; the first state that is one of the given ones."""
    deadline = time.monotonic() + limit(timeout)
    while time.monotonic() < deadline:
        state = backend.states([(handle, folder)])[0]
        if state.state in states:
            return state
        assert not state.over, state
        time.sleep(0.2)
    raise AssertionError(f"still {state}")


def unused(folder, *, timeout=60):
    deadline = time.monotonic() + limit(timeout)
    while using(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert using(folder) == []


def supervise(base, work, backend, **watch):
    journal = StoreJournal(open_store(base))
    return run(work, backend=backend, folder=base / "job", journal=journal, watch=Watch(**watch))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_training_runs_on_two_machines(stand, base):
    """The shipped program, one rank a node, through the supervisor: torchrun meets across the two."""
    tokens = write_tokens(base / "tokens")
    training = TrainingConfig(
        network=NetworkConfig(layers=1, hidden_size=32, heads=2, kv_heads=1, intermediate_size=64),
        sequence_length=64, global_batch_size=4, micro_batch_size=2, steps=6, warmup_steps=2,
    )  # fmt: skip
    settings = {"training": training.model_dump(mode="json"), "checkpoint_every_steps": 3, "keep_checkpoints": 2}
    work = job(
        base, program="tasks.jobs.train", module=True, settings=settings, inputs={"tokens": str(tokens)}, nodes=2,
        threads_per_rank=1, progress="checkpoints/LATEST",
    )  # fmt: skip
    steps = []
    backend = open_backend(config(stand))
    done = supervise(base, work, backend, metrics=lambda records: steps.extend(r.get("step") for r in records))
    assert (done.submissions, done.attempts, done.adopted) == (1, 1, False)
    assert max(step for step in steps if step is not None) == 6
    marks = [process.read_json(base / "job" / "nodes" / rank / "node.json") for rank in "01"]
    assert {mark["name"] for mark in marks} == {"n1", "n2"}
    assert [mark["code"] for mark in marks] == [0, 0]
    unused(base / "job")


def as_submitted(work, base):
    """A job with what its supervisor adds before the first submission."""
    return work.model_copy(update={"home": home_of(base / "job")[:HOME_DIGITS]})


def test_a_killed_orchestrators_job_is_adopted_and_not_submitted_again(stand, base, backend):
    work = job(base, "2")
    first = multiprocessing.get_context("fork").Process(
        target=lambda: supervise(base, work, open_backend(config(stand))), daemon=True
    )
    first.start()
    until(lambda: (base / "job" / "metrics.jsonl").exists())
    first.kill()
    first.join()
    (base / "go").touch()
    done = supervise(base, work, backend)
    assert (done.adopted, done.submissions, done.attempts) == (True, 1, 1)
    name = as_submitted(work, base).submission_id
    assert [j["submission_id"] for j in stand.jobs() if j["submission_id"] == name] == [name]


@pytest.mark.long
def test_two_submitters_of_one_submission_make_one_job(stand, base, backend):
    """Two at once can both fail in Ray (ray-project/ray#31356)."""
    work, handles = job(base, "3"), []
    others = [open_backend(config(stand)) for _ in range(2)]
    both = [threading.Thread(target=lambda b=b: handles.append(b.submit(work, base / "job"))) for b in others]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert handles[0] == handles[1] == backend.find(work, base / "job")
    (base / "go").touch()
    assert reached(backend, handles[0], base / "job", "ended").code == 0


def test_cancelling_leaves_no_process_on_any_machine(stand, base, backend):
    seen = []

    def cancelled():
        if not seen and len(list((base / "job" / "nodes").glob("*/beat"))) == 2:
            seen.extend(using(base / "job"))
        return bool(seen)

    with pytest.raises(Cancelled):
        supervise(base, job(base, "4", nodes=2), backend, cancelled=cancelled)
    assert len(seen) >= 6  # the driver, and on each machine a parent, the machine's part and a launcher
    unused(base / "job")
    handle = backend.find(as_submitted(job(base, "4", nodes=2), base), base / "job")
    assert backend.states([(handle, base / "job")])[0].reason == "cancelled"


@pytest.mark.parametrize("who", ["driver", pytest.param("actor", marks=pytest.mark.long)])
def test_a_killed_driver_or_actor_takes_all_processes_with_it(stand, base, backend, who):
    """Neither can say goodbye: what an actor started dies with it, and the actors with their driver."""
    handle = backend.submit(job(base, "de"[who == "actor"], nodes=2), base / "job")
    until(lambda: len(list((base / "job" / "nodes").glob("*/beat"))) == 2)
    seen = {words: pid for pid, words in using(base / "job")}
    driver = next(pid for words, pid in seen.items() if "tasks.jobs.ray.driver" in words)
    parent = process.read_json(base / "job" / "nodes" / "1" / "handle.json")["pid"]
    actor = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"driver": driver, "actor": actor}[who], signal.SIGKILL)
    state = reached(backend, handle, base / "job", "ended")
    assert (state.failure, state.failed_nodes) == ("infrastructure", ())
    assert who == "driver" or state.reason.startswith("the actor of node rank 1 on n")
    unused(base / "job")


@pytest.mark.long
def test_what_waits_for_room_is_queued_with_words_and_excluded_machines_are_not_taken(stand, base, backend):
    """Both jobs want all of n2: one waits until the other has ended."""
    first, second = job(base, "5", excluded_nodes=("n1",)), job(base, "6", only_nodes=("n2", "n7"))
    one = backend.submit(first, base / "one")
    reached(backend, one, base / "one", "running")
    two = backend.submit(second, base / "two")
    until(lambda: "in use" in backend.states([(two, base / "two")])[0].reason)
    states = backend.states([(one, base / "one"), (two, base / "two")])
    assert [state.state for state in states] == ["running", "queued"]
    assert states[1].reason == "waits for 1 machine(s) with 2 CPU: what the cluster has of it is in use"
    (base / "go").touch()
    assert reached(backend, two, base / "two", "ended").code == 0
    results = [process.read_json(base / name / "result.json") for name in ("one", "two")]
    assert [result["node"] for result in results] == ["n2", "n2"]


def test_what_can_never_be_placed_is_the_users_error_and_not_a_wait(stand, base, backend):
    with pytest.raises(
        ValueError, match="needs 1 machine.s. with 2 CPU, 3 GPU, and the Ray cluster can hold 0"
    ) as error:
        supervise(base, job(base, "7", gpus_per_node=3), backend)
    assert "lower cluster.gpus_per_node" in str(error.value)


@pytest.mark.long
def test_a_users_own_ray_script_is_the_entrypoint(stand, base, backend):
    fields = {"program": str(base / "script.py"), "driver": True, "threads_per_rank": 1}
    handles = [
        backend.submit(job(base, "89"[code], arguments=(str(code),), **fields), base / str(code)) for code in (0, 1)
    ]
    assert reached(backend, handles[0], base / "0", "ended").code == 0
    assert process.read_json(base / "0" / "result.json") == {"exit_code": 0}
    log = (base / "0" / "logs" / "rank-0.log").read_text()
    assert "known nodes 2" in log and f"folder {base / '0'}" in log
    failed = reached(backend, handles[1], base / "1", "ended")
    assert (failed.code, failed.reason) == (1, "ended")
    assert not (base / "1" / "result.json").exists()


@pytest.mark.long
def test_a_machine_that_does_not_see_the_job_folder_is_named_before_anything_starts(stand, base, backend):
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mount namespaces: unshare of util-linux, and the right to use it")
    hidden = base / "hidden"
    hidden.mkdir()
    stand.add("blind", blind=hidden, resources={"blind": 1})
    try:
        only_there = open_backend(config(stand, resources={"blind": 1}))
        handle = only_there.submit(job(base, "a", watch=WatchConfig(silent_node_seconds=2)), hidden / "job")
        state = reached(only_there, handle, hidden / "job", "ended")
    finally:
        stand.kill("blind")
    assert (state.failure, state.code) == ("missing", 1)
    assert state.reason.startswith(f"the job folder {hidden / 'job'} is not to be seen on blind")
    assert process.read_json(hidden / "job" / "errors" / "driver.json")["class"] == "missing"
    assert not list(hidden.glob("job/nodes/*/exit.json"))


def test_a_driver_that_does_not_see_the_job_folder_says_so_through_ray(stand, base, backend):
    """Ray's head node without the shared folder: what it wrote to its output is all that there is."""
    folder = base / "gone"
    handle = backend.submit(job(base, "b"), folder)
    (folder / "ray.json").unlink()
    state = reached(backend, handle, folder, "ended")
    assert (state.failure, state.code) == ("missing", 1)
    assert "is not to be seen on" in state.reason and "HEADWAY_HOME" in state.reason


def test_a_script_runs_on_the_machine_it_is_for(stand, base):
    """Each raylet gives what runs below it the folder of its own node."""
    machines = machines_of(config(stand))
    for name in ("n1", "n2"):
        machines.execute(name, f"tr '\\0' '\\n' < /proc/$PPID/environ | grep ^RAY_ > '{base}/of {name}'", handle={})
    assert (base / "of n1").read_text() != (base / "of n2").read_text()
    with pytest.raises(Missing, match="ended with exit code"):
        machines.execute("n2", "exit 3", handle={})
    with pytest.raises(Missing, match="has no machine n9"):
        machines.execute("n9", "true", handle={})


@pytest.mark.long
def test_a_machine_that_dies_in_the_middle_is_named_and_nothing_is_left_on_the_others(stand, base, backend):
    work = job(base, "c", nodes=2)
    handle = backend.submit(work, base / "job")
    until(lambda: len(list((base / "job" / "nodes").glob("*/beat"))) == 2)
    stand.kill("n2")
    state = reached(backend, handle, base / "job", "ended")
    assert (state.failure, state.failed_nodes, state.code) == ("node", ("n2",), 1)
    report = process.read_json(base / "job" / "errors" / "node-n2.json")
    assert (report["class"], report["nodes"]) == ("node", ["n2"])
    unused(base / "job")
    with pytest.raises(ValueError, match="needs 2 machine.s. of its own each"):
        supervise(base / "again", job(base, "f", nodes=2), backend)
