"""A virtual clock: work shared out as the product shares it out. Pure."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Where = Literal["machines", "first machine", "launcher"]


@dataclass(frozen=True)
class Machines:
    """What a corpus is worked on with; rates are bytes a second."""

    count: int
    cores: int
    network: float = float("inf")
    """Of one machine, and of the launcher, to where the files lie."""
    files: float = float("inf")
    """Of the file system, all machines together."""

    def moving(self, size: float, *, by: int = 1) -> float:
        """Seconds for so many bytes, spread over some machines."""
        return max(size / by / self.network, size / self.files)


@dataclass(frozen=True)
class Stage:
    """One stage on the clock."""

    name: str
    where: Where
    seconds: float
    processors: float = 0.0
    """Seconds of processors, of all machines together."""
    read: float = 0.0
    """Bytes, of all machines together."""
    written: float = 0.0
    memory: float = 0.0
    """Bytes that the process tree holds on the machine that holds most."""


def shared_out(seconds: Sequence[float], *, machines: int, cores: int) -> float:
    """When the last of some units is done: each machine has every n-th unit, of which a free core takes the next.

    So tasks/jobs/profile.py divides units among ranks, and tasks/data/corpus/pool.py among the processes of one.
    """
    ends = []
    for rank in range(min(machines, len(seconds))):
        free = [0.0] * cores
        for unit in seconds[rank::machines]:
            heapq.heapreplace(free, free[0] + unit)
        ends.append(max(free))
    return max(ends, default=0.0)


def superlinear(small: float, large: float, *, times: float, slack: float = 1.1) -> bool:
    """Whether `times` as much work took more than `times` as long."""
    return large > small * times * slack
