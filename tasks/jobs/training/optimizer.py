"""AdamW as all engines of our own loop use it."""

from __future__ import annotations

import math

import torch
from torch import nn

from tasks.config.training import TrainingConfig

# The learning rate of every step. Pure; who applies it is an engine.


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up to the peak at step `warmup_steps`, then down to its share at the last step. Steps count from 1.

    `cosine`: half a cosine, Loshchilov and Hutter, SGDR (2017), equation 5, without restarts. `wsd`: stable, then linearly
    down in the last `decay_share` of the steps (Hu et al., MiniCPM, 2024, section 4.2; linear as in Haegele et al. 2024).
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    share = config.min_learning_rate_ratio
    if config.schedule == "wsd":
        begins = max(config.warmup_steps, config.steps - round(config.decay_share * config.steps))
        done = max(0.0, (step - begins) / max(config.steps - begins, 1))
        return config.learning_rate * (1 - (1 - share) * done)
    done = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.learning_rate * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * done)))


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
