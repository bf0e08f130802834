"""Whether a step is good: finite, and no spike. What is done about one that is not is the loop's. Pure but for its memory.

See docs/training.md, "Safety".
"""

from __future__ import annotations

import math

from tasks.training_config import Reaction, SafetyConfig, TrainingConfig


class Guard:
    """One run's judge of its steps; equal numbers on all ranks give equal verdicts."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config

    @property
    def safety(self) -> SafetyConfig:
        return self.config.safety

    def judge(self, step: int, loss: float, norm: float) -> Reaction | None:
        """What to do about a step; None: it is good. Raises FloatingPointError for `stop`."""
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        if self.safety.not_finite == "stop":
            raise FloatingPointError(
                f"step {step}: the loss is {loss}, the gradient's norm {norm}. Lower training.learning_rate "
                f"({self.config.learning_rate}) or raise training.warmup_steps ({self.config.warmup_steps})"
            )
        return self.safety.not_finite
