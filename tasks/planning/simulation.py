"""A training played through, failure by failure, until its days are over: what is asked for, and where every second went.

Pure, seeded, all in seconds. Between two interruptions all is known, so saves are counted and not played: what takes time is
failures, not GPUs or saves. Many runs and a sweep of intervals come last; the formulas that it agrees with are in
checkpointing.py. See docs/failures.md.

Many trainings played, each with its own dice: bands, not points; and a sweep of intervals with the same dice for each.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np

from tasks.planning.checkpointing import Recovery, Saving, expected_goodput
from tasks.planning.failures import SPOT_NOTICE_SECONDS

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


DAY = 86400.0
MOST_MACHINES = 2_000_000
MOST_DAYS = 3650.0


def require_number(
    name: str, value: float, *, above: float = -1e-300, most: float = math.inf, infinite: bool = False
) -> None:
    """Raises ValueError that names value and limits."""
    if math.isnan(value) or value <= above or value > most or (math.isinf(value) and not infinite):
        lower = "above 0" if above == 0 else f"of at least {max(0.0, above):.3g}"
        upper = f" and at most {most:,.12g}" if math.isfinite(most) else "" if infinite else " and finite"
        raise ValueError(f"{name} {value:g}: give a number {lower}{upper}")


@dataclass(frozen=True)
class Failing:
    """How machines fail, one by one."""

    mean_seconds: float
    """Of one machine between two failures of its; over all machines, repeat offenders among them."""
    shape: float = 1.0
    """Weibull's: 1 forgets (exponential), below 1 new machines fail most, above 1 old ones. Age counts from its last repair."""
    lemon_share: float = 0.0
    """Of the machines, those that fail `lemon_times` as often as others."""
    lemon_times: float = 1.0
    retire_after: int = 0
    """A machine that failed so often is not taken again, another comes in its place; 0: never."""
    hardware_share: float = 1.0
    """Of the failures, those after which the machine must be replaced; else the training restarts on the same ones."""
    eviction_hazard: float = 0.0
    """Of one Spot machine, evictions a second."""
    notice_seconds: float = SPOT_NOTICE_SECONDS

    def __post_init__(self) -> None:
        require_number("mean_seconds", self.mean_seconds, above=0, infinite=True)
        require_number("shape", self.shape, above=0.1 - 1e-12, most=20)
        require_number("lemon_share", self.lemon_share, most=1)
        require_number("lemon_times", self.lemon_times, above=1 - 1e-12, most=1e6)
        require_number("retire_after", self.retire_after)
        require_number("hardware_share", self.hardware_share, most=1)
        require_number("eviction_hazard", self.eviction_hazard)
        require_number("notice_seconds", self.notice_seconds)


@dataclass(frozen=True)
class Replacing:
    """What takes the place of a machine."""

    spares: int = 0
    """Machines that stand by beside those that train."""
    repair_seconds: float = DAY
    """Mean, exponential, until a failed machine is back, or another in its place."""
    capacity_seconds: float = 1800.0
    """Mean, exponential, until there is a Spot machine in place of an evicted one."""
    elastic: bool = False
    """Training goes on with fewer machines where there is no spare; else all wait."""
    fewest: int = 1
    """Machines that an elastic training needs."""
    unit: int = 1
    """Machines of one copy of the network: an elastic training shrinks by so many at a time."""

    def __post_init__(self) -> None:
        require_number("spares", self.spares, most=MOST_MACHINES)
        require_number("repair_seconds", self.repair_seconds)
        require_number("capacity_seconds", self.capacity_seconds)
        require_number("fewest", self.fewest, above=0)
        require_number("unit", self.unit, above=0)


def spares_for(machines: int, failing: Failing, *, repair_seconds: float) -> int:
    """Machines that must stand by so that hardly ever one is missing.

    Those away are Poisson, machines x rate x repair time on average; three deviations more leave about one moment in a thousand.
    Evictions are not counted: what takes the place of a Spot machine is another one.
    """
    away = machines * failing.hardware_share / failing.mean_seconds * repair_seconds
    return math.ceil(away + 3 * math.sqrt(away)) + 1 if away else 0


@dataclass(frozen=True)
class Slowing:
    """Machines that slow all others down, until they are found."""

    hazard: float = 0.0
    """Of one machine, a second; 0: none."""
    share: float = 0.1
    """Of its speed that the training loses meanwhile."""
    seconds: float = 3600.0
    """Until it is found and mended."""

    def __post_init__(self) -> None:
        require_number("hazard", self.hazard)
        require_number("share", self.share, most=1)
        require_number("seconds", self.seconds)


