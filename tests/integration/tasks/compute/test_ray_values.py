"""What is sent to Ray, what it refuses before anything is sent, what a cluster lacks, and what a state is made of. No cluster."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType
from ray_stand import free_port

from tasks.common import process
from tasks.common.errors import Missing
from tasks.compute import open_backend
from tasks.compute.job import Admission, Job
from tasks.compute.ray.backend import Told, state_of
from tasks.compute.ray.local import spec
from tasks.compute.ray_driver import driver_spec, ray_on_nodes
from tasks.config.backends.ray import RayConfig
from tasks.config.cluster import ClusterConfig, ElasticConfig
from tasks.jobs.ray.agent import Machine, candidates, lacking, machines, selector
from tasks.storage import open_files

ROOT = str(Path(__file__).parents[4])
JOB = Job(name="train", token="0123456789abcdef" * 2, program="tasks.jobs.train", settings={}, inputs={}, nodes=2,
          ranks_per_node=4, threads_per_rank=2, gpus_per_node=4, memory_gib=1.5, excluded_nodes=("n9",))  # fmt: skip
HANDLE = {"submission_id": JOB.submission_id, "address": "http://ray:8265"}


def test_what_is_sent_to_ray():
    config = ClusterConfig(
        backend="ray", ray={"address": "http://ray:8265", "resources": {"nvme": 1}, "strategy": "SPREAD"}
    )
    rendered = open_backend(config).render(JOB, Path("/share/jobs/one"))
    assert rendered.request == {
        "submission_id": "headway-train-0123456789ab-1",
        "entrypoint": f"exec {sys.executable} -m tasks.jobs.ray.driver /share/jobs/one",
        "runtime_env": {"env_vars": {"PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1", "RAY_JOB_STOP_WAIT_TIME_S": "45"}},
        "metadata": {
            "headway_job": "train-0123456789ab",
            "headway_token": "0123456789abcdef0123456789abcdef",
            "headway_submission": "1",
        },
    }
    assert json.loads(rendered.files["ray.json"]) == {
        "submission": 1,
        "nodes": 2,
        "driver": False,
        "bundle": {"CPU": 8, "GPU": 4, "memory": 1610612736, "nvme": 1.0},
        "strategy": "SPREAD",
        "excluded": ["n9"],
        "only": [],
        "autoscales": False,
        "pin": "",
        "shared_seconds": 60.0,
        "commands": [
            [sys.executable, "-m", "tasks.common.process", f"/share/jobs/one/nodes/{rank}"] for rank in (0, 1)
        ],
        "environment": {"PYTHONPATH": ROOT, "PYTHONSAFEPATH": "1"},
    }
    assert (rendered.backend, rendered.command) == ("ray", ())


def test_what_is_sent_to_ray_for_machines_that_share_no_folder(tmp_path):
    store = "stores: {blob: {uri: 'az://account/jobs/team', credential: managed_identity}}"
    (tmp_path / "stores.yaml").write_text(store)
    cluster = {"backend": "ray", "ray": {"address": "http://ray:8265"}, "mirror": {"store": "blob", "client": "c-1"}}
    backend = open_backend(ClusterConfig.model_validate(cluster), partial(open_files, tmp_path))
    rendered = backend.render(JOB, tmp_path / "jobs" / JOB.id)
    told = json.loads(rendered.files["ray.json"])
    assert told["mirrored"] and len(told["commands"]) == 2

    def mirror(rank, runs):
        return (
            f"HEADWAY_NODE_RANK={rank} exec {sys.executable} -m tasks.jobs.node.mirror --base /var/tmp "
            f"--own ray-headway-train-0123456789ab-1-{rank} --store az://account/jobs/team --prefix jobs/train-0123456789ab "
            f"--credential managed_identity --codes --client c-1 --max-lag-seconds 1800 {runs}"
        )

    agent = f"-- {sys.executable} -m tasks.common.process '{{node}}'"
    assert told["commands"] == [["bash", "-c", mirror(rank, agent)] for rank in (0, 1)]
    driver = f"--without-inputs -- {sys.executable} -m tasks.jobs.ray.driver '{{folder}}'"
    assert rendered.request["entrypoint"] == mirror(2, driver), "the driver counts as one more machine"
    assert str(tmp_path) not in f"{rendered.files} {rendered.request}"
    assert "HEADWAY_FOLDER_KEY" not in rendered.request["runtime_env"]["env_vars"], "the key is added when it is sent"
    script = JOB.model_copy(update={"driver": True, "nodes": 1, "ranks_per_node": 1})
    with pytest.raises(ValueError, match="a driver script runs on Ray's head .*: leave cluster.mirror empty"):
        backend.render(script, tmp_path / "jobs" / JOB.id)


def test_the_network_of_a_known_size_is_set_for_every_machine():
    job = JOB.model_copy(update={"size": "Standard_ND96isr_H100_v5"})
    rendered = open_backend(ClusterConfig(backend="ray", ray={"address": "http://ray:8265"})).render(job, Path("/job"))
    environment = json.loads(rendered.files["ray.json"])["environment"]
    assert environment["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    assert environment["NCCL_MIN_NCHANNELS"] == "32" and environment["PYTHONSAFEPATH"] == "1"


def test_what_a_node_of_azure_ml_executes():
    rendered = ray_on_nodes(JOB.model_copy(update={"image": "acpt", "nodes": 3}), Path("/mnt/job"), RayConfig())
    assert rendered.command == ("python3", "-m", "tasks.jobs.ray.cluster", "/mnt/job")
    assert rendered.environment == {"PYTHONSAFEPATH": "1"}
    told = json.loads(rendered.files["ray.json"])
    assert (told["nodes"], told["pin"], told["join_seconds"]) == (3, "headway-node-rank", 600.0)
    assert told["environment"] == {"PYTHONSAFEPATH": "1"}
    assert told["commands"][2] == ["python3", "-m", "tasks.common.process", "/mnt/job/nodes/2"]


def test_the_cluster_of_this_machine_is_closed_to_others_and_tells_nobody():
    told = spec(Path("/h/ray"), {"gcs": 1, "client": 2, "dashboard": 3, "agent": 4})
    assert told.argv[1:] == [
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", "1", "--ray-client-server-port", "2"),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", "3", "--dashboard-agent-listen-port", "4"),
        *("--object-store-memory", "83886080", "--temp-dir", "/h/ray/t", "--disable-usage-stats"),
    ]
    assert told.secrets == ()
    assert (told.env["RAY_AUTH_MODE"], told.env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/h/ray/token")
    assert told.env["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"image": "docker.io/x"}, "image is docker.io/x: leave cluster.image empty"),
        ({"exclusive": True}, "set cluster.exclusive to false"),
        ({"launcher": "mpi"}, "use torchrun on backend ray"),
        ({"driver": True}, "a driver script is one process, and this one has 2 x 4"),
        (
            {"driver": True, "nodes": 1, "ranks_per_node": 1, "elastic": ElasticConfig(max_nodes=2)},
            "a driver script is one process, and this one has 1:2 x 1",
        ),
    ],
)
def test_what_ray_cannot_give_is_refused_before_anything_is_submitted(fields, says):
    with pytest.raises(ValueError, match=says):
        driver_spec(JOB.model_copy(update=fields), Path("/share"), RayConfig())


def test_names_of_machines_are_their_own():
    nodes = [
        _node("a" * 56, "same"),
        _node("b" * 56, "same"),
        _node("c" * 56, "own"),
        _node("d" * 56, "dead", alive=False),
    ]
    assert [machine.name for machine in machines(nodes)] == ["same-aaaaaaaa", "same-bbbbbbbb", "own"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nodes": 2}, ""),
        ({"nodes": 2, "excluded": ["n2"]}, "can hold 1, 1 more are excluded. It has n1: 4 CPU. Lower cluster.nodes"),
        ({"nodes": 2, "only": ["n2", "n9"]}, "can hold 1, 1 more are excluded. It has n2: 4 CPU. Lower cluster.nodes"),
        ({"nodes": 3}, "of its own each .ray.strategy is STRICT_SPREAD. with 2 CPU, and the Ray cluster can hold 2"),
        ({"nodes": 4, "strategy": "PACK"}, ""),
        ({"nodes": 5, "strategy": "SPREAD"}, "needs 5 machine.s. with 2 CPU, and the Ray cluster can hold 4"),
        ({"bundle": {"CPU": 2, "GPU": 1}}, "No machine has enough GPU: lower cluster.gpus_per_node"),
        ({"bundle": {"CPU": 8}}, "enough CPU: lower cluster.ranks_per_node or cluster.threads_per_rank"),
        ({"bundle": {"nvme": 1}}, "enough nvme: lower ray.resources.nvme"),
        ({"bundle": {"memory": 2**31}}, "with 2 GiB memory.*lower cluster.memory_gib"),
    ],
)
def test_what_a_cluster_lacks(fields, says):
    told = {"nodes": 1, "bundle": {"CPU": 2}, "strategy": "STRICT_SPREAD", "excluded": [], "only": [], **fields}
    there = [Machine(id=f"{n}", name=f"n{n}", address=f"10.0.0.{n}", host="vm", resources={"CPU": 4.0}) for n in (1, 2)]
    found = lacking(told, there)
    assert re.search(says, found) if says else found == ""


def test_a_job_is_kept_on_the_machines_that_it_may_run_on():
    there = [Machine(id=f"{n}" * 3, name=f"n{n}", address=f"10.0.0.{n}", host="vm", resources={}) for n in (1, 2, 3)]
    assert selector({"excluded": [], "only": []}, there) == ""
    assert selector({"excluded": ["n2", "10.0.0.3"], "only": []}, there) == "!in(222,333)"
    assert selector({"excluded": ["n2"], "only": ["n1", "n2", "n3"]}, there) == "in(111,333)"


def test_the_driver_of_an_elastic_job_is_told_its_range_and_who_qualified():
    elastic, proven = ElasticConfig(min_nodes=1, max_nodes=3), Admission(proven=("n1",), settings={})
    fields = {"elastic": elastic, "admission": proven, "nodes": 1, "progress": "checkpoints/LATEST", "restarts": 2}
    given = driver_spec(JOB.model_copy(update=fields), Path("/share"), RayConfig())
    assert (given["nodes"], len(given["commands"])) == (1, 3)
    assert given["elastic"] == {
        "max_nodes": 3,
        "proven": ["n1"],
        "restarts": 2,
        "progress": "checkpoints/LATEST",
        "holder": [sys.executable, "-m", "tasks.common.process", "/share/rendezvous"],
    }


@pytest.mark.parametrize(
    ("fields", "used", "out", "expected"),
    [
        ({}, [], [], ["n1", "n2"]),
        ({}, ["111"], [], ["n2"]),
        ({"strategy": "PACK"}, ["111"], [], ["n2"]),
        ({}, [], ["10.0.0.2"], ["n1"]),
        ({"excluded": ["n1"]}, [], [], ["n2"]),
        ({"only": ["n1", "n3"]}, [], [], ["n1"]),
        ({"bundle": {"CPU": 1}}, [], [], ["n1", "n2", "n3"]),
    ],
)
def test_one_more_machine_of_an_elastic_job_is_one_that_holds_it_and_is_not_its_own_yet(fields, used, out, expected):
    existing = [
        Machine(
            id=f"{n}" * 3, name=f"n{n}", address=f"10.0.0.{n}", host="vm", resources={"CPU": 1.0 if n == 3 else 4.0}
        )
        for n in (1, 2, 3)
    ]
    spec = {"bundle": {"CPU": 2}, "strategy": "STRICT_SPREAD", "excluded": [], "only": [], **fields}
    assert [machine.name for machine in candidates(spec, existing, used=used, out=out)] == expected


def test_an_elastic_job_says_how_many_machines_it_has_and_ends_as_its_store_says(tmp_path):
    mark = {"submission": 1, "state": "running", "reason": "1 of at most 3 machines"}
    process.write_json(tmp_path / "ray-state.json", mark)
    running = Told(jobs={HANDLE["submission_id"]: _details("RUNNING")})
    assert state_of(HANDLE, tmp_path, running).reason == "1 of at most 3 machines"
    process.write_json(
        tmp_path / "rendezvous" / "exit.json", {"code": 0, "reason": "ended", "attempts": 1, "ended": 1.0}
    )
    process.write_json(tmp_path / "nodes" / "2" / "attempts.json", {"attempts": 4})
    state = state_of(HANDLE, tmp_path, Told(jobs={}))
    assert (state.state, state.code, state.attempts) == ("ended", 0, 4), "the cluster has forgotten the job"


def test_a_cluster_that_does_not_answer_is_no_absence(tmp_path):
    backend = open_backend(ClusterConfig(backend="ray", ray={"address": f"http://127.0.0.1:{free_port()}"}))
    handle = {**HANDLE, "address": backend._config.ray.address}
    state = backend.states([(handle, tmp_path)])[0]
    assert state.state == "unknown" and "Failed to connect to Ray" in state.reason
    for act in (lambda: backend.find(JOB, tmp_path), lambda: backend.cancel(handle, tmp_path)):
        with pytest.raises(Missing, match="does not answer"):
            act()
    with pytest.raises(Missing, match="does not answer"):
        backend.submit(JOB, tmp_path / "job")
    assert not (tmp_path / "job" / "job.json").exists()


@pytest.mark.parametrize(
    ("status", "mark", "expected"),
    [
        (None, {}, ("lost", None, None)),
        (None, {"state": "ended"}, ("ended", 0, None)),
        ("PENDING", {}, ("queued", None, None)),
        ("RUNNING", {}, ("starting", None, None)),
        ("RUNNING", {"state": "queued"}, ("queued", None, None)),
        ("RUNNING", {"state": "running"}, ("running", None, None)),
        ("RUNNING", {"state": "ended"}, ("running", None, None)),
        ("RUNNING", {"state": "running", "submission": 2}, ("starting", None, None)),
        ("SUCCEEDED", {"state": "ended"}, ("ended", 0, None)),
        ("STOPPED", {"state": "running"}, ("ended", 1, None)),
        ("FAILED", {"state": "ended", "code": 1, "failure": "node", "failed_nodes": ["n2"]}, ("ended", 1, "node")),
        ("FAILED", {"state": "running"}, ("ended", 137, "infrastructure")),
    ],
)
def test_a_state_is_what_ray_says_and_what_the_driver_wrote(tmp_path, status, mark, expected):
    if mark:
        rest = {"submission": 1, "reason": "words", "code": 0, "failure": None, "failed_nodes": []}
        process.write_json(tmp_path / "ray-state.json", {**rest, **mark})
    state = state_of(HANDLE, tmp_path, Told(jobs={HANDLE["submission_id"]: _details(status)} if status else {}))
    assert (state.state, state.code, state.failure) == expected
    assert state.failed_nodes == tuple(mark.get("failed_nodes", ()))
    assert state.state != "lost" or "jobs end with their cluster" in state.reason


def test_a_silent_cluster_with_a_finished_job_lets_the_job_be_finished(tmp_path):
    assert state_of(HANDLE, tmp_path, Told(why="timed out")).state == "unknown"
    ended = {"submission": 1, "state": "ended", "reason": "ended", "code": 0, "failure": None, "failed_nodes": []}
    process.write_json(tmp_path / "ray-state.json", ended)
    assert state_of(HANDLE, tmp_path, Told(why="timed out")).state == "ended"


def test_a_cluster_without_headway_is_named(tmp_path):
    said = _details("FAILED", "Job entrypoint command failed\npython3: No module named tasks")
    state = state_of(HANDLE, tmp_path, Told(jobs={HANDLE["submission_id"]: said}))
    assert (state.failure, state.reason) == ("missing", "Job entrypoint command failed python3: No module named tasks")


def _details(status, message="Job entrypoint command failed with exit code 137"):
    return JobDetails(
        type=JobType.SUBMISSION, submission_id=HANDLE["submission_id"], status=JobStatus(status), entrypoint="python",
        message=message, driver_exit_code=137,
    )  # fmt: skip


def _node(identity, name, alive=True):
    return {
        "NodeID": identity, "NodeName": name, "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "vm",
        "Alive": alive, "Resources": {"CPU": 2.0},
    }  # fmt: skip
