"""The engine `torch`: our own network, AdamW, and PyTorch's own parallelism.

How the network is divided is parallel.py; its checkpoints are tasks/jobs/checkpoint/snapshot.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.jobs.checkpoint.files import Manifest, shard_name
from tasks.jobs.checkpoint.pieces import Piece
from tasks.jobs.checkpoint.snapshot import Saver, restore, training_tensors
from tasks.jobs.data.samples import Batch
from tasks.jobs.training.engine import Setting
from tasks.jobs.training.metrics_logger import Meter
from tasks.jobs.training.network import answers_a_rank, build_optimizer, next_token_loss, parameter_count
from tasks.jobs.training.parallel import Parallel, data_place, own_device
from tasks.jobs.training.starting import starting_network, write_network


class TorchEngine:
    """One rank's network and optimizer."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, own_device()
        config, rank = setting.training, setting.rank
        self.network = starting_network(setting)
        self.parallel = Parallel(self.network, config, setting.execution, device=self.device, group=setting.group)
        self.optimizer = build_optimizer(self.network, config)
        place, _ = data_place(rank.rank, rank.world_size, setting.execution)
        torch.manual_seed(config.seed + place)

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.parallel.ready = lambda: meter.turn("communication")
        with meter.part("communication"):
            answers = answers_a_rank(batches, self.setting.training, self.setting.group)
        with meter.part("compute"):
            for number, batch in enumerate(batches, start=1):
                total += self._gradient(batch, of=len(batches), by=answers, last=number == len(batches))
            return total.cpu()

    def _gradient(self, batch: Batch, *, of: int, by: float | None, last: bool) -> Tensor:
        """Forward and backward of one micro batch; returns its part of the loss: the mean by `of`, or the sum by `by`."""
        existing = batch.to(self.device)
        with self.parallel.micro_batch(last=last):
            with self.parallel.lower():
                loss = next_token_loss(self.parallel.called, *existing, by=by)
                loss = loss if by else loss / of
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def clip(self) -> float:
        return self.parallel.clip(self.setting.training.gradient_clip)

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def discard(self) -> None:
        self.optimizer.zero_grad()

    def restore(self, root: Path, result: Manifest) -> None:
        restore(root, result, rank=self.setting.rank.rank, pieces=self.pieces())

    def own_files(self, result: Manifest) -> list[dict[str, Any]]:
        return [entry for entry in result.files if entry["path"] == shard_name(self.setting.rank.rank)]

    def saving(self, writing: Mapping[str, Any]) -> Saver:
        return Saver(self.pieces, **writing)

    def pieces(self) -> dict[str, Piece]:
        """This rank's part of all that training changes, as it lies now: FSDP2 may move it at the first step."""
        return training_tensors(self.network, self.optimizer)

    def write(self, folder: Path, tokenizer: Path) -> None:
        weights = self.parallel.whole() if self.parallel.divided else None
        if self.setting.rank.rank == 0:
            write_network(self.network, self.setting.training, folder, tokenizer=tokenizer, weights=weights)

    def parameters(self) -> int:
        return parameter_count(self.network)