@dataclass(frozen=True)
class Simulated:
    """One training to play through."""

    machines: int
    days: float
    """Of the clock, not of useful work."""
    interval_seconds: float
    """Computing between two saves."""
    failing: Failing
    saving: Saving
    recovery: Recovery = field(default_factory=Recovery)
    replacing: Replacing = field(default_factory=Replacing)
    slowing: Slowing = field(default_factory=Slowing)
    planned_days: float = 0.0
    """Between two stops for maintenance, from which all work is kept; 0: none."""

    def __post_init__(self) -> None:
        require_number("machines", self.machines, above=0, most=MOST_MACHINES)
        require_number("days", self.days, above=0, most=MOST_DAYS)
        require_number("interval_seconds", self.interval_seconds, above=0)
        require_number("planned_days", self.planned_days)
        if self.replacing.fewest > self.machines or self.replacing.unit > self.machines:
            small = max(self.replacing.fewest, self.replacing.unit)
            raise ValueError(f"an elastic training that needs {small} machines, of {self.machines}: give fewer")

    @property
    def interval(self) -> float:
        """As saved: not before the last one is written."""
        return max(self.interval_seconds, self.saving.lag_seconds - self.saving.stall_seconds)

    @property
    def hazard(self) -> float:
        """Of all machines together, interruptions a second."""
        return self.machines * (1 / self.failing.mean_seconds + self.failing.eviction_hazard)


BLOCK = 4096
FAILURE, EVICTION = 0, 1
Event = tuple[float, int, int]
"""When, which machine, what."""


class Dice:
    """Random numbers one by one, drawn by the block: a call of numpy for each would take most of the time."""

    def __init__(self, rng: np.random.Generator, *, shape: float = 1.0) -> None:
        self.rng = rng
        self.exponential = _one_by_one(lambda: rng.standard_exponential(BLOCK).tolist())
        self.uniform = _one_by_one(lambda: rng.random(BLOCK).tolist())
        mean = math.gamma(1 + 1 / shape)
        self.weibull = (
            self.exponential if shape == 1 else _one_by_one(lambda: (rng.weibull(shape, BLOCK) / mean).tolist())
        )


def _one_by_one(block: Callable[[], list[float]]) -> Callable[[], float]:
    def forever() -> Iterator[float]:
        while True:
            yield from block()

    return forever().__next__


class Fleet:
    """All machines of a training and its spares, in one heap of times. Only those that train fail; times are of its clock."""

    def __init__(self, asked: Simulated, rng: np.random.Generator) -> None:
        self.failing, self.replacing, self.gang = asked.failing, asked.replacing, asked.machines
        self.dice = Dice(rng, shape=asked.failing.shape)
        total = asked.machines + asked.replacing.spares
        failing = asked.failing
        average = 1 - failing.lemon_share + failing.lemon_share * failing.lemon_times
        self.good_seconds = failing.mean_seconds * average
        self.lemon = (rng.random(total) < failing.lemon_share).tolist()
        self.failed = [0] * total
        self.spare = list(range(asked.machines, total))
        self.away: list[tuple[float, int]] = []
        self.training = asked.machines
        self.events: list[Event] = [self._drawn(0.0, machine) for machine in range(asked.machines)]
        heapq.heapify(self.events)

    @property
    def next(self) -> float:
        """When the next machine that trains is interrupted."""
        return self.events[0][0] if self.events else math.inf

    @property
    def next_back(self) -> float:
        return self.away[0][0] if self.away else math.inf

    def interrupt(self) -> int:
        """Take the next event: its machine leaves, or is restarted where it is. Returns what it was."""
        time, machine, kind = heapq.heappop(self.events)
        if kind == EVICTION:
            self._leaves(machine, time + self.replacing.capacity_seconds * self.dice.exponential())
            return kind
        self.failed[machine] += 1
        share = self.failing.hardware_share
        if share < 1 and self.dice.uniform() >= share:
            heapq.heappush(self.events, self._drawn(time, machine))
            return kind
        if self.failing.retire_after and self.failed[machine] >= self.failing.retire_after:
            self.failed[machine] = 0
            self.lemon[machine] = self.dice.uniform() < self.failing.lemon_share
        self._leaves(machine, time + self.replacing.repair_seconds * self.dice.exponential())
        return kind

    def absorb(self, until: float) -> list[int]:
        """Events while nothing runs: machines leave, and nobody looks for them again. Returns what they were."""
        kinds = []
        while self.next <= until:
            kinds.append(self.interrupt())
        return kinds

    def fill(self, now: float) -> None:
        """Those that are back stand by; those that stand by train, as many as are missing."""
        while self.next_back <= now:
            self.spare.append(heapq.heappop(self.away)[1])
        while self.training < self.gang and self.spare:
            heapq.heappush(self.events, self._drawn(now, self.spare.pop()))
            self.training += 1

    def back_by(self, count: int) -> float:
        """When so many of those away will be back; infinite: never."""
        return heapq.nsmallest(count, self.away)[-1][0] if 0 < count <= len(self.away) else math.inf

    def _leaves(self, machine: int, back: float) -> None:
        self.training -= 1
        heapq.heappush(self.away, (back, machine))

    def _drawn(self, now: float, machine: int) -> Event:
        """When a machine that begins to train now is interrupted, and by what."""
        mean = self.good_seconds / self.failing.lemon_times if self.lemon[machine] else self.good_seconds
        fails = now + mean * self.dice.weibull()
        if self.failing.eviction_hazard:
            evicted = now + self.dice.exponential() / self.failing.eviction_hazard
            if evicted < fails:
                return evicted, machine, EVICTION
        return fails, machine, FAILURE


