"""Whether a step is good: finite, and no spike. What is done about one that is not is the loop's. Pure but for its memory.

What a run did about steps that were no good outlives its processes: reactions.py. See docs/training.md, "Safety".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from tasks.config.training import Reaction as Kind
from tasks.config.training import TrainingConfig
from tasks.jobs.training.reactions import Reaction


@dataclass(frozen=True)
class Verdict:
    """What to do about a step that is no good."""

    kind: Kind
    why: str
    known: bool = False
    """Whether the run reacted to it before, and was killed since."""


class Guard:
    """One run's judge of its steps; equal numbers on all ranks give equal verdicts."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config, self.safety = config, config.safety
        self.losses: dict[int, float] = {}
        """Of the newest good steps, by step."""
        self.reactions: list[Reaction] = []
        """All of this run, its starts before this one too."""

    def remember(self, losses: Iterable[tuple[int, float]], reactions: Iterable[Reaction]) -> None:
        """Take over what a run knows at a step that it goes on from."""
        self.losses, self.reactions = dict(losses), list(reactions)

    def judge(self, step: int, position: int, loss: float, norm: float) -> Verdict | None:
        """What to do about the step whose batch begins at a position in the data; None: it is good.

        Raises FloatingPointError for `stop`, and when there were reactions enough.
        """
        if any(known.kind == "skip" and known.position == position for known in self.reactions):
            return Verdict("skip", "left out before", known=True)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self.reaction(step, self.safety.not_finite, f"the loss is {loss}, the gradient's norm {norm}")
        if why := self._spike(loss):
            return self.reaction(step, self.safety.spike, why)
        self.losses[step] = loss
        self.losses.pop(step - self.safety.spike_window, None)
        return None

    def reaction(self, step: int, kind: Kind, why: str) -> Verdict:
        """The verdict that is asked for, within the bound; raises FloatingPointError where it is to stop."""
        said = f"step {step}: {why}"
        if kind == "stop":
            raise FloatingPointError(
                f"{said}. Lower training.learning_rate ({self.config.learning_rate}) or raise "
                f"training.warmup_steps ({self.config.warmup_steps})"
            )
        if len(self.reactions) >= self.safety.at_most:
            before = ", ".join(f"{known.kind} at step {known.step}" for known in self.reactions)
            raise FloatingPointError(
                f"{said}, and there were {len(self.reactions)} reactions before ({before}), "
                f"training.safety.at_most is {self.safety.at_most}"
            )
        return Verdict(kind, why)

    def _spike(self, loss: float) -> str:
        window, factor = self.safety.spike_window, self.safety.spike_factor
        if factor is None or len(self.losses) < window:
            return ""
        usual = statistics.median(list(self.losses.values())[-window:])
        return f"the loss is {loss:.4g}, more than {factor:g} times {usual:.4g}" if loss > factor * usual else ""
