"""The engine `torch`: our own network, AdamW, and PyTorch's own parallelism.

How the network is divided is parallel.py; its checkpoints are tasks/jobs/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tasks.jobs.checkpoint import Saver, restore, training_tensors
from tasks.jobs.checkpoint_files import Manifest
from tasks.jobs.data import Batch
from tasks.jobs.network import build_network, next_token_loss, parameter_count, save_network
from tasks.jobs.training.engine import Setting
from tasks.jobs.training.meter import Meter
from tasks.jobs.training.optimizer import build_optimizer


class TorchEngine:
    """One rank's network and optimizer under DDP."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device("cpu")
        config, rank = setting.training, setting.rank
        self.network: nn.Module = build_network(config, vocab_size=setting.vocab_size, eod=setting.eod)
        self.optimizer = build_optimizer(self.network, config)
        torch.manual_seed(config.seed + rank.rank)
        self.tensors = training_tensors(self.network, self.optimizer)
        self.parallel = DistributedDataParallel(
            self.network, process_group=setting.group, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        with meter.part("compute"):
            for number, batch in enumerate(batches, start=1):
                with nullcontext() if number == len(batches) else self.parallel.no_sync():
                    loss: Tensor = next_token_loss(self.parallel, batch.inputs, batch.targets) / len(batches)
                    loss.backward()
                total += loss.detach()
        return total

    def clip(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.network.parameters(), self.setting.training.gradient_clip))

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discard(self) -> None:
        self.optimizer.zero_grad()

    def restore(self, root: Path, found: Manifest) -> None:
        restore(root, found, rank=self.setting.rank.rank, tensors=self.tensors)

    def saving(self, writing: Mapping[str, Any]) -> Saver:
        return Saver(self.tensors if self.setting.rank.rank == 0 else {}, **writing)

    def write(self, folder: Path, tokenizer: Path) -> None:
        if self.setting.rank.rank == 0:
            save_network(self.network, folder, tokenizer=tokenizer)

    def parameters(self) -> int:
        return parameter_count(self.network)
