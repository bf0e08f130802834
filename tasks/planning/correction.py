"""What earlier runs took beside what was planned for them, and what that says of the next plan. Pure.

A plan says what its formulas say, times the correction. tasks/train.py notes what a run took, tasks/plan.py reads it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tasks.config.training import TrainingConfig

LATEST = 5
"""Runs that count: a machine's software and its neighbours change."""
ALIKE = 4.0
"""Networks of up to so many times more or fewer parameters count: efficiency changes with size."""
MOST = 4.0
"""A correction is within 1/MOST and MOST: what is further off is another kind of run, or a machine with other work."""
DIVISION = ("tp", "pp", "cp", "zero")


class Kind(NamedTuple):
    """What runs must share for one to tell of the other."""

    engine: str
    sku: str
    precision: str
    ranks: int
    tp: int
    pp: int
    cp: int
    zero: int
    sequence_length: int
    parameters: int
    """Need not be equal, as the others must: ALIKE."""


class Correction(NamedTuple):
    """`factor` times the formulas' time is planned; from so many `runs`, 0 for none: then it is 1."""

    factor: float = 1.0
    runs: int = 0
    said: str = ""
    """Why earlier runs do not count, where there are some and none does."""


def kind_of(training: TrainingConfig, division: Mapping[str, Any], *, sku: str, ranks: int, parameters: int) -> Kind:
    """The kind of a training on so many ranks, divided by `tp`, `pp`, `cp` and `zero`."""
    return Kind(
        engine=training.engine,
        sku=sku,
        precision=training.precision,
        ranks=ranks,
        **{name: int(division[name]) for name in DIVISION},
        sequence_length=training.sequence_length,
        parameters=parameters,
    )


def measured_on(cluster: str) -> str:
    """Where it is noted what runs on a cluster took."""
    return f"planned/{cluster}"


def measured(kind: Kind, *, formula_seconds: float, seconds: float) -> dict[str, Any]:
    """What is kept of a run that ended: seconds a step, by the formulas alone and as it was."""
    return {**kind._asdict(), "formula_seconds": formula_seconds, "seconds": seconds}


def correction(past: Iterable[Mapping[str, Any]], kind: Kind) -> Correction:
    """The median of measured over planned of the latest runs of the same kind; `past` is in the order of time."""
    ended = [one for one in past if one["formula_seconds"] > 0 and one["seconds"] > 0]
    ratios = [one["seconds"] / one["formula_seconds"] for one in ended if not _unlike(one, kind)][-LATEST:]
    if not ratios:
        return Correction(said=_why(ended, kind))
    return Correction(min(max(statistics.median(ratios), 1 / MOST), MOST), len(ratios))


def _why(ended: Sequence[Mapping[str, Any]], kind: Kind) -> str:
    """Of the latest run, what makes it another kind."""
    if not ended:
        return ""
    runs = (
        f"none of {len(ended)} earlier runs on this cluster counts"
        if len(ended) > 1
        else "the earlier run does not count"
    )
    return f"{runs}: the latest had {', '.join(_unlike(ended[-1], kind))}"


def _unlike(one: Mapping[str, Any], kind: Kind) -> list[str]:
    """What a run has otherwise, in words. Of a run that was noted without its division nobody knows it: it is unlike."""
    names = [name for name in Kind._fields if name != "parameters"]
    results = [
        f"{name} {one.get(name, 'unknown')}, not {getattr(kind, name)}"
        for name in names
        if one.get(name) != getattr(kind, name)
    ]
    if not 1 / ALIKE <= one["parameters"] / max(kind.parameters, 1) <= ALIKE:
        results.append(f"{one['parameters']:.3g} parameters, not {kind.parameters:.3g}")
    return results
