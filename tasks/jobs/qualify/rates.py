"""How a rate is measured: in windows, at the same time on all ranks, and again while somebody is slow.

When a rank is slow against its peers all measure again, and each part's best round counts: other work that comes and goes
spares some round; throttling and a bad part spare none. What is measured is in the groups' own rooms; what is too slow is
judged elsewhere (tasks/qualification).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import Probe, Status

WINDOW_SECONDS = 0.5
"""Longer than a scheduler's quota period (0.1 s), so that a throttled rank shows its average rate in every window."""
WARMUP_SECONDS = 0.2
LEAST_SHARE = 0.1
"""Of a window that must have been computed: with less, what the part itself does cannot be told from the rest."""
CPU_ROUNDS = 2
"""Times as many rounds where ranks compute on CPUs: other work comes and goes there more often than on a GPU."""
LAST_MEETING_SECONDS = 1.0
"""Time for the others when the group's own is over."""


class Rate(NamedTuple):
    """Amounts a second, of one part: a rank's core, a GPU."""

    rate: float
    """By the clock: what a training step gets."""
    on_core: float
    """Without the time that the rank was ready and other work had its core: what the part itself does. 0: it cannot be told."""


class Outcome(NamedTuple):
    """Of one check on one rank: a rate a part, or why there is none."""

    rates: tuple[Rate, ...] = ()
    status: Status = "measured"
    said: str = ""
    each: tuple[tuple[Rate, ...], ...] = ()
    """What every measurement came to, where each is made several times (config.repeats)."""


class Together:
    """State of one group on one rank: when its time is over."""

    def __init__(self, bench: Bench, group: str) -> None:
        self.bench, self.group = bench, group
        self.limit = bench.config.check_seconds
        self._ends = time.monotonic() + self.limit

    @property
    def left(self) -> float:
        """Seconds of the group's time."""
        return self._ends - time.monotonic()

    @property
    def late(self) -> str:
        """What a probe says that did not get its turn."""
        return f"the group's {self.limit:g} s (benchmark.check_seconds) were over"

    def meet(self, name: str, value: Any = True) -> dict[int, Any]:
        """What all ranks that come say, by rank. Half of the time is left to those that came when one does not."""
        return self.bench.share(f"{self.group}/{name}", value, seconds=max(self.left / 2, LAST_MEETING_SECONDS))

    def best(self, check: str, measure: Callable[[], Sequence[Rate]]) -> Outcome:
        """Each part's best round; all ranks measure at the same time, config.repeats times, and again while somebody is slow.
        A rank on which it fails comes to the meetings still."""
        best = Outcome(status="timed out", said=self.late)
        for number in range(self.bench.config.rounds * (1 if self.bench.cuda else CPU_ROUNDS)):
            if self.left <= 0:
                break
            self.meet(f"{check}/{number}/ready")
            best = self._with(best, tried(measure))
            everyone = self.meet(f"{check}/{number}/rates", [rate.on_core for rate in best.rates])
            if number + 1 < self.bench.config.repeats:
                continue
            if not any_behind([rate for rates in everyone.values() for rate in rates], self.bench.config.min_of_peers):
                break
        return best

    def repeated(self, measure: Callable[[], Sequence[Rate]]) -> Outcome:
        """The best of config.repeats measurements of this rank alone, as far as the time goes."""
        best = Outcome(status="timed out", said=self.late)
        for _ in range(self.bench.config.repeats):
            if self.left > 0:
                best = self._with(best, tried(measure))
        return best

    def _with(self, best: Outcome, new: Outcome) -> Outcome:
        each = (*best.each, new.rates) if new.rates and self.bench.config.repeats > 1 else best.each
        return _better(best, new)._replace(each=each)

    def note(
        self,
        check: str,
        unit: str,
        outcome: Outcome,
        *,
        where: Sequence[str],
        per: float,
        text: str = "",
        compared: bool = True,
    ) -> None:
        """Write a probe a part; `per` are the amounts of one unit. `compared`: with the same part of other machines."""
        if not outcome.rates:
            self.bench.note(Probe(check=check, status=outcome.status, unit=unit, said=outcome.said))
        for number, (part, (rate, on_core)) in enumerate(zip(where, outcome.rates, strict=False)):
            peers = on_core / per if on_core and compared else None
            each = tuple(rates[number].on_core / per for rates in outcome.each) if peers else ()
            self.bench.note(
                Probe(check=check, measured=rate / per, peers=peers, each=each, unit=unit, where=part, said=text)
            )


def tried(measure: Callable[[], Sequence[Rate]]) -> Outcome:
    """A measurement, or the first line of why it failed: torch's errors of a device are RuntimeErrors."""
    try:
        return Outcome(tuple(measure()))
    except RuntimeError as error:
        return Outcome(status="failed", said=(str(error).splitlines() or [type(error).__name__])[0])


def _better(one: Outcome, two: Outcome) -> Outcome:
    """Part by part; a failure does not count where there was a measurement."""
    if not one.rates or not two.rates:
        return two if two.rates or not one.rates else one
    return Outcome(tuple(max(pair, key=lambda rate: rate.on_core) for pair in zip(one.rates, two.rates, strict=True)))


def any_behind(rates: Sequence[float], share: float) -> bool:
    """Whether a part is slower than its share of the median of the others: if any is, the slowest is."""
    slowest, *others = sorted(rate for rate in rates if rate) or [0.0]
    return bool(others) and slowest < share * statistics.median(others)


def steady(windows: Sequence[Rate]) -> Rate:
    """The best of some windows: a moment's disturbance spares some window; throttling spares none."""
    return Rate(max(window.rate for window in windows), max(window.on_core for window in windows))


def measure_windows(once: Callable[[], object], amount: float, seconds: float) -> list[Rate]:
    """Repeat some work that amounts to so much; one average a window of about half a second, after a warm-up.

    A window that was stopped midway counts the time that it stood still, in both rates.
    """
    _repeat_for(WARMUP_SECONDS, once)
    count = max(1, round(seconds / WINDOW_SECONDS))
    windows = []
    for _ in range(count):
        waited = _waited_for_a_core()
        times, elapsed = _repeat_for(seconds / count, once)
        computed = elapsed - (_waited_for_a_core() - waited)
        on_core = amount * times / computed if computed >= LEAST_SHARE * elapsed else 0.0
        windows.append(Rate(rate=amount * times / elapsed, on_core=on_core))
    return windows


def _waited_for_a_core() -> float:
    """Seconds that the main thread was ready to run and other work had its core, since it began.

    Second field of Linux's /proc/self/schedstat, in ns (Documentation/scheduler/sched-stats.rst); 0 where there is none.
    A stopped process is not ready, so what a throttled rank loses is not in it.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _repeat_for(seconds: float, once: Callable[[], object]) -> tuple[int, float]:
    began, times = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or not times:
        once()
        times += 1
    return times, elapsed
