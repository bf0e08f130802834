"""An elastic job on real sshd: it begins with the machine that is there, takes in those that qualify, and loses the first."""

import threading

import pytest
from elastic_material import (
    Journal,
    admission,
    breaking,
    consumed,
    elastic_job,
    expected,
    lines,
    require_joining_costs_no_step,
    training,
    world_sizes,
    write_tokens,
)
from ssh_stand import ssh_stand
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled
from tasks.compute import open_backend
from tasks.compute.polling import Watch
from tasks.compute.ssh.hosts import read_hosts
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, WatchConfig

pytestmark = pytest.mark.long
CONFIG = training(steps=20_000, hidden_size=64)
"""More than it gets to do, however fast the machine is: it is cancelled when everything was seen."""
PATIENCE = 300.0
SILENT_SECONDS = limit(6.0)


@pytest.fixture(scope="module")
def stand(tmp_path_factory):
    with ssh_stand(tmp_path_factory.mktemp("ssh"), count=3) as made:
        yield made


@pytest.fixture(scope="module")
def config(stand):
    elastic = {"min_nodes": 1, "max_nodes": 3, "address": stand.here}
    return ClusterConfig.model_validate(
        {"backend": "ssh", "ranks_per_node": 1, "elastic": elastic, "ssh": stand.settings}
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def shown(stand, config, tokens, tmp_path_factory):
    """The job's folder and what was seen of it, after all that happened to its machines."""
    first, late, bad = stand.machines
    names = [host.name for host in read_hosts(config.ssh)]
    folder, journal, ends = tmp_path_factory.mktemp("jobs") / "job", Journal(), []
    job = elastic_job(
        tokens,
        CONFIG,
        elastic=config.elastic,
        admission=admission((names[0],)),
        watch=WatchConfig(silent_node_seconds=SILENT_SECONDS, hang_seconds=limit(120.0)),
    )
    backend = open_backend(config)
    backend.poll_seconds = 1.0
    stopped = threading.Event()
    watch = Watch(cancelled=stopped.is_set)
    late.kill()

    def supervise():
        try:
            ends.append(run(job, backend=backend, folder=folder, journal=journal, watch=watch))
        except Cancelled as error:
            ends.append(error)

    supervisor = threading.Thread(target=supervise)

    def say():
        logs = [*folder.glob("*.log"), *folder.glob("nodes/*/*.log"), *folder.glob("logs/*.log")]
        return "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in sorted(logs))

    def size(ranks):
        return until(lambda: lines(folder) and lines(folder)[-1]["world_size"] == ranks, PATIENCE, why=say)

    shown = {"names": names, "folder": folder, "journal": journal}
    try:
        with breaking(lambda: bad.running("-m tasks.jobs.benchmark")):
            supervisor.start()
            size(1)
            until(lambda: list((folder / "errors").glob("node-*.json")), PATIENCE, why=say)
        shown["alone"] = lines(folder)[-1]["step"]
        late.start()
        size(2)
        first.kill()
        size(1)
        first.start()
        size(2)
        shown["handle"] = journal.get(f"jobs/{job.token}/0001/handle")
        shown["state"] = backend.states([(shown["handle"], folder)])[0]
    finally:
        stopped.set()
        supervisor.join(limit(60))
    shown["end"] = ends[0]
    shown["left"] = [pid for machine in stand.machines for pid in machine.running(str(folder))]
    return shown


def test_every_sample_is_read_once_in_order(shown, tokens):
    done = consumed(shown["folder"])
    assert done == expected(tokens, CONFIG)[: len(done)]
    assert world_sizes(shown["folder"]) == [1, 2, 1, 2]


def test_a_machine_that_joins_costs_no_step(shown):
    require_joining_costs_no_step(shown["folder"], shown["alone"])


def test_the_machine_that_came_late_measured_itself_before_it_joined(shown):
    first, late, _ = shown["names"]
    place = shown["folder"] / "qualified" / late
    verdict = process.read_json(place / "verdict.json")
    assert verdict["passed"] and [node["name"] for node in verdict["nodes"]] == [late]
    assert "matmul_fp32" in {probe["check"] for probe in process.read_json(place / "out/ranks/0.json")["probes"]}
    assert not (shown["folder"] / "qualified" / first).exists(), "it qualified before the job"


def test_a_machine_whose_measurement_died_never_joined_and_is_named(shown):
    folder, bad = shown["folder"], shown["names"][2]
    report = process.read_json(folder / "errors" / f"node-{bad}.json")
    assert (report["type"], report["class"], report["nodes"]) == ("NotQualified", "node", [bad])
    verdict = process.read_json(folder / "qualified" / bad / "verdict.json")
    assert not verdict["passed"] and verdict["nodes"][0]["verdict"] == "unknown"
    assert not (folder / "nodes" / "2" / "node.json").exists()
    assert shown["state"].state == "running" and bad in shown["state"].reason


def test_cancelling_ends_all_of_it(shown, config):
    assert isinstance(shown["end"], Cancelled) and not shown["left"]
    assert not process.alive(process.read_json(shown["folder"] / "rendezvous" / "handle.json"))
    state = open_backend(config).states([(shown["handle"], shown["folder"])])[0]
    assert (state.state, state.reason) == ("ended", "cancelled")
