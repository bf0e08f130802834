"""An elastic job on a real Slurm of four nodes: it grows from one to three, loses the first, and finishes as one submission."""

import json
import os
import signal
import threading

import pytest
from elastic_material import (
    Journal,
    admission,
    consumed,
    elastic_job,
    expected,
    lines,
    training,
    world_sizes,
    write_tokens,
)
from slurm_stand import slurm
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled
from tasks.compute import open_backend
from tasks.compute.polling import Watch
from tasks.compute.submission import HOME_DIGITS, home_of
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig

CONFIG = training(steps=500, hidden_size=64)
CLUSTER = {"name": "stand", "backend": "slurm", "ranks_per_node": 1, "elastic": {"min_nodes": 1, "max_nodes": 3}}
PATIENCE = 300.0


@pytest.fixture(scope="module")
def cluster():
    with slurm(4, cpus=1) as stand, pytest.MonkeyPatch.context() as environment:
        for name, value in stand.environment.items():
            environment.setenv(name, value)
        yield stand


@pytest.fixture(scope="module")
def backend(cluster):
    made = open_backend(ClusterConfig.model_validate(CLUSTER))
    made.poll_seconds = 1.0
    return made


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def occupy(cluster, node):
    """A job of somebody else, which has a whole node; its id."""
    words = ("--parsable", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 900")
    return cluster.command("sbatch", *words)


@pytest.fixture(scope="module")
def shown(cluster, backend, tokens, tmp_path_factory):
    """The job after it grew and lost its first machine: its folder, its result, its journal, and who was lost."""
    folder, journal, results = tmp_path_factory.mktemp("jobs") / "job", Journal(), []
    others = {node: occupy(cluster, node) for node in ("n2", "n3", "n4")}
    until(lambda: cluster.command("squeue", "--noheader", "--states=PENDING") == "")
    job = elastic_job(tokens, CONFIG)
    stopped = threading.Event()
    watch = Watch(cancelled=stopped.is_set)
    supervisor = threading.Thread(
        target=lambda: results.append(run(job, backend=backend, folder=folder, journal=journal, watch=watch))
    )
    supervisor.start()

    def say():
        logs = [*folder.glob("*.log"), *folder.glob("nodes/*/*.log"), *folder.glob("logs/*.log")]
        return cluster.command("squeue") + "\n".join(f"{log}:\n{log.read_text()[-1000:]}" for log in logs)

    try:
        until(lambda: lines(folder), PATIENCE, why=say)
        for node in ("n2", "n3"):
            cluster.command("scancel", others[node])
        until(lambda: lines(folder)[-1]["world_size"] == 3, PATIENCE, why=say)
        lost = process.read_json(folder / "nodes" / "0" / "node.json")["name"]
        cluster.kill_node(lost)
        supervisor.join(limit(PATIENCE))
    finally:
        stopped.set()
        supervisor.join(limit(60))
        cluster.command("scancel", "--user=root")
    assert results, say()
    yield folder, results[0], journal, lost
    cluster.start_node(lost)
    cluster.wait_idle()


def test_it_grows_loses_the_first_machine_and_finishes_with_every_sample_once(shown, tokens):
    folder, result, _, lost = shown
    sizes = world_sizes(folder)
    assert sizes[0] == 1 and sizes[-2:] == [3, 2] and lost == "n1"
    assert consumed(folder) == expected(tokens, CONFIG)
    assert [record["step"] for record in result.result["standstills"]] == sorted(
        record["step"] for record in result.result["standstills"]
    )


def test_it_is_one_submission(shown):
    folder, result, journal, _ = shown
    assert result.submissions == 1
    assert [key for key in journal.kept if key.endswith("/intent")] == [f"jobs/{'e1a5' * 8}/0001/intent"]
    assert {path.name for path in (folder / "rendezvous" / "parts").glob("*.json")} == {
        "0-1.json",
        "1-1.json",
        "2-1.json",
    }


def test_each_standstill_is_in_the_result(shown):
    told = shown[1].result["standstills"]
    assert [change["world_size"] for change in told][-1] == 2
    assert all(change["rendezvous_seconds"] > 0 for change in told)


@pytest.fixture
def waiting(shown, backend, tokens, tmp_path):
    """An elastic job of two machines whose program waits."""
    (tmp_path / "program.py").write_text("import time; time.sleep(600)")
    program = {"program": str(tmp_path / "program.py"), "module": False, "token": "5eed" * 8, "progress": ""}
    job = elastic_job(tokens, CONFIG, most=2).model_copy(update={**program, "only_nodes": ("n2", "n3")})
    folder = tmp_path / "job"
    handle = backend.submit(job, folder)
    yield job, folder, handle
    backend.cancel(handle, folder)


def names(cluster):
    return sorted(cluster.command("squeue", "--noheader", "--format=%j", "--states=PENDING,RUNNING").split())


def test_who_dies_is_replaced_the_holder_of_the_store_and_a_machine_and_cancel_ends_all(cluster, backend, waiting):
    job, folder, handle = waiting
    parts = [f"{job.submission_id}.e{number}" for number in (0, 1)]
    until(lambda: all((folder / "nodes" / str(number) / "node.json").exists() for number in (0, 1)))
    assert backend.states([(handle, folder)])[0].state == "running" and names(cluster) == parts
    assert backend.find(job, folder) == handle
    until(lambda: (folder / "rendezvous" / "rendezvous.json").exists())
    first = process.read_json(folder / "rendezvous" / "handle.json")
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: not process.alive(first))
    assert backend.states([(handle, folder)])[0].state in ("running", "queued", "starting")
    second = process.read_json(folder / "rendezvous" / "handle.json")
    assert process.alive(second) and second["pid"] != first["pid"]
    until(lambda: json.loads((folder / "rendezvous" / "rendezvous.json").read_text())["opening"] == 2)
    os.kill(process.read_json(folder / "nodes" / "1" / "handle.json")["pid"], signal.SIGKILL)

    def again():
        state = backend.states([(handle, folder)])[0]
        assert state.state == "running", state
        return (folder / "rendezvous" / "parts" / "1-2.json").exists()

    until(again)
    assert names(cluster) == parts
    where = cluster.command("squeue", "--noheader", "--format=%N", "--states=RUNNING").split()
    assert where and set(where) <= {"n2", "n3"}, "machines that did not qualify do not join"
    holder = process.read_json(folder / "rendezvous" / "handle.json")
    assert process.alive(holder)
    backend.cancel(handle, folder)
    assert not process.alive(holder) and names(cluster) == []
    until(lambda: cluster.command("squeue", "--noheader") == "")
    state = backend.states([(handle, folder)])[0]
    assert (state.state, state.reason) == ("ended", "cancelled")


