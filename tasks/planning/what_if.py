"""What if: a case planned again with other numbers of GPUs, on Spot, and with other depths of its network.

One case is tasks/planning/planned_case.py; the pictures are tasks/report/plan_pictures.py. See docs/planning.md, "Plan a case".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.planning.case import Case, Network
from tasks.planning.checkpoint_plan import CheckpointPlan
from tasks.planning.checkpointing import expected_goodput
from tasks.planning.counts import parameters
from tasks.planning.planned_case import Planned, planned
from tasks.planning.search import MOST_GPUS

DOUBLINGS = 3
"""Up and down from the case's own number."""
INTERVALS = tuple(2.0 ** (power / 4) for power in range(-16, 17))
"""Times the interval that was chosen."""
USEFUL = 0.05
"""A plan with less goodput is no choice: its days would be years."""


@dataclass(frozen=True)
class Point:
    """One plan of many that differ in one thing."""

    gpus: int
    parameters: float
    tokens_per_second: float
    """Of all GPUs, without failures."""
    tflops: float
    """Of one GPU, the model's operations."""
    days: float | None
    """With failures; None without tokens."""
    cost: float | None
    """None where a price is not known."""


@dataclass(frozen=True)
class WhatIf:
    """The curves; one without points is left out of the pictures."""

    by_gpus: tuple[Point, ...]
    by_gpus_on_spot: tuple[Point, ...]
    by_depth: tuple[Point, ...]
    by_interval: dict[str, tuple[tuple[float, float], ...]]
    """Of each rate of failures, `low` failing most: seconds between saves, and goodput."""
    chosen: Point
    interval_seconds: float


def what_if(made: Planned, *, home: Path, region: str = "") -> WhatIf:
    """Plan around a plan that fits. Raises ValueError for one that does not."""
    if made.plan is None or made.checkpoints is None:
        raise ValueError(f"--plots of {made.case.name or 'a case'} that does not fit: {made.found.reason}")
    gpus, case = made.plan.division.gpus, _open(made.case)

    def points(cases: Iterable[Case]) -> tuple[Point, ...]:
        return tuple(_until_none_fits(cases, home, region))

    def around(one: Case) -> tuple[Point, ...]:
        fewer = points(_on(one, gpus >> power) for power in range(1, DOUBLINGS + 1) if gpus >> power)
        more = points(_on(one, gpus << power) for power in range(DOUBLINGS + 1) if gpus << power <= MOST_GPUS)
        return (*reversed(fewer), *more)

    spot = case.model_copy(update={"cluster": case.cluster.model_copy(update={"spot": True})})
    dedicated = case.model_copy(update={"cluster": case.cluster.model_copy(update={"spot": False})})
    local = _on(case, gpus)
    shallower = points(
        _deep(local, 1 / 2**power) for power in range(1, DOUBLINGS + 1) if (local.network.layers % (2**power) == 0)
    )
    deeper = points(_deep(local, 2.0**power) for power in range(DOUBLINGS + 1))
    return WhatIf(
        by_gpus=around(dedicated),
        by_gpus_on_spot=around(spot),
        by_depth=(*reversed(shallower), *deeper),
        by_interval=_intervals(made.checkpoints),
        chosen=_point(made),
        interval_seconds=made.checkpoints.interval.seconds,
    )


def cheapest_by_time(points: Iterable[Point]) -> tuple[Point, ...]:
    """The Pareto front, quickest first: of these, none is both quicker and cheaper than another."""
    known = [point for point in points if point.days is not None and point.cost is not None]
    front: list[Point] = []
    for point in sorted(known, key=lambda one: (one.days or 0.0, one.cost or 0.0)):
        if not front or (point.cost or 0.0) < (front[-1].cost or 0.0):
            front.append(point)
    return tuple(front)


def _open(case: Case) -> Case:
    """Without what would forbid other numbers of GPUs."""
    return case.model_copy(
        update={
            "goal": "fastest", "max_days": None, "max_cost": None,
            "parallel": case.parallel.model_copy(update={"dp": None}),
        }
    )  # fmt: skip


def _on(case: Case, gpus: int) -> Case:
    return case.model_copy(update={"cluster": case.cluster.model_copy(update={"gpus": gpus, "nodes": None})})


def _deep(case: Case, factor: float) -> Case:
    network: Network = case.network.model_copy(update={"layers": round(case.network.layers * factor)})
    return case.model_copy(update={"network": network})


def _until_none_fits(cases: Iterable[Case], home: Path, region: str) -> Iterator[Point]:
    for case in cases:
        try:
            made = planned(case, home=home, region=region)
        except ValueError:
            return  # cannot be divided so, and not when doubled again
        if made.plan is None:
            return
        if made.checkpoints and made.checkpoints.goodput.mid >= USEFUL:
            yield _point(made)


def _point(made: Planned) -> Point:
    assert made.plan is not None
    whole = parameters(made.case.network, made.case.sequence).total
    gpus = made.plan.division.gpus
    return Point(
        gpus=gpus,
        parameters=whole,
        tokens_per_second=made.plan.tokens_per_second_per_gpu * gpus,
        tflops=made.plan.tflops_model,
        days=made.days_with_failures,
        cost=made.cost.total if made.cost else None,
    )


def _intervals(made: CheckpointPlan) -> dict[str, tuple[tuple[float, float], ...]]:
    means = {"low": made.rates.together.low, "mid": made.rates.together.mid, "high": made.rates.together.high}
    tried = [made.interval.seconds * factor for factor in INTERVALS]
    return {
        level: tuple((seconds, expected_goodput(seconds, made.cost, made.recovery, mean)) for seconds in tried)
        for level, mean in means.items()
    }
