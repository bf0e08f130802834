"""What a run did about steps that were no good, kept in `JOB/safety/`: a kill in between does not undo it.

    safety/reaction-0001.json    create-only, one file a reaction, written before anything is done about it

A batch whose gradient was skipped is skipped whenever it is met again. After a rollback the batches from the checkpoint's to the
bad one's are left out of the order for good, so the position in the data alone says what comes next. Which steps are no good is
safety.py; ranks take rank 0's word, for file systems show a new file late.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.config.training import Reaction as Kind
from tasks.config.training import SafetyConfig
from tasks.jobs.checkpoint.files import create_only
from tasks.jobs.training.records import last_records

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
