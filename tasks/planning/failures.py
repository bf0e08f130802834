"""How often a training is interrupted: published rates as data, and the range of mean times that a plan reckons with.

Pure. What an interruption costs is in checkpointing.py; how a whole training goes, in simulation.py. See docs/planning.md.

A rate is not a property of a GPU: between clusters it differs by a factor of six, and inside one by four (RSC-1). So a plan has
three rates, `low` (fails most), `mid`, `high`, and says what follows from each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class Range:
    """The same number three times: as bad as it may be, as expected, as good as it may be."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.mid <= self.high and math.isfinite(self.high)):
            raise ValueError(f"{self.low:g} {self.mid:g} {self.high:g}: give three numbers above 0, the smallest first")

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.mid * factor, self.high * factor)


@dataclass(frozen=True)
class Published:
    """One training or cluster, and what it told of its interruptions."""

    name: str
    gpu: str
    gpus: int
    gpu_hours: Range
    """Per interruption."""
    source: str
    secondary: bool = False
    """Read in somebody else's account of it."""
    note: str = ""


PUBLISHED: tuple[Published, ...] = (
    Published(
        "Llama 3 405B",
        "H100",
        16384,
        Range(45_600, 50_700, 50_700),
        "Llama 3 herd, arXiv 2407.21783, Table 5: 419 unexpected and 47 planned interruptions in 54 days",
        note="45,600 with the planned ones; the paper's 30.1 percent for faulty GPUs is a misprint of 35.3 (148 of 419)",
    ),
    Published(
        "RSC-1",
        "A100",
        16384,
        Range(8_100, 29_500, 29_500),
        "Kokolis et al., arXiv 2410.21680: 6.50 failures in 1,000 node-days; 7.9 h between failures of jobs with 1,024 GPUs",
        note="the fleet's rate and that of its large jobs do not follow one law of 1/N",
    ),
    Published(
        "OPT-175B",
        "A100",
        992,
        Range(12_000, 13_000, 14_000),
        "Zhang et al., arXiv 2205.01068: at least 35 manual and about 70 automatic restarts in 2 months",
    ),
    Published(
        "BLOOM",
        "A100",
        384,
        Range(64_500, 64_500, 64_500),
        "BLOOM, arXiv 2211.05100: about 1 GPU failure a week",
        note="failures of GPUs only",
    ),
    Published(
        "Crusoe H200",
        "H200",
        1600,
        Range(22_000, 22_000, 22_000),
        "GTC 2025 as told at glennklockwood.com: about 205 faults in 4 months",
        secondary=True,
    ),
    Published(
        "SKT B200",
        "B200",
        504,
        Range(66_500, 66_500, 66_500),
        "From Detection to Recovery, arXiv 2605.09370: 10 failures of GPUs with an XID in 55 days",
        note="failed sessions were far more frequent; 3 of 63 nodes had more than half of all exclusions",
    ),
)

DEDICATED = Range(20_000, 31_600, 50_000)
"""GPU-hours per interruption that a plan reckons with: the range of dedicated A100 and H100 in PUBLISHED; `mid` is the geometric
mean of its ends, and near to the fleet of RSC-1 (29,500)."""
KNOWN_GPUS = ("A100", "H100", "H200", "B200")
"""Those with a row in PUBLISHED; for others the same range is taken, with a warning."""

WITHOUT_GPUS_SECONDS = 24 * HOUR
"""Between interruptions of a whole job on machines without GPUs, evictions apart: nothing is published of them; an assumption."""

HARDWARE_SHARE = 0.78
"""Of unexpected interruptions, those of hardware, confirmed or suspected (Llama 3): a machine is replaced."""

LEMON_SHARE = 3 / 63
"""Of the machines, those that fail again and again: arXiv 2605.09370, 3 of 63 nodes."""
LEMON_TIMES = 20.0
"""How much oftener they do: half of all exclusions on 3 of 63 is (0.5 / 3) / (0.5 / 60) = 20 times as often as the others."""

