"""Machines of the ssh backend that share no folder: the job's folder lies in a real Azurite, and on a disk of each machine's own.

Each sshd runs where the home is hidden and /var/tmp is a file system that ends with the machine.
"""

import hashlib
import os
import shlex
import subprocess
import threading
import time
from functools import partial
from pathlib import Path, PurePath

import azurite
import elastic_material
import pytest
import yaml
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT, KEY
from data_material import PARTS, run_stage, write_corpus
from ssh_stand import ssh_stand
from two_machines import TORCHRUN
from waiting import limit, until

from tasks.artifacts import Dataset
from tasks.common.errors import Missing
from tasks.common.process import read_json
from tasks.compute import open_backend
from tasks.compute.connection import Connection
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig, DataConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_files, open_store
from tasks.storage.manifest import Provenance

SECRET, OTHERS = "HEADWAY_TEST_CONNECTION", "HEADWAY_TEST_CONNECTION_OF_OTHERS"
STEPS, EVERY = 60, 15


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stand(tmp_path_factory, home):
    """Three machines, a store that they reach, and a home that they do not."""
    with (
        ssh_stand(tmp_path_factory.mktemp("ssh"), count=3) as made,
        azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True, host=made.here) as blobs,
        pytest.MonkeyPatch.context() as variables,
    ):
        BlobServiceClient.from_connection_string(blobs.connection_string).create_container("jobs")
        store = {"uri": f"az://{ACCOUNT}/jobs/team", "credential": "connection_string", "secret": f"env:{SECRET}"}
        stores = {"blob": store, "barred": {**store, "secret": f"env:{OTHERS}"}}
        (home / "stores.yaml").write_text(yaml.safe_dump({"stores": stores}))
        for name in (SECRET, OTHERS):
            variables.setenv(name, blobs.connection_string)
        no_key_of_it = blobs.connection_string.replace(KEY, KEY.swapcase())
        for machine in made.machines:
            isolate(made, machine, home, f'"{SECRET}={blobs.connection_string}" "{OTHERS}={no_key_of_it}"')
        yield made


def isolate(stand, machine, home, variables):
    """Its sshd anew, with a disk of its own, variables, and no sight of the home."""
    machine.kill()
    until(lambda: not machine.processes())
    path = stand.folder / f"{machine.name}.conf"
    path.write_text(path.read_text().replace("SetEnv SHLVL=2", f"SetEnv SHLVL=2 {variables}"))
    start_apart(stand, machine, home)


def start_apart(stand, machine, home):
    path = stand.folder / f"{machine.name}.conf"
    machine.link("up")
    sshd = shlex.join(
        [
            "ip",
            "netns",
            "exec",
            machine.name,
            "/usr/sbin/sshd",
            "-f",
            str(path),
            "-E",
            f"{stand.folder}/{machine.name}.log",
        ]
    )
    apart = f"mount -t tmpfs none {home} && mount -t tmpfs none /var/tmp && exec {sshd}"
    subprocess.run(["unshare", "--mount", "bash", "-c", apart], check=True, timeout=limit(60))
    until(machine.answers)


def cluster(stand, *, nodes=2, **changed):
    mirror = {"store": "blob", "credential": "connection_string", **changed}
    watch = {"silent_node_seconds": limit(8.0), "join_node_seconds": 60.0, "hang_seconds": limit(30.0)}
    return ClusterConfig(backend="ssh", nodes=nodes, ranks_per_node=1, ssh=stand.settings, watch=watch, mirror=mirror)


