"""Many trainings played, each with its own dice: bands, not points; and a sweep of intervals with the same dice for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tasks.planning.checkpointing import expected_goodput
from tasks.planning.simulation import DAY, MOST_EVENTS, Failing, Outcome, Simulated, require_number, simulate

MOST_RUNS = 10_000
PLAYED_EVENTS = 60_000
FEWEST_RUNS, ENOUGH_RUNS = 3, 100
SWEPT = (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0)
"""Factors of the interval."""


@dataclass(frozen=True)
class Quantiles:
    """Of runs that differ by their dice only."""

    p5: float
    p50: float
    p95: float


@dataclass(frozen=True)
class Band:
    """What several runs with one failure rate came to."""

    mean_seconds: float
    """Between interruptions of the training, as asked."""
    goodput: Quantiles
    interruptions: Quantiles
    shares: Mapping[str, float]
    """Of all time, by what it went to: the mean over the runs; they sum to 1."""
    expected: float
    """Goodput by the formula, that knows neither spares that run out, nor notices, nor age."""
    runs: int
    days: float
    """Played; fewer than asked where a training was interrupted too often to play on."""


def default_runs(asked: Simulated) -> int:
    """As many as take a second or two: where much fails, a single run says more."""
    events = asked.machines + min(MOST_EVENTS, asked.hazard * asked.days * DAY)
    return int(min(ENOUGH_RUNS, max(FEWEST_RUNS, PLAYED_EVENTS / max(events, 1.0))))


def played(asked: Simulated, *, runs: int, seed: int) -> list[Outcome]:
    """The same seed gives the same runs, whatever else differs."""
    require_number("runs", runs, above=0, most=MOST_RUNS)
    require_number("seed", seed)
    return [simulate(asked, own) for own in np.random.SeedSequence(int(seed)).spawn(int(runs))]


def band(asked: Simulated, *, runs: int, seed: int = 0) -> Band:
    """Play `runs` trainings."""
    outcomes = played(asked, runs=runs, seed=seed)
    causes = list(asdict(outcomes[0].times))
    shares = {
        cause: float(np.mean([getattr(item.times, cause) / item.times.total for item in outcomes])) for cause in causes
    }
    return Band(
        mean_seconds=1 / asked.hazard if asked.hazard else math.inf,
        goodput=_quantiles([item.goodput for item in outcomes]),
        interruptions=_quantiles([item.interruptions for item in outcomes]),
        shares=shares,
        expected=expected(asked),
        runs=len(outcomes),
        days=min(item.days for item in outcomes),
    )


def expected(asked: Simulated) -> float:
    """The formula's goodput for what is asked, exponential and with spares enough."""
    if not asked.hazard:
        return asked.interval / (asked.interval + asked.saving.stall_seconds)
    return expected_goodput(asked.interval, asked.saving, asked.recovery, 1 / asked.hazard)


def bands(asked: Simulated, failing: Mapping[str, Failing], *, runs: int, seed: int = 0) -> dict[str, Band]:
    """A band for each way to fail, such as `low`, `mid` and `high` of a range."""
    return {name: band(replace(asked, failing=way), runs=runs, seed=seed) for name, way in failing.items()}


def swept(asked: Simulated, *, runs: int, seed: int = 0, factors: Sequence[float] = SWEPT) -> list[tuple[float, Band]]:
    """Intervals around the one that is asked, each with the same dice, so that they differ by the interval alone."""
    result: dict[float, Band] = {}
    for factor in factors:
        trial = replace(asked, interval_seconds=asked.interval_seconds * factor)
        if trial.interval not in result:
            result[trial.interval] = band(trial, runs=runs, seed=seed)
    return sorted(result.items())


def best_interval(sweep: Sequence[tuple[float, Band]]) -> float:
    """With the highest median."""
    return max(sweep, key=lambda row: row[1].goodput.p50)[0]


def _quantiles(values: Sequence[float]) -> Quantiles:
    low, mid, high = np.quantile(values, (0.05, 0.5, 0.95))
    return Quantiles(float(low), float(mid), float(high))