SPOT_CLASSES: Mapping[str, Range] = {
    "0-5": Range(0.00625, 0.025, 0.05),
    "5-10": Range(0.05, 0.075, 0.10),
    "10-15": Range(0.10, 0.125, 0.15),
    "15-20": Range(0.15, 0.175, 0.20),
    "20+": Range(0.20, 0.30, 0.50),
}
"""Azure's eviction rates, the share of machines evicted in an hour (spot-vms.md in MicrosoftDocs/azure-compute-docs): ends and
middle of each class. The first cannot begin at 0, for its mean time would have no end: an eighth of its end is taken; the last
has no end: 0.5 is taken."""
SPOT_NOTICE_SECONDS = 30.0
"""Of an eviction, through Scheduled Events, best effort (the same page)."""
SPOT_UNKNOWN = Range(0.025, 0.075, 0.175)
"""When no class is given: the middles of 0-5, 5-10 and 15-20."""


@dataclass(frozen=True)
class Rates:
    """Mean seconds between two interruptions of one training, by cause and together: `low` is the worst case."""

    failures: Range
    """Of dedicated machines, and of Spot as well."""
    evictions: Range | None
    """None: the machines are not Spot."""
    together: Range
    machines: int
    gpus: int
    warnings: tuple[str, ...] = ()


def failure_rates(
    gpu: str, gpus: int, *, per_machine: int = 8, gpu_hours: Range = DEDICATED, spot: bool = False, spot_class: str = ""
) -> Rates:
    """How long `gpus` GPUs work together until one of them, or what is around it, stops all.

    A gang of n machines has n times the rate of one. Raises ValueError for counts below 1 and an unknown class.
    """
    if gpus < 1 or per_machine < 1:
        raise ValueError(f"{gpus} GPUs, {per_machine} in a machine: give numbers above 0")
    machines = -(-gpus // per_machine)
    failures = gpu_hours.times(HOUR / gpus)
    evictions = _evictions(machines, spot_class) if spot or spot_class else None
    together = failures if evictions is None else _both(failures, evictions)
    known = any(name in gpu.upper() for name in KNOWN_GPUS)
    unknown = () if known else (f"no failure rate of {gpu or 'this GPU'} is published: that of A100 and H100 is taken",)
    guess = ("no eviction class is given: 2.5 to 17.5 % an hour are taken",) if evictions and not spot_class else ()
    return Rates(failures, evictions, together, machines, gpus, unknown + guess)


def job_seconds(*, machines: int, gpus_per_machine: int, taken_away: bool) -> float:
    """Mean seconds between interruptions of a job on so many machines, as expected: what the stage `plan` reckons with.

    `taken_away`: Spot machines or Azure ML's low-priority tier, whose eviction class is not known.
    """
    if gpus_per_machine:
        gpus = machines * gpus_per_machine
        return failure_rates("", gpus, per_machine=gpus_per_machine, spot=taken_away).together.mid
    always = Range(WITHOUT_GPUS_SECONDS, WITHOUT_GPUS_SECONDS, WITHOUT_GPUS_SECONDS)
    return _both(always, _evictions(machines, "")).mid if taken_away else always.mid


def eviction_hazard(share: float) -> float:
    """Evictions of one machine a second, by the share that is evicted in an hour: 1 - exp(-3600 hazard) = share."""
    if not 0 <= share < 1:
        raise ValueError(f"{share} of the machines evicted an hour: give a share from 0 to below 1")
    return -math.log1p(-share) / HOUR


def spot_shares(spot_class: str) -> Range:
    """Of the machines, evicted in an hour; `low` is the fewest. Empty: the class is not known."""
    if not spot_class:
        return SPOT_UNKNOWN
    result = SPOT_CLASSES.get(spot_class.strip().removesuffix("%").replace("20-100", "20+"))
    if result is None:
        raise ValueError(f"eviction class {spot_class!r}: give one of {', '.join(SPOT_CLASSES)} (percent an hour)")
    return result


def _evictions(machines: int, spot_class: str) -> Range:
    """The most evictions give the shortest time, so ends change places."""
    shares = spot_shares(spot_class)
    return Range(*(1 / (machines * eviction_hazard(share)) for share in (shares.high, shares.mid, shares.low)))


def _both(one: Range, other: Range) -> Range:
    """Rates add up: 1/M = 1/M1 + 1/M2."""
    pairs = ((one.low, other.low), (one.mid, other.mid), (one.high, other.high))
    return Range(*(a * b / (a + b) for a, b in pairs))