MOST_EVENTS = 150_000
"""A training that is interrupted more often is told as far as it was played: by then its share of useful time stands."""


@dataclass
class Times:
    """Seconds of the clock, by what they went to; they sum to all."""

    useful: float = 0.0
    stalled: float = 0.0
    """Saving, and between an eviction's notice and the eviction."""
    lost: float = 0.0
    """Work, and saves in it, that no checkpoint had when a failure came."""
    detecting: float = 0.0
    waiting: float = 0.0
    """For a machine: no spare was left."""
    restarting: float = 0.0
    slowed: float = 0.0
    """What stragglers took."""
    shrunk: float = 0.0
    """What an elastic training did not do for want of machines."""

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Outcome:
    """What became of a training."""

    times: Times
    failures: int
    """Interruptions by failing machines; what fails while nothing runs, and in a restart, counts too."""
    evictions: int
    planned: int
    grown: int
    """Restarts of an elastic training to take machines back."""
    stretches: int
    """Times that it came to work."""
    cut_short: bool
    """After MOST_EVENTS; `times` are of what was played."""

    @property
    def goodput(self) -> float:
        return self.times.useful / self.times.total if self.times.total else 0.0

    @property
    def interruptions(self) -> int:
        return self.failures + self.evictions

    @property
    def days(self) -> float:
        return self.times.total / DAY


def simulate(asked: Simulated, seed: int | np.random.SeedSequence = 0) -> Outcome:
    """Play one training; the same seed gives the same."""
    return _Run(asked, np.random.default_rng(seed)).played()


