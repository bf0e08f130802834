"""Whether a step is good: finite, and no spike. What is done about one that is not is the loop's. Pure but for its memory.

What a run did about steps that were no good outlives its processes: it comes first here. See docs/training.md, "Safety".
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.config.training import Reaction as Kind
from tasks.config.training import SafetyConfig, TrainingConfig
from tasks.jobs.checkpoint.files import create_only
from tasks.jobs.training.records import last_records

# What a run did about steps that were no good, kept in `JOB/safety/`: a kill in between does not undo it.
#
#     safety/reaction-0001.json    create-only, one file a reaction, written before anything is done about it
#
# A batch whose gradient was skipped is skipped whenever it is met again. After a rollback the batches from the
# checkpoint's to the bad one's are left out of the order for good, so the position in the data alone says what comes
# next.


FOLDER = "safety"


@dataclass(frozen=True)
class Reaction:
    """One reaction of a run."""

    step: int
    """The step that was no good."""
    position: int
    """Samples of the order before its batch."""
    kind: Kind
    why: str
    begin: int = 0
    """First sample that a rollback leaves out of the order."""
    end: int = 0
    """First one after those."""
    attempt: int = 0


def note(job: Path, number: int, reaction: Reaction) -> None:
    """Write down the reaction of a number, which counts from 1; rank 0 does."""
    create_only(job / FOLDER / f"reaction-{number:04d}.json", asdict(reaction))


def noted(job: Path) -> list[Reaction]:
    """All reactions of a run, oldest first."""
    paths = sorted((job / FOLDER).glob("reaction-*.json"))
    return [Reaction(**json.loads(path.read_bytes())) for path in paths]


def next_position(position: int, reactions: Iterable[Reaction]) -> int:
    """Where a position in the data goes on: after the batches that rollbacks left out."""
    for reaction in sorted(reactions, key=lambda known: known.begin):
        if reaction.begin <= position < reaction.end:
            position = reaction.end
    return position


def losses_before(log: Path, step: int, safety: SafetyConfig) -> list[tuple[int, float]]:
    """The newest good steps up to a step, with their losses, from `metrics.jsonl`: what a spike is compared with."""
    if safety.spike_factor is None or not log.exists():
        return []
    good = [record for record in last_records(log) if record["step"] <= step and "skipped" not in record]
    return [(record["step"], record["loss"]) for record in good[-safety.spike_window :]]


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
        text = f"step {step}: {why}"
        if kind == "stop":
            raise FloatingPointError(
                f"{text}. Lower training.learning_rate ({self.config.learning_rate}) or raise "
                f"training.warmup_steps ({self.config.warmup_steps})"
            )
        if len(self.reactions) >= self.safety.at_most:
            before = ", ".join(f"{known.kind} at step {known.step}" for known in self.reactions)
            raise FloatingPointError(
                f"{text}, and there were {len(self.reactions)} reactions before ({before}), "
                f"training.safety.at_most is {self.safety.at_most}"
            )
        return Verdict(kind, why)

    def _spike(self, loss: float) -> str:
        window, factor = self.safety.spike_window, self.safety.spike_factor
        if factor is None or len(self.losses) < window:
            return ""
        usual = statistics.median(list(self.losses.values())[-window:])
        return f"the loss is {loss:.4g}, more than {factor:g} times {usual:.4g}" if loss > factor * usual else ""
