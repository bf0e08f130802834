"""The engine `deepspeed`: our network, data and loop, with optimizer state, gradients and weights divided by ZeRO.

What DeepSpeed is told is tasks/formats/ds_config.py. What it writes, and how that is read again: deepspeed_files.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tasks.errors import Missing
from tasks.jobs.checkpoint_files import Manifest
from tasks.jobs.data import Batch
from tasks.jobs.network import build_network, next_token_loss, parameter_count, save_network
from tasks.jobs.training.engine import Setting
from tasks.jobs.training.meter import Meter
from tasks.jobs.training.optimizer import adamw
from tasks.process import write_json


class DeepspeedEngine:
    """One rank's network under ZeRO."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device("cpu")
        config, rank = setting.training, setting.rank
        self.network: nn.Module = build_network(config, vocab_size=setting.vocab_size, eod=setting.eod)
        self.trained = parameter_count(self.network)
        torch.manual_seed(config.seed + rank.rank)
        self.engine, self.optimizer, *_ = _deepspeed().initialize(
            model=self.network,
            optimizer=adamw(self.network, config),
            config=dict(rank.settings["deepspeed"]),
            dist_init_required=False,
        )

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        with meter.part("compute"):
            for number, batch in enumerate(batches, start=1):
                loss: Tensor = next_token_loss(self.engine, batch.inputs, batch.targets)
                self.engine.backward(loss)
                if number < len(batches):
                    self.engine.step()
                total += loss.detach() / len(batches)
        return total

    def clip(self) -> float:
        return 0.0

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()


def _deepspeed() -> ModuleType:
    """DeepSpeed; it looks for an accelerator when it is imported (7 s)."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise Missing(
            "the engine deepspeed needs DeepSpeed on the machines, and it is not there",
            remedy="Install it into their Python: pip install 'headway[cluster,deepspeed]'. Or use training.engine torch.",
        ) from error
    return deepspeed
