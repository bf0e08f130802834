"""How often a rollout ends as it should: the product's own steps and judge under simulated requests and a simulated clock.

Callers come at random (Poisson). A model answers whole or streams; its answers have a time to the first token, tokens, and a
time a token. A rollout with the default settings ends promoted, rolled back, or not judged. Nothing sleeps.
"""

from __future__ import annotations

import heapq
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.operating_characteristics import Line
from tasks.common.errors import GateFailed
from tasks.config.serving import RolloutConfig
from tasks.serving.journal import Journal
from tasks.serving.protocol.judge import MOST_OLD, Seen
from tasks.serving.rollout import roll_out

SEED = 20
RATES = (0.1, 0.5, 5.0, 200.0)
"""Requests a second that callers send."""
HISTORY_SECONDS = 3600.0
"""For which the old model has answered when the rollout begins."""
TOKENS = 64
NEVER = 1e9
"""Seconds after which a request that hangs is answered."""
BLOCK = 100
"""Requests that are drawn at once."""
IDLE_SECONDS = 5.0
"""Longest step of the clock when nothing happens."""
ENDS = ("promoted", "rolled back", "not judged")


@dataclass(frozen=True)
class Times:
    """How a model answers: seconds to the first token, tokens, seconds a token, each of so many requests."""

    name: str
    draw: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray, np.ndarray]]
    streamed: bool = False


