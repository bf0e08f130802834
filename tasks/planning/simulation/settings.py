"""What a simulation is asked for: machines, how they fail and come back, how a training saves and restarts. All in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tasks.planning.checkpointing import Recovery, Saving
from tasks.planning.failures import SPOT_NOTICE_SECONDS

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
