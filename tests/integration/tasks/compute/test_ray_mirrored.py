"""A real Ray cluster whose machines share no folder with anybody: the job's folder lies in a real Azurite and on each one's disk.

In the place of /var/tmp and of all that this test writes each raylet, that of the head too, has a disk of its own.
"""

import hashlib
import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import azurite
import elastic_material
import pytest
import yaml
from azure.storage.blob import BlobServiceClient
from azurite import ACCOUNT
from ray_stand import RayStand
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
STEPS, EVERY = 60, 15


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def stand(tmp_path_factory, home):
    """A head that has no room for a job, three machines, and a store that all of them reach."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mount namespaces: unshare of util-linux, and the right to use it")
    with (
        azurite.running(tmp_path_factory.mktemp("azurite"), in_memory=True) as blobs,
        pytest.MonkeyPatch.context() as variables,
    ):
        BlobServiceClient.from_connection_string(blobs.connection_string).create_container("jobs")
        store = {"uri": f"az://{ACCOUNT}/jobs/team", "credential": "connection_string", "secret": f"env:{SECRET}"}
        (home / "stores.yaml").write_text(yaml.safe_dump({"stores": {"blob": store}}))
        hidden = (Path("/var/tmp"), tmp_path_factory.getbasetemp())
        made = RayStand(hidden=hidden, environment={SECRET: blobs.connection_string})
        variables.setenv(SECRET, blobs.connection_string)
        try:
            for name in ("m1", "m2", "m3"):
                made.add(name, resources={"machine": 1})
            yield made
        finally:
            made.close()


def cluster(stand, *, nodes=2):
    mirror = {"store": "blob", "credential": "connection_string"}
    watch = {"silent_node_seconds": limit(20.0), "join_node_seconds": limit(60.0), "hang_seconds": limit(30.0)}
    ray = {"address": stand.address, "resources": {"machine": 1}}
    shape = {"backend": "ray", "nodes": nodes, "ranks_per_node": 1, "retry": {"back_off_seconds": 0.5}}
    return ClusterConfig.model_validate({**shape, "mirror": mirror, "watch": watch, "ray": ray})


def lying(job):
    """Names in the store of a job's folder."""
    start = f"team/jobs/{job.id}/"
    container = BlobServiceClient.from_connection_string(os.environ[SECRET]).get_container_client("jobs")
    return [blob.name.removeprefix(start) for blob in container.list_blobs(name_starts_with=start)]


def training_job(config, home, tmp_path):
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
    fields = {"name": "train", "token": "a7" * 16, "program": "tasks.jobs.train", "progress": "checkpoints/LATEST"}
    return Job(settings=settings, **fields, **shape, **inputs)


def supervised(job, config, home, **watch):
    backend, folder = open_backend(config, partial(open_files, home)), home / "jobs" / job.id
    journal = StoreJournal(open_store(home))
    return run(job, backend=backend, folder=folder, journal=journal, watch=Watch(**watch), cluster=config)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_machine_that_is_lost_with_its_disk_is_replaced_and_training_goes_on_bit_for_bit(stand, home, tmp_path):
    config = cluster(stand)
    job = training_job(config, home, tmp_path)
    folder = home / "jobs" / job.id
    metrics, events, lost = [], [], []

    def take_away():
        until(lambda: any(name.endswith("/manifest.json") for name in lying(job)), 200)
        lost.append(read_json(folder / "nodes" / "1" / "node.json")["name"])
        stand.kill(lost[0])

    taking = threading.Thread(target=take_away, daemon=True)
    taking.start()
    done = supervised(job, config, home, metrics=metrics.extend, event=events.append)
    taking.join()
    assert done.submissions == 2, events
    assert done.excluded_nodes == tuple(lost)
    assert lost[0] not in [read_json(path)["name"] for path in folder.glob("nodes/*/node.json")]
    assert done.resumed_from_step >= EVERY and done.resumed_from_step % EVERY == 0
    came = [read_json(folder / "nodes" / str(rank) / "came.json")["files"] for rank in range(2)]
    assert came == [1, 1], "of the checkpoint each machine had its own shard come, and no other's"
    assert {int(record["step"]) for record in metrics} == set(range(1, STEPS + 1))
    assert not [name for name in lying(job) if "shard" in name], "nobody needs the checkpoints of a finished job"

    alone = ClusterConfig(backend="local", ranks_per_node=2, watch=config.watch)
    same = job.model_copy(update={"token": job.token[::-1], "nodes": 1, "ranks_per_node": 2})
    assert digests(done.output) == digests(supervised(same, alone, home).output), "as if nothing had happened"
