"""A real Slurm whose nodes share no folder with anybody: the job's folder lies in a real Azurite, and on each node's own disk.

In the place of /var/tmp and of all that this test writes each slurmd has a file system of its own, which ends with it.
"""

import hashlib
import os
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

import azurite
import elastic_material
import pytest
import yaml
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT
from slurm_jobs import over, reachable, small
from slurm_jobs import until as until_state
from slurm_stand import slurm
from waiting import limit, until

from tasks.common.process import read_json
from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig
from tasks.registry.records import StoreJournal
from tasks.storage import open_files, open_store
from tasks.storage.manifest import Provenance

SECRET = "HEADWAY_TEST_CONNECTION"
ONLY_HERE = "HEADWAY_TEST_OTHER_CONNECTION"
"""A variable that the nodes do not have."""
STEPS, EVERY = 60, 15


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stand(tmp_path_factory, home):
    """Three nodes, a store that they reach, and nothing else that they have in common with this test."""
    if os.geteuid() != 0:
        pytest.skip("mount namespaces need root")
    seen = Path(tempfile.mkdtemp(prefix="hw-prolog-"))
    hidden = (Path("/var/tmp"), tmp_path_factory.getbasetemp())
    with (
        azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as blobs,
        pytest.MonkeyPatch.context() as variables,
        slurm(3, settings=f"TaskProlog={seen}/prolog", hidden=hidden) as made,
        reachable(made),
    ):
        # as an administrator gives tasks a variable: what has a secret in it does not go along with sbatch
        (seen / "prolog").write_text(f"#!/bin/sh\necho 'export {SECRET}={blobs.connection_string}'\n")
        (seen / "prolog").chmod(0o755)
        BlobServiceClient.from_connection_string(blobs.connection_string).create_container("jobs")
        variables.setenv(SECRET, blobs.connection_string)
        store = {"uri": f"az://{ACCOUNT}/jobs/team", "credential": "connection_string", "secret": f"env:{SECRET}"}
        variables.setenv(ONLY_HERE, blobs.connection_string)
        other = {**store, "secret": f"env:{ONLY_HERE}"}
        (home / "stores.yaml").write_text(yaml.safe_dump({"stores": {"blob": store, "other": other}}))
        yield made
    shutil.rmtree(seen)


def cluster(*, nodes=2, **changed):
    mirror = {"store": "blob", "credential": "connection_string"}
    watch = {"silent_node_seconds": limit(8.0), "join_node_seconds": limit(60.0), "hang_seconds": limit(30.0)}
    shape = {"backend": "slurm", "nodes": nodes, "ranks_per_node": 1, "retry": {"back_off_seconds": 0.5}}
    return ClusterConfig.model_validate({**shape, "mirror": mirror, "watch": watch, **changed})


def lying(job):
    """Names in the store of a job's folder."""
    start = f"team/jobs/{job.id}/"
    container = BlobServiceClient.from_connection_string(os.environ[SECRET]).get_container_client("jobs")
    return [blob.name.removeprefix(start) for blob in container.list_blobs(name_starts_with=start)]


def training_job(config, home, tmp_path, token):
    """A network that is divided over the ranks, so that each has a shard of its own."""
    tokens = elastic_material.write_tokens(tmp_path / "tokens")
    made = open_store(home).publish(tokens, kind="tokens", inputs=(), provenance=Provenance(name="tiny"))
    settings = {
        "training": elastic_material.training(STEPS).model_dump(mode="json"),
        "execution": {"parallel": "fsdp"},
        "checkpoint_every_steps": EVERY,
        "keep_checkpoints": 2,
    }
    shape = {"nodes": config.nodes, "ranks_per_node": 1, "watch": config.watch, "retry": config.retry}
    inputs = {"inputs": {"tokens": str(tokens)}, "artifacts": {"tokens": made.ref}}
    fields = {"name": "train", "token": token * 16, "program": "tasks.jobs.train", "progress": "checkpoints/LATEST"}
    return Job(settings=settings, **fields, **shape, **inputs)


