"""Checkpoints for tests: a small network with AdamW, and the savers of two ranks in one process, with real writer processes."""

import torch

from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.choice import identity
from tasks.jobs.checkpoint.snapshot import Saver
from tasks.jobs.training.network import build_optimizer

CONFIG = TrainingConfig(steps=100)
IDENTITY = identity(CONFIG, {"tokens.json": "0" * 64})


def small_training(seed):
    """A network and AdamW after one step."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5))
    optimizer = build_optimizer(network, CONFIG)
    network(torch.randn(3, 6)).pow(2).sum().backward()
    optimizer.step()
    return network, optimizer


class Ranks:
    """The savers of two ranks; rank 0's shard holds `tensors`, or each rank's its own of a list."""

    def __init__(self, root, tensors, *, attempt=1, keep=2, identity=IDENTITY, **more):
        constants = {"root": str(root), "world_size": 2, "attempt": attempt, "keep": keep, "identity": identity, **more}
        log = str(root.parent / "metrics.jsonl")
        self.tensors = tensors if isinstance(tensors, list) else [tensors, {}]
        self.savers = [Saver(self.tensors[rank].copy, rank=rank, log=log, **constants) for rank in (0, 1)]

    def save(self, *steps):
        for step in steps:
            for saver in self.savers:
                saver.save(step=step, consumed_samples=8 * step)
            self.savers[0].wait()

    def close(self):
        for saver in self.savers:
            saver.close()