def training_job(config, home, tmp_path):
    """A network that is divided over the ranks, so that each has a shard of its own."""
    tokens = elastic_material.write_tokens(tmp_path / "tokens")
    made = open_store(home).publish(tokens, kind="tokens", inputs=(), provenance=Provenance(name="tiny"))
    training = elastic_material.training(STEPS).model_dump(mode="json")
    settings = {
        "training": training,
        "execution": {"parallel": "fsdp"},
        "checkpoint_every_steps": EVERY,
        "keep_checkpoints": 2,
    }
    shape = {"nodes": config.nodes, "ranks_per_node": config.ranks_per_node, "watch": config.watch}
    inputs = {"inputs": {"tokens": str(tokens)}, "artifacts": {"tokens": made.ref}}
    fields = {"name": "train", "token": "b3" * 16, "program": "tasks.jobs.train", "progress": "checkpoints/LATEST"}
    return Job(settings=settings, **fields, **shape, **inputs)


def lying(job):
    """Names in the store of a job's folder."""
    return names_of(job.id)


def names_of(folder):
    start = f"team/jobs/{folder}/"
    return [blob.name.removeprefix(start) for blob in container().list_blobs(name_starts_with=start)]


def container():
    return BlobServiceClient.from_connection_string(os.environ[SECRET]).get_container_client("jobs")


def supervised(job, config, home, **watch):
    backend, folder = open_backend(config, partial(open_files, home)), home / "jobs" / job.id
    journal = StoreJournal(open_store(home))
    return run(job, backend=backend, folder=folder, journal=journal, watch=Watch(**watch), cluster=config)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(1800)  # three starts of training; where others want the processors, ten minutes do not suffice
def test_a_host_that_is_lost_with_its_disk_is_replaced_and_training_goes_on_bit_for_bit(stand, home, tmp_path):
    config = cluster(stand)
    job = training_job(config, home, tmp_path)
    lost, metrics, events = stand.machines[1], [], []

    def take_away():
        until(lambda: any(name.endswith("/manifest.json") for name in lying(job)), 120)
        lost.take_away()

    taking = threading.Thread(target=take_away, daemon=True)
    taking.start()
    done = supervised(job, config, home, metrics=metrics.extend, event=events.append)
    taking.join()
    folder = home / "jobs" / job.id
    assert done.submissions == 2, events
    assert lost.address not in [read_json(path)["name"] for path in folder.glob("nodes/*/node.json")]
    assert done.resumed_from_step >= EVERY and done.resumed_from_step % EVERY == 0
    came = [read_json(folder / "nodes" / str(rank) / "came.json")["files"] for rank in range(2)]
    assert came == [1, 1], "of the checkpoint each machine had its own shard come, and no other's"
    assert {int(record["step"]) for record in metrics} == set(range(1, STEPS + 1))
    assert max(record["store_behind_steps"] for record in metrics) < STEPS
    assert not [name for name in lying(job) if "shard" in name], "nobody needs the checkpoints of a finished job"

    alone = ClusterConfig(backend="local", ranks_per_node=2, watch=config.watch)
    same = job.model_copy(update={"token": "c4" * 16, "nodes": 1, "ranks_per_node": 2})
    unbroken = supervised(same, alone, home)
    assert digests(done.output) == digests(unbroken.output), "as if nothing had happened"
    logs = [(result.output / "training_log.jsonl").read_text() for result in (done, unbroken)]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) == STEPS


@pytest.fixture
def complete(stand, home):
    """All machines, also one that a test before took away."""
    for machine in stand.machines:
        if not machine.answers():
            start_apart(stand, machine, home)
    return stand


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", PARTS)
def test_a_corpus_is_read_by_machines_that_share_no_folder(complete, home, tmp_path, stage):
    """One is lost with its disk; the parts of its units come from the store. What is made is what one process makes."""
    corpus = write_corpus(tmp_path / "dataset")
    _, alone = run_stage(stage, ClusterConfig(), corpus, tmp_path / "alone" / "job")
    made = open_store(home).publish(corpus, kind="dataset", inputs=(), provenance=Provenance(name="text"))
    config = cluster(complete).model_copy(update={"data": DataConfig(nodes=2, threads=1)})
    folder, lost = home / "jobs" / f"{stage}-mirrored", complete.machines[1]

    def take_away():
        until(lambda: len([name for name in names_of(folder.name) if PurePath(name).match(PARTS[stage])]) >= 2, 300)
        lost.take_away()

    taking = threading.Thread(target=take_away, daemon=True)
    taking.start()
    dataset = Dataset(name="text", version=made.version, uri="")
    done, apart = run_stage(stage, config, corpus, folder, dataset=dataset, files=partial(open_files, home), home=home)
    taking.join()
    assert done.submissions == 2 and apart == alone
    assert not (folder / "parts").exists(), "parts do not pass through the launcher"


