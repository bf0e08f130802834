"""AdamW as all engines of our own loop use it."""

from __future__ import annotations

import torch
from torch import nn

from tasks.config.training import TrainingConfig


def build_optimizer(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """`adamw` whose state is there from the start, to be restored into."""
    optimizer = adamw(network, config)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            # the fused kernel wants the count of steps where the parameter is
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}
    return optimizer


def adamw(network: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