def _lognormal(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pace = 0.01 * np.exp(0.6 * rng.standard_normal(count))
    return pace, np.full(count, TOKENS), pace


def _first_token(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    first = 0.25 * np.exp(0.2 * rng.standard_normal(count))
    return first, 1 + rng.geometric(1 / 40, count), 0.01 * np.exp(0.1 * rng.standard_normal(count))


def _stalls(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pace = 0.01 * np.exp(0.1 * rng.standard_normal(count))
    return pace + 2.0 * (rng.random(count) < 0.05), np.full(count, TOKENS), pace


LOGNORMAL = Times("answer times lognormal 0.6", _lognormal)
TRAFFIC = (
    LOGNORMAL,
    Times("first token 0.25 s, lengths vary", _first_token),
    Times("first token 0.25 s, lengths vary, streamed", _first_token, streamed=True),
    Times("5 % stalls of 2 s", _stalls),
)


@dataclass(frozen=True)
class Truth:
    """What is wrong with the new model."""

    name: str
    stated: str
    fails: float = 0.0
    hangs: float = 0.0
    slower: float = 1.0
    times: Times = LOGNORMAL


SAME = tuple(Truth(f"the same model, {one.name}", "not promoted in <= 1 %", times=one) for one in TRAFFIC)
FAULTS = (
    Truth("4 % errors, twice the limit", "promoted in <= 1 %", fails=0.04),
    Truth("10 % errors", "promoted in <= 1 %", fails=0.10),
    Truth("every request fails", "promoted in 0", fails=1.0),
    Truth("10 % hang", "promoted in <= 1 %", hangs=0.10),
    Truth("twice as slow", "promoted in <= 1 %", slower=2.0),
)


@dataclass
class Model:
    """Requests to one model. State: those under way, and what was seen of those that ended."""

    rng: np.random.Generator
    times: Times
    truth: Truth | None = None
    under_way: list[tuple[float, float, float, bool, float, float]] = field(default_factory=list)
    """End, begin of the answer, begin, whether it failed, time to the first token, time a token."""
    drawn: Iterator[tuple[float, float, bool, float, float]] = field(default_factory=lambda: iter(()))
    total: int = 0

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """As the gateway does when the traffic was set: what ends from now on counts."""
        self.requests, self.failures, self.longest = 0, 0, 0.0
        self.first: list[float] = []
        self.pace: list[float] = []

    def ask(self, at: float) -> None:
        request = next(self.drawn, None)
        if request is None:
            self.drawn = self._draw()
            request = next(self.drawn)
        wait, took, failed, first, pace = request
        heapq.heappush(self.under_way, (at + took, at + wait, at, failed, first, pace))

    def see(self, now: float, *, most: int | None = None) -> Seen:
        while self.under_way and self.under_way[0][0] <= now:
            _, answered, began, failed, first, pace = heapq.heappop(self.under_way)
            self.requests, self.failures, self.total = self.requests + 1, self.failures + failed, self.total + 1
            if not failed:
                self.longest = max(self.longest, answered - began)
                self.pace.append(pace)
                if self.times.streamed:
                    self.first.append(first)
        if most:
            del self.pace[:-most], self.first[:-most]
        waiting = [now - began for _, answered, began, _, _, _ in self.under_way if answered > now]
        return Seen(self.requests, self.failures, self.first, self.pace, waiting, self.longest)

    def _draw(self) -> Iterator[tuple[float, float, bool, float, float]]:
        first, tokens, pace = self.times.draw(self.rng, BLOCK)
        truth = self.truth or Truth("", "")
        first, pace = first * truth.slower, pace * truth.slower
        took = first + pace * (tokens - 1)
        failed = self.rng.random(BLOCK) < truth.fails
        hangs = self.rng.random(BLOCK) < truth.hangs
        wait = first if self.times.streamed else took
        wait, took = np.where(hangs, NEVER, wait), np.where(hangs, NEVER, took)
        a_token = pace if self.times.streamed else took / tokens
        return zip(wait.tolist(), took.tolist(), failed.tolist(), first.tolist(), a_token.tolist(), strict=True)


class SimulatedTraffic:
    """A TrafficPort whose callers, models and clock are drawn."""

    def __init__(self, truth: Truth, rate: float, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._rate, self.now = rate, HISTORY_SECONDS
        self.blue = Model(self._rng, truth.times)
        self.green = Model(self._rng, truth.times, truth)
        self._share, self._mirror = 0.0, 0.0
        count = min(int(self._rng.poisson(rate * HISTORY_SECONDS)), 2 * MOST_OLD)
        for at in np.sort(self._rng.random(count)) * min(HISTORY_SECONDS, count / rate):
            self.blue.ask(float(at))
        self._next = inf

    def set_traffic(self, weights: Mapping[str, int], *, mirror: int = 0) -> None:
        self._share, self._mirror = weights["green"] / 100, mirror / 100
        self.green.start_over()
        self._next = self.now + float(self._rng.exponential(1 / self._rate))

    def observe(self) -> Mapping[str, Seen]:
        return {"green": self.green.see(self.now), "blue": self.blue.see(self.now, most=MOST_OLD)}

    def asked_back(self) -> str:
        return ""

    def promote(self) -> None:
        pass

    def withdraw(self) -> None:
        pass

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """The next look, or the first one at which there is something new to see."""
        ends = [model.under_way[0][0] for model in (self.green, self.blue) if model.under_way]
        until = max(self.now + seconds, min([*ends, self._next, self.now + IDLE_SECONDS]))
        while self._next <= until:
            copied = self._mirror and self._rng.random() < self._mirror
            to = self.green if self._rng.random() < self._share else self.blue
            to.ask(self._next)
            if copied:
                self.green.ask(self._next)
            self._next += float(self._rng.exponential(1 / self._rate))
        self.now = until


class Remembered(Journal):
    """A journal without a disk."""

    def __init__(self) -> None:
        super().__init__(Path("journal.jsonl"))

    def write(self, event: str, **details: Any) -> None:
        pass


class Ended(NamedTuple):
    """How a rollout ended."""

    how: str
    requests: int
    """That the new model answered."""
    seconds: float


def rollout(truth: Truth, rate: float, seed: int) -> Ended:
    """One rollout from beginning to end."""
    traffic = SimulatedTraffic(truth, rate, seed)
    how = "promoted"
    try:
        roll_out(traffic, RolloutConfig(), Remembered(), pause=traffic.pause, clock=traffic.clock)
    except GateFailed as error:
        how = "not judged" if "was not judged" in error.message else "rolled back"
    return Ended(how, traffic.green.total, traffic.now - HISTORY_SECONDS)


def ends(truth: Truth, rate: float, *, trials: int) -> list[Ended]:
    """Of so many rollouts, each with a seed of its own."""
    return [rollout(truth, rate, SEED * 1_000_000 + number) for number in range(trials)]


def _line(case: tuple[Truth, float, int]) -> Line:
    truth, rate, trials = case
    found = ends(truth, rate, trials=trials)
    counts = {how: sum(one.how == how for one in found) for how in ENDS}
    parts = [f"{how} {100 * count / trials:.3g} %" for how, count in counts.items() if count]
    parts.append(f"median {np.median([one.requests for one in found]):.0f} requests")
    parts.append(f"{np.median([one.seconds for one in found]):.3g} s")
    return Line("canary", truth.stated, ", ".join(parts), f"{truth.name}, {rate:g} requests/s", SEED, trials)


def _quiet() -> None:
    """Steps that hold say so to people."""
    logging.getLogger("headway.rollout").setLevel(logging.ERROR)


def rows(quick: bool) -> Iterator[Line]:
    """All of it: seconds with `quick`, else minutes, on all processors."""
    rates = RATES[1:3] if quick else RATES
    _quiet()
    cases = [(truth, rate, 4 if quick else 400) for truth in (*SAME, *FAULTS) for rate in rates]
    if quick:
        yield from map(_line, cases)
        return
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), _quiet) as pool:
        yield from pool.imap(_line, cases)