class _Run:
    """The clock, and where its seconds went."""

    def __init__(self, asked: Simulated, rng: np.random.Generator) -> None:
        self.asked, self.rng = asked, rng
        self.fleet = Fleet(asked, rng)
        self.end, self.now = asked.days * DAY, 0.0
        self.times = Times()
        self.seen = [0, 0]
        self.planned = self.grown = self.stretches = 0
        self.next_planned = asked.planned_days * DAY or math.inf

    def played(self) -> Outcome:
        self.work()
        while not self.over:
            self.gather()
            if not self.over and self.restarted():
                self.work()
        counts = (self.seen[FAILURE], self.seen[EVICTION], self.planned, self.grown, self.stretches)
        return Outcome(self.times, *counts, cut_short=self.now < self.end)

    @property
    def over(self) -> bool:
        """The days are, or all that is played of them."""
        return self.now >= self.end or sum(self.seen) >= MOST_EVENTS

    def spend(self, cause: str, until: float) -> None:
        """Let the clock go on to `until`, at most to the end."""
        until = min(until, self.end)
        setattr(self.times, cause, getattr(self.times, cause) + max(0.0, until - self.now))
        self.now = max(self.now, until)

    def interrupted(self) -> None:
        """The next machine is gone; what it takes to see that. Of an eviction nothing needs to be found out."""
        kind = self.fleet.interrupt()
        self.seen[kind] += 1
        if kind == FAILURE:
            self.pass_by("detecting", self.now + self.asked.recovery.detection_seconds)

    def pass_by(self, cause: str, until: float) -> None:
        """Nothing runs until then; machines that fail meanwhile are found with the others."""
        self.spend(cause, until)
        for kind in self.fleet.absorb(self.now):
            self.seen[kind] += 1

    def gather(self) -> None:
        """Spares take the places of those that left; without, all wait, unless the training is elastic and enough are there."""
        self.fleet.fill(self.now)
        while not self.enough() and not self.over:
            self.pass_by("waiting", self.fleet.next_back)
            self.fleet.fill(self.now)

    def enough(self) -> bool:
        replacing = self.asked.replacing
        if self.fleet.training == self.asked.machines:
            return True
        return replacing.elastic and self.usable() >= replacing.fewest

    def usable(self) -> int:
        """Machines that train: whole copies of the network, where some are missing."""
        unit, training = self.asked.replacing.unit, self.fleet.training
        return training if training == self.asked.machines else training // unit * unit

    def restarted(self) -> bool:
        """Whether it came to work, and was not interrupted before."""
        until = self.now + self.asked.recovery.restart_seconds
        if self.fleet.next < min(until, self.end):
            self.spend("restarting", self.fleet.next)
            self.interrupted()
            return False
        self.spend("restarting", until)
        return True

    def work(self) -> None:
        """Train until something stops it."""
        self.stretches += 1
        grow = self.grows()
        stop = min(self.fleet.next, self.next_planned, grow)
        if stop >= self.end:
            self.done(self.end, kept=True)
        elif stop == self.fleet.next:
            self.broken(stop)
        else:
            self.done(stop, kept=True)
            self.planned, self.grown = self.planned + (stop != grow), self.grown + (stop == grow)
            if stop == self.next_planned:
                self.next_planned += self.asked.planned_days * DAY
            self.pass_by("stalled", self.now + self.asked.saving.stall_seconds + self.asked.saving.lag_seconds)

    def broken(self, stop: float) -> None:
        """By a failure: what was not saved is lost. By an eviction: unless all can be saved after its notice."""
        notice, saving = self.asked.failing.notice_seconds, self.asked.saving
        warned = self.fleet.events[0][2] == EVICTION and saving.stall_seconds + saving.lag_seconds <= notice
        self.done(max(self.now, stop - notice) if warned else stop, kept=warned)
        self.spend("stalled", stop)
        self.interrupted()

    def grows(self) -> float:
        """When so many machines are back that a restart with them gains more than it costs, before the next interruption."""
        asked, missing = self.asked, self.asked.machines - self.fleet.training
        if not missing:
            return math.inf
        worth = math.ceil(asked.machines * asked.recovery.restart_seconds * asked.hazard)
        return self.fleet.back_by(min(missing, max(worth, asked.replacing.unit)))

    def done(self, stop: float, *, kept: bool) -> None:
        """Add a stretch of work to what it came to. Its saves come every interval; one counts after its lag."""
        asked, length = self.asked, max(0.0, stop - self.now)
        interval, stall = asked.interval, asked.saving.stall_seconds
        cycle = interval + stall
        if kept:
            saves, rest = divmod(length, cycle)
            worked = saves * interval + min(rest, interval)
            self.times.stalled += length - worked
        else:
            saves = max(0.0, (length - asked.saving.lag_seconds) // cycle)
            worked = saves * interval
            self.times.stalled += saves * stall
            self.times.lost += length - saves * cycle
        speed = self.usable() / asked.machines
        slow = self.slow_share(length)
        self.times.useful += worked * speed * (1 - slow)
        self.times.slowed += worked * speed * slow
        self.times.shrunk += worked * (1 - speed)
        self.now = max(self.now, stop)

    def slow_share(self, length: float) -> float:
        """Of a stretch's speed that stragglers took: they come at random, and each is there for a while."""
        slowing = self.asked.slowing
        if not (slowing.hazard and length):
            return 0.0
        count = self.rng.poisson(min(slowing.hazard * self.asked.machines * length, 1e6))
        begins = np.sort(self.rng.random(count) * length)
        ends = np.minimum(begins + slowing.seconds, length)
        covered = (
            np.maximum(0.0, ends - np.maximum(begins, np.concatenate(([0.0], ends[:-1])))) if count else np.zeros(1)
        )
        return float(covered.sum()) / length * slowing.share