ENDS_WELL = """
import sys
from tasks.jobs.node.runtime import main

def run(rank):
    (rank.folder / "out").mkdir(exist_ok=True)
    (rank.folder / "out" / f"part-{rank.rank}").write_text("made")
    return {}

if __name__ == "__main__":
    sys.exit(main(run))
"""


@pytest.mark.long
@pytest.mark.parametrize("gone", [False, True])
def test_a_machine_that_does_not_answer_has_not_sent_its_last_files(complete, home, tmp_path, gone):
    """Its list of what it sent is on its way when the leader has ended: the job is over when the list is there. A machine that is
    silent for too long has taken its files with it.
    """
    shim, program = tmp_path / "shim" / "torch" / "distributed", tmp_path / "ends_well.py"
    shim.mkdir(parents=True)
    for path, text in ((shim.parent / "__init__.py", ""), (shim / "__init__.py", ""), (shim / "run.py", TORCHRUN)):
        path.write_text(text)
    program.write_text(ENDS_WELL)
    config = cluster(complete)
    silence = limit(8.0) if gone else 300.0
    config = config.model_copy(update={"watch": config.watch.model_copy(update={"silent_node_seconds": silence})})
    fields = {
        "name": "try",
        "token": f"a{7 + gone}" * 16,
        "module": False,
        "settings": {},
        "inputs": {},
        "watch": config.watch,
    }
    environment = {"PYTHONPATH": f"{shim.parents[1]}{os.pathsep}{Path(__file__).parents[4]}"}
    job = Job(program=str(program), nodes=2, ranks_per_node=1, environment=environment, **fields)
    backend, folder = open_backend(config, partial(open_files, home)), home / "jobs" / job.id
    machine = complete.machines[1]
    handle = backend.submit(job, folder)

    def state():
        return backend.states([(handle, folder)])[0]

    until(lambda: {"nodes/0/exit.json", "nodes/1/exit.json", "nodes/1/output.json"} <= set(lying(job)), every=0.5)
    until(lambda: not machine.running("tasks.jobs.node.mirror"))
    blob = container().get_blob_client(f"team/jobs/{job.id}/nodes/1/output.json")
    data, metadata = blob.download_blob().readall(), blob.get_blob_properties().metadata
    blob.delete_blob()
    machine.link("down")
    try:
        assert (state().state, state().reason) == ("running", f"{machine.address} sends its last files")
        if gone:
            last = until(lambda: last if (last := state()).state != "running" else None)
            assert (last.state, last.failed_nodes) == ("lost", (machine.address,))
            assert last.reason == f"machine {machine.address} is gone with the last of its output"
            assert not (folder / "result.json").exists()
            return
        blob.upload_blob(data, metadata=metadata)
        assert (state().state, state().code) == ("ended", 0)
    finally:
        machine.link("up")
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["part-0", "part-1"]


def test_a_machine_that_may_not_use_the_store_ends_the_job_at_once(stand, home, tmp_path):
    config = cluster(stand, nodes=1, store="barred")
    job = training_job(config, home, tmp_path).model_copy(update={"token": "d5" * 16})
    with pytest.raises(
        Missing, match=f"machine {stand.machines[0].address} cannot use the store of cluster.mirror: "
    ) as ended:
        supervised(job, config, home)
    assert "Storage Blob Data Contributor" in ended.value.remedy
    assert StoreJournal(open_store(home)).get(f"jobs/{job.token}/0001/end")["failure"] == "missing"
    assert not stand.machines[0].running("tasks.jobs.node.mirror")


