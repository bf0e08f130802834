"""An elastic job on a real Ray cluster: it begins on one machine, takes in those that qualify, and loses the first."""

import threading
from contextlib import suppress
from pathlib import Path

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
from ray_stand import RayStand, using
from waiting import limit, until

from tasks.common import process
from tasks.common.errors import Cancelled, HeadwayError
from tasks.common.process import descendants
from tasks.compute import open_backend
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, WatchConfig

pytestmark = pytest.mark.long
CONFIG = training(steps=20_000, hidden_size=64)
"""More than it gets to do, however fast the machine is: it is cancelled when everything was seen."""
PATIENCE = 300.0
HOLDS = {"train": 1}
"""What nodes of the job have, and the head has not: it holds the store where the others meet."""


@pytest.fixture(scope="module")
def stand():
    made = RayStand(cpus=2)
    made.add("a", resources=HOLDS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def config(stand):
    elastic = {"min_nodes": 1, "max_nodes": 3}
    return ClusterConfig.model_validate(
        {
            "backend": "ray",
            "ranks_per_node": 1,
            "elastic": elastic,
            "ray": {"address": stand.address, "resources": HOLDS},
        }
    )


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def measuring(stand, name):
    """The processes that measure a node."""
    for pid in descendants(stand.nodes[name].pid):
        with suppress(OSError):  # it ended meanwhile
            if "tasks.jobs.benchmark" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                yield pid


@pytest.fixture(scope="module")
def shown(stand, config, tokens, tmp_path_factory):
    """The job's folder and what was seen of it, after all that happened to its machines."""
    folder, journal, ends = tmp_path_factory.mktemp("jobs") / "job", Journal(), []
    job = elastic_job(
        tokens,
        CONFIG,
        elastic=config.elastic,
        admission=admission(("a",)),
        watch=WatchConfig(hang_seconds=limit(120.0)),
    )
    backend = open_backend(config)
    stopped = threading.Event()
    watch = Watch(cancelled=stopped.is_set)

    def supervise():
        try:
            ends.append(run(job, backend=backend, folder=folder, journal=journal, watch=watch))
        except (HeadwayError, ValueError) as error:
            ends.append(error)

    supervisor = threading.Thread(target=supervise)

    def say():
        logs = [*folder.glob("*.log"), *folder.glob("nodes/*/*.log"), *folder.glob("rendezvous/*.log")]
        return "\n".join([f"{ends} {stand.jobs()}", *(f"{log}:\n{log.read_text()[-1500:]}" for log in sorted(logs))])

    def size(ranks):
        until(lambda: ends or (lines(folder) and lines(folder)[-1]["world_size"] == ranks), PATIENCE, why=say)
        assert not ends, say()

    shown = {"folder": folder, "journal": journal}
    try:
        supervisor.start()
        size(1)
        stand.add("bad", resources=HOLDS)
        with breaking(lambda: measuring(stand, "bad")):
            until(lambda: list((folder / "errors").glob("node-*.json")), PATIENCE, why=say)
        shown["alone"] = lines(folder)[-1]["step"]
        stand.add("b", resources=HOLDS)
        size(2)
        stand.kill("a")
        size(1)
        stand.add("c", resources=HOLDS)
        size(2)
        shown["handle"] = journal.get(f"jobs/{job.token}/0001/handle")
        shown["state"] = backend.states([(shown["handle"], folder)])[0]
    finally:
        stopped.set()
        supervisor.join(limit(90))
    shown["end"] = ends[0]
    shown["left"] = [one for one in using(folder) if "pytest" not in one[1]]
    return shown


def test_every_sample_is_read_once_in_order(shown, tokens):
    done = consumed(shown["folder"])
    assert done == expected(tokens, CONFIG)[: len(done)]
    assert world_sizes(shown["folder"]) == [1, 2, 1, 2]


def test_a_machine_that_joins_costs_no_step(shown):
    require_joining_costs_no_step(shown["folder"], shown["alone"])


def test_machines_that_came_later_measured_themselves_before_they_joined(shown):
    for name in ("b", "c"):
        verdict = process.read_json(shown["folder"] / "qualified" / name / "verdict.json")
        assert verdict["passed"] and [node["name"] for node in verdict["nodes"]] == [name]
    assert not (shown["folder"] / "qualified" / "a").exists(), "it qualified before the job"


def test_a_machine_whose_measurement_died_never_joined_and_is_named(shown):
    report = process.read_json(shown["folder"] / "errors" / "node-bad.json")
    assert (report["type"], report["class"], report["nodes"]) == ("NotQualified", "node", ["bad"])
    state = shown["state"]
    assert state.state == "running" and state.reason == "2 of at most 3 machines; without bad, which checks found bad"


def test_cancelling_ends_all_of_it(shown, stand, config):
    assert isinstance(shown["end"], Cancelled) and not shown["left"]
    state = open_backend(config).states([(shown["handle"], shown["folder"])])[0]
    assert (state.state, state.reason) == ("ended", "cancelled")
    assert [job["status"] for job in stand.jobs()] == ["STOPPED"], "one job of Ray's from the beginning to the end"


def test_it_ends_with_its_result(shown, config, tokens, tmp_path):
    short = training(steps=30)
    least_two = config.elastic.model_copy(update={"min_nodes": 2})
    job = elastic_job(tokens, short, elastic=least_two).model_copy(update={"token": "e1a6" * 8})
    result = run(job, backend=open_backend(config), folder=tmp_path / "job", journal=Journal(), watch=Watch())
    assert consumed(tmp_path / "job") == expected(tokens, short)
    assert set(world_sizes(tmp_path / "job")) <= {2, 3} and result.submissions == 1


def test_a_mistake_of_the_user_ends_it_and_is_not_tried_again(shown, config, tokens, tmp_path):
    job = elastic_job(tokens, training(steps=30), elastic=config.elastic)
    wrong = {**job.settings, "training": {**job.settings["training"], "steeps": 1}}
    job, journal = job.model_copy(update={"token": "e1a7" * 8, "settings": wrong}), Journal()
    with pytest.raises(ValueError, match="steeps"):
        run(job, backend=open_backend(config), folder=tmp_path / "job", journal=journal, watch=Watch())
    assert not journal.get(f"jobs/{job.token}/0002/handle")
    assert not [one for one in using(tmp_path / "job") if "pytest" not in one[1]]


def test_a_cluster_without_enough_machines_is_told_at_once(shown, config, tokens, tmp_path):
    many = config.elastic.model_copy(update={"min_nodes": 4, "max_nodes": 5})
    job = elastic_job(tokens, training(steps=30), elastic=many).model_copy(update={"token": "e1a8" * 8})
    with pytest.raises(ValueError, match=r"needs 4 machine\(s\) of its own each with .* can hold 3"):
        run(job, backend=open_backend(config), folder=tmp_path / "job", journal=Journal(), watch=Watch())


def test_a_machine_that_does_not_see_the_folder_is_left_out_and_a_time_limit_is_told_as_one(
    shown, stand, config, tokens, tmp_path
):
    (tmp_path / "jobs").mkdir()
    stand.add("blind", blind=tmp_path / "jobs", resources=HOLDS)
    many = config.elastic.model_copy(update={"max_nodes": 5})
    job = elastic_job(tokens, CONFIG, elastic=many).model_copy(
        update={"token": "e1a9" * 8, "time_limit": limit(60.0), "watch": WatchConfig(silent_node_seconds=1.0)}
    )
    backend, folder = open_backend(config), tmp_path / "jobs" / "job"
    handle = backend.submit(job, folder)

    def state():
        return backend.states([(handle, folder)])[0]

    until(lambda: lines(folder) and lines(folder)[-1]["world_size"] == 3, PATIENCE, why=state)
    until(lambda: state().state == "ended", PATIENCE, why=state)
    assert state().reason == "timeout"
    assert not list((folder / "errors").glob("node-*.json")), "the machine without the folder is not a bad one"
    assert len(list(folder.glob("nodes/*/node.json"))) == 3, "nobody began after the limit, and none without the folder"
