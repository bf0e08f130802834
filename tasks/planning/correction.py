"""What earlier runs took beside what was planned for them, and what that says of the next plan. Pure.

A plan says what its formulas say, times the correction. tasks/train.py notes what a run took, tasks/plan.py reads it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tasks.training_config import TrainingConfig

LATEST = 5
"""Runs that count: a machine's software and its neighbours change."""
ALIKE = 4.0
"""Networks of up to so many times more or fewer parameters count: efficiency changes with size."""
MOST = 4.0
"""A correction is within 1/MOST and MOST: what is further off is another kind of run, or a machine with other work."""


class Kind(NamedTuple):
    """What runs must share for one to tell of the other."""

    engine: str
    precision: str
    ranks: int
    parameters: int
    sequence_length: int


class Correction(NamedTuple):
    """`factor` times the formulas' time is planned; from so many `runs`, 0 for none: then it is 1."""

    factor: float = 1.0
    runs: int = 0


def kind_of(training: TrainingConfig, ranks: int, parameters: int) -> Kind:
    """The kind of a training on so many ranks."""
    return Kind(training.engine, training.precision, ranks, parameters, training.sequence_length)


def measured_on(cluster: str) -> str:
    """Where it is noted what runs on a cluster took."""
    return f"planned/{cluster}"


def measured(kind: Kind, *, formula_seconds: float, seconds: float) -> dict[str, Any]:
    """What is kept of a run that ended: seconds a step, by the formulas alone and as it was."""
    return {**kind._asdict(), "formula_seconds": formula_seconds, "seconds": seconds}


def correction(past: Iterable[Mapping[str, Any]], kind: Kind) -> Correction:
    """The median of measured over planned of the latest runs of the same kind; `past` is in the order of time."""
    ratios = [one["seconds"] / one["formula_seconds"] for one in past if _alike(one, kind)][-LATEST:]
    if not ratios:
        return Correction()
    return Correction(min(max(statistics.median(ratios), 1 / MOST), MOST), len(ratios))


def _alike(one: Mapping[str, Any], kind: Kind) -> bool:
    shared = ("engine", "precision", "ranks", "sequence_length")
    same = all(one.get(name) == getattr(kind, name) for name in shared)
    times = one["parameters"] / max(kind.parameters, 1)
    return same and 1 / ALIKE <= times <= ALIKE and one["formula_seconds"] > 0 and one["seconds"] > 0
