"""An elastic training job, small enough for two cores: its tokens, its job, and what its records prove."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts import unqualified
from tasks.benchmark import admitting
from tasks.compute.job import Admission, Job
from tasks.config.cluster import ClusterConfig, ElasticConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.config.training import NetworkConfig, TrainingConfig
from tasks.formats.mmididx import TokenWriter

EVERY = 25


class Journal:
    """Intents and handles, in memory."""

    claims = None

    def __init__(self):
        self.kept = {}

    def put(self, key, value):
        return self.kept.setdefault(key, value) is value

    def get(self, key):
        return self.kept.get(key)

    def list(self, prefix):
        return sorted(key for key in self.kept if key.startswith(prefix))


def training(steps: int, hidden_size: int = 32) -> TrainingConfig:
    """A network of two layers; 12 samples a step divide into 1, 2 or 3 ranks, and 30 s of steps are enough to watch."""
    network = NetworkConfig(layers=2, hidden_size=hidden_size, heads=2, kv_heads=1, intermediate_size=2 * hidden_size)
    return TrainingConfig(
        network=network, sequence_length=64, global_batch_size=12, micro_batch_size=2, steps=steps, warmup_steps=4
    )


def write_tokens(folder: Path) -> Path:
    """A train split of a hundred documents, as the stage preprocess leaves it."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(0)
    writer = TokenWriter(folder / "train_text_document", 64)
    for _ in range(100):
        writer.add_document([*(int(token) for token in generator.integers(63, size=200)), 63])
    documents, count = writer.close()
    splits = {"train": {"documents": documents, "tokens": count, "bytes": count}}
    (folder / "tokens.json").write_text(json.dumps({"vocab_size": 64, "eod_id": 63, "splits": splits}))
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_text(json.dumps({"file": name}))
    return folder


def elastic_job(
    tokens: Path, config: TrainingConfig, *, least: int = 1, most: int = 3, every: int = EVERY, **more: Any
) -> Job:
    """One rank a machine, on `least` to `most` of them."""
    settings = {"training": config.model_dump(mode="json"), "checkpoint_every_steps": every, "keep_checkpoints": 2}
    return Job(
        name="train",
        token="e1a5" * 8,
        program="tasks.jobs.train",
        settings=settings,
        inputs={"tokens": str(tokens)},
        nodes=least,
        progress="checkpoints/LATEST",
        **{"elastic": ElasticConfig(min_nodes=least, max_nodes=most), **more},
    )


def admission(proven: tuple[str, ...], *, nodes: str = "1:3", **changes: Any) -> Admission:
    """What machines of an elastic job that are not `proven` measure, by the stage's own function: little, in a few seconds.

    They share this machine's cores with the training that runs meanwhile, so any rate is fast enough.
    """
    quick = {"seconds": 0.2, "matmul_size": 128, "largest_megabytes": 1, "rounds": 1, **changes}
    config = BenchmarkConfig.model_validate(quick)
    cluster = ClusterConfig.model_validate({"backend": "slurm", "ranks_per_node": 1, "nodes": nodes})
    on = admitting(unqualified(cluster), config, training(steps=5))
    assert on.admission
    on.admission["sku"]["limits"]["matmul_fp32"]["fail"] = 1e-9
    return Admission(proven=proven, settings=on.admission)


def lines(folder: Path) -> list[dict[str, Any]]:
    """Every record so far; the last line may be half written."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def consumed(folder: Path) -> list[tuple[int, int, int]]:
    """Of each step that counts in the end: its number, the samples consumed after it, and the checksum of what was read."""
    last = {record["step"]: record for record in sorted(lines(folder), key=lambda record: record["attempt"])}
    return [(step, last[step]["consumed"], last[step]["samples_crc32"]) for step in sorted(last)]


def expected(tokens: Path, config: TrainingConfig) -> list[tuple[int, int, int]]:
    """The same of a run that nothing disturbs, computed from the tokens alone."""
    import torch

    from tasks.jobs.data.samples import Batch, open_samples
    from tasks.jobs.node.elastic import fingerprint

    samples, size = open_samples(tokens, config), config.global_batch_size
    batches = [torch.from_numpy(samples.batch(step * size, size)) for step in range(config.steps)]
    return [
        (n, n * size, int(fingerprint([Batch(batch[:, :-1], batch[:, 1:])])))
        for n, batch in enumerate(batches, start=1)
    ]


def world_sizes(folder: Path) -> list[int]:
    """The numbers of ranks in the order in which they were, each once in a row."""
    sizes = [record["world_size"] for record in lines(folder)]
    return [size for place, size in enumerate(sizes) if place == 0 or sizes[place - 1] != size]


@contextmanager
def breaking(measuring: Callable[[], Iterable[int]]) -> Iterator[None]:
    """While this lasts, whatever measures a machine dies at once; `measuring` are the processes that do."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            for pid in measuring():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def require_joining_costs_no_step(folder: Path, alone: int) -> None:
    """A second machine joined after step `alone`, and no step up to then was done twice."""
    records = lines(folder)
    joined = next(place for place, record in enumerate(records) if record["world_size"] == 2)
    assert joined >= alone
    assert [record["step"] for record in records[: joined + 1]] == list(range(1, joined + 2))
