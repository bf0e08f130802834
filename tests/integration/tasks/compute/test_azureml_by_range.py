"""Two nodes of Azure ML that train on tokens in the store: each reads what its samples need there, and the launcher nothing."""

import json

import elastic_material
import numpy as np
import pytest
from azureml_stand import standing

from tasks.compute import open_backend
from tasks.compute.job import Job
from tasks.compute.polling import Watch
from tasks.compute.supervisor import run
from tasks.config.cluster import ClusterConfig
from tasks.formats.mmididx import BLOCK, TokenWriter, write_blocks
from tasks.registry.records import StoreJournal
from tasks.storage import open_store
from tasks.storage.manifest import Provenance
from tasks.train import READ_IN_PARTS

STEPS, NODES = 12, 2
CONFIG = elastic_material.training(STEPS)
FILES = {"train-00000_text_document": 3_000_000, "train-00001_text_document": 2_500_000}


def write_tokens(folder):
    """Eleven megabytes in two files, of which the run reads 144 samples of 130 bytes."""
    elastic_material.write_tokens(folder)
    for path in folder.glob("train*"):
        path.unlink()
    random = np.random.default_rng(2)
    for name, tokens in FILES.items():
        writer = TokenWriter(folder / name, 64)
        for _ in range(10):
            writer.add_document([*random.integers(63, size=tokens // 10 - 1).tolist(), 63])
        writer.close()
        write_blocks(folder / name)
    about = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps({**about, "files": {"train": list(FILES)}}))
    return folder


def training_job(tokens, ref, **changed):
    settings = {"training": CONFIG.model_dump(mode="json"), "execution": {"cache_gib": 1.0}}
    settings |= {"checkpoint_every_steps": STEPS, "keep_checkpoints": 1}
    fields = {"name": "train", "program": "tasks.jobs.train", "progress": "checkpoints/LATEST"}
    inputs = {"inputs": {"tokens": str(tokens)}, "artifacts": {"tokens": ref}}
    return Job(settings=settings, **fields, **inputs, **changed)


@pytest.mark.long
def test_nodes_read_their_samples_where_the_tokens_lie(tmp_path):
    tokens = write_tokens(tmp_path / "tokens")
    with standing(tmp_path / "stand") as stand:
        store = open_store(stand.home)
        made = store.publish(tokens, kind="tokens", inputs=(), provenance=Provenance(name="large"))
        job = training_job(tokens, made.ref, token="a5" * 16, nodes=NODES, by_range={"tokens": READ_IN_PARTS})
        backend, since = stand.backend(nodes=NODES), len(stand.relay.log)
        backend.poll_seconds = 0.5
        done = run(
            job, backend=backend, folder=stand.home / "jobs" / job.id, journal=StoreJournal(store), watch=Watch()
        )
        there = training_job(tokens, made.ref, token="b6" * 16, ranks_per_node=NODES)
        alone = run(
            there,
            backend=open_backend(ClusterConfig()),
            folder=tmp_path / "alone" / there.id,
            journal=StoreJournal(store),
            watch=Watch(),
        )
        reads = [r for r in stand.relay.log[since:] if r.method == "GET" and r.place[1].endswith(".bin")]
        lying = [path for base in (stand.home, stand.service.base) for path in base.rglob("train*.bin")]
    assert not lying, "no file of tokens was brought anywhere"
    read = sum(request.asked_bytes for request in reads)
    used = STEPS * CONFIG.global_batch_size * 2 * (CONFIG.sequence_length + 1)
    # Each sample costs the block that it lies in, or two; read ahead are a few steps more than were used.
    assert used <= read <= 3 * STEPS * CONFIG.global_batch_size * BLOCK < sum(FILES.values()) * 2 / 1.5, (used, read)

    for name in ("model.safetensors", "training_log.jsonl"):
        assert (done.output / name).read_bytes() == (alone.output / name).read_bytes(), "as with the tokens in a folder"
