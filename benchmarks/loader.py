"""How fast a rank's batches come: Headway's loader beside a plain memmap Dataset and Megatron's GPTDataset, in one run.

    python -m benchmarks.loader [--tokens 100000000] [--length 2048] [--batch 16] [--steps 100] [--rounds 7]

All read the same .bin/.idx in an order shuffled over the whole file, and hand over int64 inputs and targets of one step at a
time. The rivals stand behind torch's DataLoader, with no worker and with two (Megatron's default); the goal is 1.5 times the
faster of these. Rounds are interleaved, the middle one counts. GPTDataset is megatron-core's, with its compiled helpers; when it
is not installed that is said. CPU is that of this process, so not of a DataLoader's workers; a busy machine changes it least.
Wait: what of a step is left to wait for when a step computes for 20 ms meanwhile. Nothing clears the page cache: all read warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from tasks.formats.mmididx import TokenWriter, map_tokens
from tasks.jobs.data.samples import Loader, Mapped, Samples, Shares

VOCABULARY, EOD = 50_257, 50_256
DOCUMENT = 1000
COMPUTE_SECONDS = 0.02
Steps = Iterator[Any]


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        prefix = write(Path(name) / "corpus", given.tokens)
        opened, starts = open_all(prefix, given)
        rates: dict[str, list[float]] = {way: [] for way in opened}
        waits: dict[str, list[float]] = {way: [] for way in opened}
        processors: dict[str, list[float]] = {way: [] for way in opened}
        for _ in range(given.rounds):
            for way, steps in opened.items():
                seconds, processor = drain(steps, given.steps)
                rates[way].append(given.steps * given.batch * given.length / seconds)
                processors[way].append(processor / (given.steps * given.batch * given.length))
                waits[way].append(waited(steps, max(1, given.steps // 5)))
        rows = {
            way: {
                "first_step_seconds": round(starts[way], 3),
                "million_tokens_per_second": round(statistics.median(rates[way]) / 1e6, 2),
                "cpu_nanoseconds_per_token": round(statistics.median(processors[way]) * 1e9, 2),
                "wait_share": round(statistics.median(waits[way]), 4),
            }
            for way in opened
        }
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count(), "ways": rows}, indent=1))
    print("\n".join(table(rows)), file=sys.stderr)
    os._exit(0)  # workers of the DataLoaders wait for somebody to read what they made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 100_000_000, "length": 2048, "batch": 16, "steps": 100, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def write(prefix: Path, tokens: int) -> Path:
    """Documents of random tokens."""
    generator, writer = np.random.default_rng(0), TokenWriter(prefix, VOCABULARY)
    for _ in range(tokens // DOCUMENT):
        writer.add_document([*generator.integers(EOD, size=DOCUMENT - 1).tolist(), EOD])
    writer.close()
    return prefix


def open_all(prefix: Path, given: argparse.Namespace) -> tuple[dict[str, Steps], dict[str, float]]:
    """Every way's steps, and the seconds until each had its first one."""
    opened, starts = {}, {}
    for way, make in ways(prefix, given).items():
        began = time.perf_counter()
        opened[way] = make()
        next(opened[way])
        starts[way] = time.perf_counter() - began
    return opened, starts


def ways(prefix: Path, given: argparse.Namespace) -> dict[str, Callable[[], Steps]]:
    found: dict[str, Callable[[], Steps]] = {"headway": lambda: ours(prefix, given)}
    for workers in (0, 2):
        found[f"memmap Dataset, {workers} workers"] = lambda workers=workers: behind(
            Plain(prefix, given.length), given, workers
        )
    try:
        megatron(prefix, given)
    except ImportError as error:
        print(f"megatron-core is not there ({error}): its GPTDataset is not measured.", file=sys.stderr)
        return found
    for workers in (0, 2):
        found[f"Megatron GPTDataset, {workers} workers"] = lambda workers=workers: behind(
            megatron(prefix, given), given, workers, shuffled=True
        )
    return found


def ours(prefix: Path, given: argparse.Namespace) -> Steps:
    source = Samples(Mapped(map_tokens(prefix)), length=given.length, seed=1)
    shares = Shares(0, 1, given.batch, given.batch)
    loader, consumed = Loader(source, shares, device=torch.device("cpu"), ahead=2), 0
    while True:
        [batch] = loader.take(consumed)
        consumed += given.batch
        yield batch.inputs, batch.targets


class Plain(Dataset[Any]):
    """What is written by hand: a slice of the map a sample."""

    def __init__(self, prefix: Path, length: int) -> None:
        self.tokens, self.length = map_tokens(prefix), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        row = torch.from_numpy(self.tokens[start : start + self.length + 1].astype(np.int64))
        return row[:-1], row[1:]


def behind(dataset: Any, given: argparse.Namespace, workers: int, *, shuffled: bool = False) -> Steps:
    """A DataLoader, epoch after epoch; `shuffled`: the dataset is by itself."""
    loader = DataLoader(
        dataset,
        batch_size=given.batch,
        shuffle=not shuffled,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )
    while True:
        yield from loader


def megatron(prefix: Path, given: argparse.Namespace) -> Any:
    """megatron-core's dataset of the train split; it needs a process group, and a cache for its index."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=given.length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = (given.tokens - 1) // given.length
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


class Tokenizer:
    """All that GPTDataset asks of one."""

    eod = pad = EOD
    vocab_size = VOCABULARY
    unique_identifiers = {"name": "benchmark"}  # noqa: RUF012


def drain(steps: Steps, count: int) -> tuple[float, float]:
    """Seconds for so many steps when nothing else is done, and seconds of CPU of this process."""
    began, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    return time.perf_counter() - began, time.process_time() - processor


def waited(steps: Steps, count: int) -> float:
    """Share of the time that steps wait for data when they compute meanwhile, without the first, which nobody read ahead."""
    next(steps)
    marks, waits = [time.perf_counter()], 0.0
    for _ in range(count):
        compute(COMPUTE_SECONDS)
        began = time.perf_counter()
        next(steps)
        waits += time.perf_counter() - began
        marks.append(time.perf_counter())
    return waits / sum(after - before for before, after in pairwise(marks))


def compute(seconds: float) -> None:
    """What a step does: matrix products, which leave the interpreter to other threads."""
    matrix, ends = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        torch.mm(matrix, matrix)


def table(rows: dict[str, dict[str, float]]) -> list[str]:
    own = rows["headway"]["million_tokens_per_second"]
    found = ["way                              first step   M tokens/s   headway is   ns of CPU a token   waits"]
    for way, row in rows.items():
        rate = row["million_tokens_per_second"]
        found.append(
            f"{way:32} {row['first_step_seconds']:8.2f} s {rate:12.1f} {own / rate:11.1f}x "
            f"{row['cpu_nanoseconds_per_token']:19.1f} {100 * row['wait_share']:6.1f} %"
        )
    return found


if __name__ == "__main__":
    main()