def test_nobody_left_is_an_end(cluster, backend, waiting):
    """An administrator deletes the machines: they do not come back by themselves."""
    _, folder, handle = waiting
    until(lambda: len(names(cluster)) == 2)
    cluster.command("scancel", "--user=root")
    until(lambda: backend.states([(handle, folder)])[0].over)
    state = backend.states([(handle, folder)])[0]
    assert (state.state, state.failure) == ("ended", "cancelled")
    assert not process.alive(process.read_json(folder / "rendezvous" / "handle.json"))


@pytest.mark.long
def test_it_begins_on_one_of_two_machines_and_takes_the_other_in_when_that_is_free(cluster, backend, tokens, tmp_path):
    """At no moment both are free, so nobody could measure them together; the second one measures itself."""
    folder, journal, ends = tmp_path / "job", Journal(), []
    until(lambda: cluster.command("squeue", "--noheader") == "")
    config = CONFIG.model_copy(update={"steps": 20_000})
    job = elastic_job(tokens, config, most=2, only_nodes=("n2", "n3"), admission=admission(("n2",)))
    job = job.model_copy(update={"token": "b0th" * 8})
    taken, stopped = occupy(cluster, "n3"), threading.Event()
    watch = Watch(cancelled=stopped.is_set)

    def supervise():
        try:
            ends.append(run(job, backend=backend, folder=folder, journal=journal, watch=watch))
        except Cancelled as error:
            ends.append(error)

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        until(lambda: len(lines(folder)) > 20, PATIENCE)
        alone = lines(folder)[-1]["step"]
        handle = journal.get(f"jobs/{job.token}/0001/handle")
        assert backend.states([(handle, folder)])[0].reason == "1 of at most 2 machines"
        named = job.model_copy(update={"home": home_of(folder)[:HOME_DIGITS]}).submission_id
        assert "n2" in cluster.command("squeue", "--noheader", f"--name={named}.e0", "--format=%N")
        cluster.command("scancel", taken)
        until(lambda: lines(folder)[-1]["world_size"] == 2, PATIENCE)
    finally:
        stopped.set()
        supervisor.join(limit(60))
    assert isinstance(ends[0], Cancelled)
    joined = next(record["step"] for record in lines(folder) if record["world_size"] == 2)
    assert joined > alone
    done = consumed(folder)
    assert done == expected(tokens, config)[: len(done)]
    assert process.read_json(folder / "qualified" / "n3" / "verdict.json")["passed"]
    assert not (folder / "qualified" / "n2").exists()


def test_what_would_be_submitted_is_a_value(backend, tokens, tmp_path):
    job = elastic_job(tokens, CONFIG, excluded_nodes=("bad1",), time_limit=3600.0)
    rendered = backend.render(job, tmp_path)
    assert sorted(rendered.files) == ["part-0.sbatch", "part-1.sbatch", "part-2.sbatch"]
    script = rendered.files["part-2.sbatch"]
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options[0] == f"--job-name={job.submission_id}.e2" and f"--output={tmp_path}/part-2.log" in options
    assert {"--nodes=1", "--requeue", "--exclude=bad1", "--time=60"} <= set(options)
    assert '"$folder/nodes/2"' in script and "\npart=2\n" in script and "@" not in script.replace("USR1@", "")
