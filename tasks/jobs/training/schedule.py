"""The learning rate of every step. Pure; who applies it is an engine."""

from __future__ import annotations

import math

from tasks.config.training import TrainingConfig


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
