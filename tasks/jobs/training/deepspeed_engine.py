"""The engine `deepspeed`: our network, data and loop, with optimizer state, gradients and weights divided by ZeRO.

What DeepSpeed is told is tasks/formats/ds_config.py; how its files are read again, deepspeed_files.py.
See docs/training.md, "DeepSpeed".
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tasks.common.errors import Missing
from tasks.common.process import write_json
from tasks.jobs.checkpoint.files import Manifest
from tasks.jobs.data.samples import Batch, Shares
from tasks.jobs.training.engine import Saving, Setting
from tasks.jobs.training.meter import Meter
from tasks.jobs.training.network import next_token_loss, parameter_count
from tasks.jobs.training.optimizer import adamw
from tasks.jobs.training.parallel import own_device, recompute
from tasks.jobs.training.starting import starting_network
from tasks.jobs.training.writing import write_network

NORMS = {1: "scaled_global_norm", 2: "scaled_global_norm", 3: "_get_norm_groups"}
"""The method of DeepSpeed's optimizer, by stage, whose answer it clips by."""

HYPER = ("betas", "weight_decay")
"""Settings of AdamW that stand in DeepSpeed's files, too."""


class DeepspeedEngine:
    """One rank's network under ZeRO."""

    def __init__(self, setting: Setting) -> None:
        package = deepspeed()
        self.setting, self.device = setting, own_device()
        self.network = starting_network(setting)
        self.trained = parameter_count(self.network)  # before stage 3 takes the weights away
        recompute(self.network, setting.execution.recompute)
        torch.manual_seed(setting.training.seed + setting.rank.rank)
        optimizer, config = adamw(self.network, setting.training), self._config()
        self.engine, self.zero, *_ = package.initialize(
            model=self.network, optimizer=optimizer, config=config, dist_init_required=False
        )
        self._stage = setting.execution.deepspeed.zero_stage
        self._norm = getattr(self.zero, NORMS[self._stage])

    def _config(self) -> dict[str, Any]:
        """As the stage generated it, but for the micro batch of a job that ran out of memory; left in the job's folder."""
        rank, training = self.setting.rank, self.setting.training
        shares = Shares(rank.rank, rank.world_size, training.global_batch_size, training.micro_batch_size)
        micro = shares.halved(int(rank.settings.get("smaller_batches", 0))).micro_batch
        config = {**rank.settings["deepspeed"], "train_micro_batch_size_per_gpu": micro}
        if rank.rank == 0:
            write_json(rank.folder / "ds_config.json", config)
        return config

    def gradients(self, batches: Sequence[Batch], meter: Meter) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with meter.part("compute"):
            for number, batch in enumerate(batches, start=1):
                existing = batch.to(self.device)
                self.engine.set_gradient_accumulation_boundary(number == len(batches))
                loss = next_token_loss(self.engine, *existing) / len(batches)
                self.engine.backward(loss, scale_wrt_gas=False)
                total += loss.detach()
            return total.cpu()

    def clip(self) -> float:
        """DeepSpeed clips while it updates, by the norm that is told here: so it is computed once."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        self.norm = self._norm()
        setattr(self.zero, NORMS[self._stage], lambda: self.norm)
        # The norm over all groups of parameters, as DeepSpeed combines stage 3's; infinite, or NaN, where one is not
        # finite.
        return float(combine_grad_norm_groups(self.norm if isinstance(self.norm, list) else [self.norm]))

    def update(self, learning_rate: float) -> None:
        for group in self.zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()

    def discard(self) -> None:
        """DeepSpeed lets gradients go when their norm is not finite, and in no other way: it is told that it is not."""
        self.norm = [torch.tensor(math.inf)] if self._stage == 3 else torch.tensor(math.inf)
        self.engine.step()

    def restore(self, root: Path, result: Manifest) -> None:
        from tasks.jobs.training.deepspeed_files import restore

        rank, own = self.setting.rank, [{key: group[key] for key in HYPER} for group in self.zero.param_groups]
        restore(self.engine, root, result, rank=rank.rank, world_size=rank.world_size)
        # DeepSpeed takes them from its files, where they are another run's when this one goes on from it
        for group, values in zip(self.zero.param_groups, own, strict=True):
            group.update(values)

    def saving(self, writing: Mapping[str, Any]) -> Saving:
        from tasks.jobs.training.deepspeed_files import saver

        return saver(self.engine, self.setting.rank.rank, writing)

    def write(self, folder: Path, tokenizer: Path) -> None:
        """One weight at a time is gathered, in float32 as the optimizer has it; rank 0 keeps them all."""
        from deepspeed.utils import safe_get_full_fp32_param

        weights = {}
        for name, parameter in self.network.named_parameters():
            value = safe_get_full_fp32_param(parameter)
            if self.setting.rank.rank == 0:
                weights[name] = value.detach().cpu().clone()
        if weights:
            write_network(self.network, self.setting.training, folder, tokenizer=tokenizer, weights=weights)

    def parameters(self) -> int:
        return self.trained


def deepspeed() -> ModuleType:
    """The package; it looks for an accelerator when it is imported, which takes seconds. Raises Missing."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        raise Missing(
            "the engine deepspeed needs DeepSpeed on the machines, and it is not there",
            remedy="Install it into their Python: pip install 'headway[cluster,deepspeed]'. Or use training.engine torch.",
        ) from error
    if not on_gpu:  # collectives through shared memory would be compiled at the start, for minutes; gloo does them
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
