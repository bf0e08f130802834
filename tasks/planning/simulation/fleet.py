"""Machines that train, stand by, or are away: who fails next, who comes back when. One heap of times, whatever their number."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from tasks.planning.simulation.settings import Simulated

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
    """All machines of a training and its spares. Only those that train fail; times are of the simulation's clock."""

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
