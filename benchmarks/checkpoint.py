"""How long training stands still for a checkpoint: ours beside torch.save, dcp.async_save and a copy in memory, the limit.

    python -m benchmarks.checkpoint [--gigabytes 0.6] [--rounds 5] [--scratch FOLDER]

One process, one rank, one thread, all in one run and in turn; figures are medians. State is float32 weights and AdamW's moments.
*Copy*: the same tensors into buffers that were written before. *Ours*: `Saver.save`, which copies into memory that the writer
process shares; and how long that takes to write, hash and commit. *torch.save* writes the state dict, without fsync, as users do.
*dcp.async_save* until it returns, with its copy in the background awaited before the next round. *Slow-down*: a step of matrix
products while the writer is at work, beside one while it is idle; it needs a spare core. MB are 10^6 bytes. Run by `make bench`.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.scratch import scratch
from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.choice import choose, identity
from tasks.jobs.checkpoint.files import claim_attempt
from tasks.jobs.checkpoint.pieces import piece_of
from tasks.jobs.checkpoint.snapshot import Saver, restore

WIDTH = 2048
SAID = identity(TrainingConfig(steps=100), {})


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = state(given.gigabytes)
    with scratch(given.scratch) as folder:
        found = measure(folder, tensors, rounds=given.rounds)
    print(json.dumps({"load": os.getloadavg()[0], "cores": os.cpu_count(), **found}, indent=1))
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written: four times --gigabytes must fit")
    return parser.parse_args()


def state(gigabytes: float) -> dict[str, torch.Tensor]:
    """Weights and two moments of each, in matrices as a network has them."""
    count = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    parts = ("weight", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{part}.{number}": torch.randn(WIDTH, WIDTH) for number in range(count) for part in parts}


class Stand:
    """What is measured, with the seconds of every round."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        self.root = folder / "checkpoints"
        claim_attempt(self.root, 1)
        self.pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
        writing = {"root": str(self.root), "rank": 0, "world_size": 1, "attempt": 1, "keep": 2, "log": ""}
        self.saver = Saver(lambda: self.pieces, **writing, identity=SAID)
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def clock(self, name: str, act: Callable[..., object], *given: object) -> None:
        began = time.perf_counter()
        act(*given)
        self.seconds[name].append(time.perf_counter() - began)

    def round(self, number: int) -> None:
        self.clock("copy", self.copy)
        for _ in range(4):
            self.clock("step_idle", work)
        self.clock("ours", self.save, number)
        while self.saver.busy():
            self.clock("step_saving", work)
        assert not self.saver.failure, self.saver.failure
        self.seconds["ours_committed"].append(self.saver.seconds)
        self.clock("torch_save", torch.save, self.tensors, self.folder / "state.pt")
        self.clock("dcp_async_save", self.dcp_save, number)
        self.future.result()

    def copy(self) -> None:
        for name, tensor in self.tensors.items():
            self.buffers[name].copy_(tensor)

    def save(self, number: int) -> None:
        self.saver.save(step=number, consumed_samples=0)

    def dcp_save(self, number: int) -> None:
        self.future = dcp.async_save(self.tensors, checkpoint_id=self.folder / f"dcp-{number}")
        shutil.rmtree(self.folder / f"dcp-{number - 1}", ignore_errors=True)

    def restore(self) -> None:
        found = choose(self.root, SAID)
        assert found
        restore(self.root, found, rank=0, pieces=self.pieces)


def measure(folder: Path, tensors: dict[str, torch.Tensor], *, rounds: int) -> dict[str, object]:
    stand = Stand(folder, tensors)
    for number in range(1, rounds + 1):
        stand.round(number)
    stand.saver.close()
    stand.clock("restored", stand.restore)
    medians = {name: statistics.median(values) for name, values in stand.seconds.items()}
    return {
        "megabytes": round(sum(tensor.nbytes for tensor in tensors.values()) / 1e6),
        "seconds": medians,
        "ours_by_copy": medians["ours"] / medians["copy"],
        "torch_save_by_ours": medians["torch_save"] / medians["ours"],
        "dcp_async_save_by_ours": medians["dcp_async_save"] / medians["ours"],
        "step_while_saving": medians["step_saving"] / medians["step_idle"],
    }


def work() -> None:
    """A step: matrix products for some ten milliseconds."""
    matrix = torch.ones(512, 512)
    for _ in range(6):
        matrix = matrix @ matrix / 512


if __name__ == "__main__":
    main()