def supervised(job, config, home, **watch):
    backend, folder = open_backend(config, partial(open_files, home)), home / "jobs" / job.id
    journal = StoreJournal(open_store(home))
    return run(job, backend=backend, folder=folder, journal=journal, watch=Watch(**watch), cluster=config)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def test_program_inputs_and_results_travel_through_the_store_alone(stand, home, tmp_path):
    config = cluster(nodes=1)
    backend = open_backend(config, partial(open_files, home))
    folder = tmp_path / "input"
    folder.mkdir()
    (folder / "file").write_text("content")
    made = open_store(home).publish(folder, kind="tokens", inputs=(), provenance=Provenance(name="small"))
    job = small(tmp_path, inputs={"tokens": str(folder)}, artifacts={"tokens": made.ref})
    here = home / "jobs" / job.id
    handle = backend.submit(job, here)
    script = (here / "job.sbatch").read_text()
    assert str(here) not in script and "HEADWAY_FOLDER_KEY=" not in script
    assert backend.find(job, here) == handle
    assert until_state(backend, handle, here, over)[-1].code == 0
    assert read_json(here / "result.json")["node"] == "n1"
    assert read_json(here / "slurm-1.json") == {"job": handle["job"], "name": job.submission_id}
    stand.wait_idle()
    disk = Path(f"/proc/{stand.daemons['n1'].pid}/root/var/tmp")
    assert [path.name for path in disk.iterdir()] == [f"headway-{os.getuid()}"], "the log of what went well is gone"
    assert not list((disk / f"headway-{os.getuid()}").iterdir()), "and so is all of the job"


def test_a_job_that_is_cancelled_ends_on_its_nodes(stand, home, tmp_path):
    backend, job = open_backend(cluster(nodes=1), partial(open_files, home)), small(tmp_path, steps=100_000)
    here = home / "jobs" / job.id
    handle = backend.submit(job, here)
    until_state(backend, handle, here, lambda state: state.state == "running" and (here / "metrics.jsonl").exists())
    backend.cancel(handle, here)
    assert until_state(backend, handle, here, over)[-1].failure == "cancelled"
    stand.wait_idle()


def test_nodes_that_cannot_use_the_store_are_told_of_with_the_log_that_says_why(stand, home, tmp_path):
    config = cluster(nodes=1, mirror={"store": "other", "credential": "connection_string"})
    backend, job = open_backend(config, partial(open_files, home)), small(tmp_path)
    here = home / "jobs" / job.id
    handle = backend.submit(job, here)
    state = until_state(backend, handle, here, over)[-1]
    assert (state.failure, state.code) == ("missing", 120)
    assert f"/var/tmp/headway-{handle['job']}.log on the first of n1" in state.reason


@pytest.mark.long
@pytest.mark.parametrize("requeue", [False, True])
def test_a_node_that_is_lost_with_its_disk_is_replaced_and_training_goes_on_bit_for_bit(stand, home, tmp_path, requeue):
    config = cluster(slurm={"requeue": requeue})
    job = training_job(config, home, tmp_path, "d5" if requeue else "e6")
    metrics, events = [], []

    def take_away():
        until(lambda: any(name.endswith("/manifest.json") for name in lying(job)), 120)
        stand.kill_node("n2")

    taking = threading.Thread(target=take_away, daemon=True)
    taking.start()
    done = supervised(job, config, home, metrics=metrics.extend, event=events.append)
    taking.join()
    folder = home / "jobs" / job.id
    assert done.submissions == (1 if requeue else 2), events
    assert {read_json(path)["name"] for path in folder.glob("nodes/*/node.json")} == {"n1", "n3"}
    assert done.resumed_from_step >= EVERY and done.resumed_from_step % EVERY == 0
    came = [read_json(folder / "nodes" / str(rank) / "came.json")["files"] for rank in range(2)]
    assert came == [1, 1], "of the checkpoint each node had its own shard come, and no other's"
    assert {int(record["step"]) for record in metrics} == set(range(1, STEPS + 1))
    assert not [name for name in lying(job) if "shard" in name], "nobody needs the checkpoints of a finished job"
    stand.revive("n2")

    alone = ClusterConfig(backend="local", ranks_per_node=2, watch=config.watch)
    same = job.model_copy(update={"token": job.token[::-1], "nodes": 1, "ranks_per_node": 2})
    assert digests(done.output) == digests(supervised(same, alone, home).output), "as if nothing had happened"