def test_a_machine_that_may_not_use_the_store_ends_a_job_that_waited_for_it(stand, home, tmp_path):
    machine, *others = stand.machines
    config = cluster(stand, nodes=1, store="barred")
    only = {"token": "e6" * 16, "excluded_nodes": tuple(other.address for other in others)}
    job = training_job(config, home, tmp_path).model_copy(update=only)
    lease = f"/var/tmp/headway-{os.getuid()}/{machine.address}"
    taken = f"mkdir -p -m 700 $(dirname {lease}) && echo another > {lease} && exec flock {lease} sleep 600"
    holding = threading.Thread(target=Connection(machine.host, config.ssh).run, args=(taken,), kwargs={"seconds": 600})
    holding.start()
    until(lambda: machine.running("sleep 600"))
    waited = []

    def let_go(event):
        if event.kind == "queued" and not waited:
            waited.append(event.text)
            subprocess.run(["kill", *map(str, machine.running("sleep 600"))], check=True, timeout=limit(60))

    with pytest.raises(Missing, match=f"machine {machine.address} cannot use the store of cluster.mirror: ") as ended:
        supervised(job, config, home, event=let_go)
    holding.join()
    assert "runs another" in waited[0]
    assert "Storage Blob Data Contributor" in ended.value.remedy


def test_a_machine_that_gets_no_answer_from_the_store_cannot_use_it(tmp_path, monkeypatch):
    """As behind a firewall: the start script of a machine, whose check takes longer than it may."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setenv(SECRET, f"AccountName={ACCOUNT};AccountKey={KEY}")
    store = {"uri": f"az://{ACCOUNT}/jobs/team", "credential": "connection_string", "secret": f"env:{SECRET}"}
    (tmp_path / "stores.yaml").write_text(yaml.safe_dump({"stores": {"blob": store}}))
    config = ClusterConfig(backend="ssh", ssh={"hosts": ["gpu-1"]}, mirror={"store": "blob"})
    job = Job(name="try", token="f" * 32, program="p", settings={}, inputs={}, python=str(silent))
    rendered = open_backend(config, partial(open_files, tmp_path)).render(job, tmp_path / "jobs" / job.id)
    script = rendered.files["nodes/0/start.sh"].replace("/var/tmp", str(tmp_path)).replace("timeout 90 ", "timeout 1 ")
    environment = {**os.environ, "SSH_CONNECTION": "10.0.0.1 1 10.0.0.2 22"}
    began = time.monotonic()
    command = ["bash", "-c", script]
    ended = subprocess.run(command, input="key\n", env=environment, text=True, capture_output=True, check=False)
    assert (ended.returncode, time.monotonic() - began < limit(30)) == (78, True), ended.stderr
    assert "no answer from it within 90 s" in ended.stderr


def test_a_store_that_is_not_there_and_inputs_of_this_machine_alone_are_refused(home, tmp_path):
    (home / "stores.yaml").exists() or (home / "stores.yaml").write_text("stores: {}")
    ssh = {"hosts": ["gpu-1"]}
    with pytest.raises(ValueError, match="store 'other' is not in stores.yaml: .* cluster.mirror.store"):
        open_backend(ClusterConfig(backend="ssh", ssh=ssh, mirror={"store": "other"}), partial(open_files, home))
    for backend, changed, said in (
        ("local", {}, "backend local takes no cluster.mirror"),
        ("ssh", {"ssh": ssh, "launcher": "mpi"}, "launcher mpi needs a folder that machines share"),
    ):
        with pytest.raises(ValueError, match=said):
            ClusterConfig(backend=backend, mirror={}, **changed)
    workspace = {
        "subscription_id": "s",
        "resource_group": "g",
        "workspace": "w",
        "compute": "c",
        "environment": "azureml:e:1",
    }
    with pytest.raises(ValueError, match="mirrors to the store of azureml.store"):
        ClusterConfig(backend="azureml", azureml=workspace, mirror={"store": "blob"})
