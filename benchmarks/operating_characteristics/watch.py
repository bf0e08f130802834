"""How often the watch calls unchanged answers and labels an anomaly, and how often it finds a planted shift: the product's own
judge and its rules of two windows, on made-up answers whose truth is known.

Answers are independent, or come in bursts that are alike (one caller asks the same again and again), of no caller by name, of one
caller a burst, or of callers whose bursts overlap; or they follow the hour of the day. Nothing sleeps and nothing is written.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.operating_characteristics import Line
from tasks.config.revalidation import ServiceConfig
from tasks.formats.answers import Answer, Label
from tasks.serving.monitor.anomalies import compare
from tasks.serving.monitor.blocks import accuracy_column
from tasks.serving.monitor.measures import ended
from tasks.serving.monitor.watch import Followed, next_followed

CONFIG = ServiceConfig()
SEED = 20
BEFORE, WINDOW = 1000, 200
LABELS_BEFORE, LABELS = 400, 100
HOUR, DAY = 3600.0, 86_400.0
HOURS = 71
"""Of a daily cycle that is followed from its first answer on."""
LOOK_SECONDS = 600.0
RATE = 120 / HOUR
"""Requests a second in the mean of a day."""
SWING = 0.5
"""By which the hour moves lengths and seconds a token, to either side of the day's mean."""
LATER = 2 * DAY
"""From which on a window of the cycle has the same hour of other days behind it."""


class Traffic(NamedTuple):
    """How answers hang together."""

    name: str
    burst: int = 1
    """Answers that are alike in a row."""
    callers: str = ""
    """`one` a burst, or `overlapping`: the bursts of four callers at a time are interleaved."""
    cycle: bool = False
    power: str = "found in >= 90 %"


class Shift(NamedTuple):
    """What becomes of an answer of the window: its number decides whether it is one that changes."""

    name: str
    change: Callable[[int, Answer], Answer]


INDEPENDENT = Traffic("independent answers")
BURSTS = (
    Traffic("bursts of 5 alike", 5, power="found in >= 70 %"),
    Traffic("bursts of 20 alike", 20),
    Traffic("bursts of 5 alike, a caller each", 5, "one"),
    Traffic("bursts of 20 alike, a caller each", 20, "one"),
    Traffic("bursts of 5 alike, four callers at a time", 5, "overlapping"),
    Traffic("bursts of 20 alike, four callers at a time", 20, "overlapping"),
)
CYCLE = Traffic("lengths and times by the hour of the day, after two days", cycle=True)


def _broken(answer: Answer) -> Answer:
    return Answer(answer.time, answer.seconds, answer.max_tokens, 500, "RuntimeError", caller=answer.caller)


NOTHING = Shift("nothing", lambda place, a: a)
SHIFTS = (
    Shift("every third answer loops", lambda place, a: replace(a, repetition=0.9) if place % 3 == 0 else a),
    Shift("entropy higher by 0.4 nats, a deviation", lambda place, a: replace(a, entropy=(a.entropy or 0.0) + 0.4)),
    Shift(
        "answers half as long", lambda place, a: replace(a, completion_tokens=max(1, (a.completion_tokens or 1) // 2))
    ),
    Shift("twice as slow", lambda place, a: replace(a, seconds=a.seconds * 2)),
    Shift("one in ten fails", lambda place, a: _broken(a) if place % 10 == 0 else a),
)


def answers(chance: np.random.Generator, count: int, traffic: Traffic, times: np.ndarray | None = None) -> list[Answer]:
    """So many answers; lengths, ends and seconds hang together as those of a real endpoint do."""
    times = np.arange(count, dtype=float) if times is None else times
    bursts = -(-count // traffic.burst) + 8
    asked = _bursts(chance, count, traffic, bursts)
    phase = np.sin(2 * np.pi * times / DAY) * SWING if traffic.cycle else np.zeros(count)
    lengths = np.minimum(chance.geometric(1 / 40, bursts)[asked] * (1 + phase), 64).astype(int).clip(1)
    paces = 0.01 * chance.gamma(20, 0.05, count) * (1 + phase)
    repetition, entropy = chance.beta(1, 12, bursts)[asked], chance.normal(2.0, 0.4, bursts)[asked]
    odd = (chance.random(bursts)[asked] < 0.02) / 50
    return [
        Answer(
            time=float(times[place]),
            seconds=float(0.01 + lengths[place] * paces[place]),
            max_tokens=64,
            completion_tokens=int(lengths[place]),
            finish_reason="length" if lengths[place] >= 64 else "stop",
            repetition=round(float(repetition[place]), 4) if lengths[place] > 3 else None,
            entropy=round(float(entropy[place]), 4),
            odd=float(odd[place]),
            caller=f"caller-{asked[place]}" if traffic.callers else "",
        )
        for place in range(count)
    ]


def _bursts(chance: np.random.Generator, count: int, traffic: Traffic, bursts: int) -> np.ndarray:
    """Which burst each answer is of; the first one may have begun before."""
    if traffic.callers != "overlapping":
        return (np.arange(count) + chance.integers(traffic.burst)) // traffic.burst
    active, left = list(range(4)), chance.integers(1, traffic.burst + 1, 4)
    found, following = np.empty(count, int), 4
    for place in range(count):
        one = int(chance.integers(4))
        found[place] = active[one]
        left[one] -= 1
        if not left[one]:
            active[one], left[one], following = following, traffic.burst, following + 1
    return found


def _sides(chance: np.random.Generator, traffic: Traffic) -> tuple[list[Answer], list[Answer]]:
    """A reference and a window that follows it."""
    if not traffic.cycle:
        made = answers(chance, BEFORE + WINDOW, traffic)
        return made[:BEFORE], made[BEFORE:]
    end = LATER + chance.random() * DAY
    times = np.sort(chance.random(int(RATE * end)) * end)
    made = answers(chance, len(times), traffic, times)
    return made[:-WINDOW], made[-WINDOW:]


def stands_out(seed: int, traffic: Traffic, shift: Shift) -> bool:
    """Whether one window does."""
    before, window = _sides(np.random.default_rng([SEED, seed]), traffic)
    changed = [shift.change(place, answer) for place, answer in enumerate(window)]
    return bool(compare(before, changed, CONFIG)["verdict"] == "anomaly")


def loses_accuracy(seed: int, burst: int, share: float) -> bool:
    """Whether the accuracy of one window of labels does, when its share of right answers is as given and was 90 %."""
    chance = np.random.default_rng([SEED, seed, burst])
    count = LABELS_BEFORE + LABELS
    asked = (np.arange(count) + chance.integers(burst)) // burst
    luck = chance.random(asked[-1] + 1)[asked]
    right = luck < np.where(np.arange(count) < LABELS_BEFORE, 0.9, share)
    made = [Label(float(n), f"r{n}", float(n), float(one)) for n, one in enumerate(right)]
    column = accuracy_column(made[:LABELS_BEFORE], made[LABELS_BEFORE:], CONFIG)
    return column is not None and column["verdict"] == "anomaly"


class Life(NamedTuple):
    """A daily cycle from its first answer on."""

    windows: int
    stood_out: int
    events: int


def followed(seed: int) -> Life:
    """What is found in HOURS of unchanged answers, looked at every ten minutes as the watch does."""
    chance = np.random.default_rng([SEED, seed])
    end = HOURS * HOUR
    times = np.sort(chance.random(int(RATE * end)) * end)
    made = answers(chance, len(times), CYCLE._replace(name=""), times + chance.random() * DAY)
    begun = made[0].time
    known, windows, stood_out, events = Followed("model", begun), 0, 0, 0
    for look in np.arange(begun + LOOK_SECONDS, begun + end, LOOK_SECONDS):
        now = float(look)
        window = [answer for answer in made if known.since <= ended(answer) < now]
        until = known.since if known.before is None else known.before
        if not window:
            continue
        told = compare([answer for answer in made if ended(answer) < until], window, CONFIG)
        after, said = next_followed(known, {**told, "against": "answers"}, CONFIG, now=now)
        windows += after.since != known.since
        stood_out += told["verdict"] == "anomaly"
        events += bool(said)
        known = after
    return Life(windows, stood_out, events)


def _share(found: int, of: int) -> str:
    return f"{found} of {of}: {found / of:.1%}"


def rows(quick: bool) -> Iterator[Line]:
    """Unchanged answers and labels first, then what is planted."""
    if quick:
        yield from _rows(map, (INDEPENDENT, BURSTS[1], BURSTS[5], CYCLE), (INDEPENDENT,), windows=5, planted=2, lives=0)
        return
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        powers = (INDEPENDENT, BURSTS[0], CYCLE)
        yield from _rows(pool.imap, (INDEPENDENT, *BURSTS, CYCLE), powers, windows=200, planted=50, lives=6)


def _rows(
    each: Callable[..., Iterator[Any]],
    unchanged: Sequence[Traffic],
    shifted: Sequence[Traffic],
    *,
    windows: int,
    planted: int,
    lives: int,
) -> Iterator[Line]:
    for traffic in unchanged:
        found = sum(each(functools.partial(_unchanged, traffic), range(windows)))
        yield Line("watch", "stands out in <= 2 %, nominal 1 %", _share(found, windows), traffic.name, SEED, windows)
    if lives:
        told = list(each(followed, range(lives)))
        found, of, events = (sum(one[place] for one in told) for place in (1, 0, 2))
        truth = f"a cycle from its first answer on, {HOURS} h"
        yield Line("watch", "stands out in <= 2 %, nominal 1 %", _share(found, of), truth, SEED, of)
        yield Line("watch, events", "none", f"{events} in {lives * HOURS} h", truth, SEED, lives)
    for burst in (1, 5, 20):
        trials = 5 * windows
        found = sum(each(functools.partial(_labels, burst, 0.9), range(trials)))
        truth = f"labels in bursts of {burst} alike" if burst > 1 else "independent labels"
        yield Line("watch, labels", "a loss in <= 1 %, nominal 0.5 %", _share(found, trials), truth, SEED, trials)
    for traffic in shifted:
        for place, shift in enumerate(SHIFTS):
            found = sum(each(functools.partial(_planted, traffic, place), range(planted)))
            yield Line("watch", traffic.power, _share(found, planted), f"{traffic.name}; {shift.name}", SEED, planted)
    for burst, share in ((1, 0.7), (5, 0.5)):
        found = sum(each(functools.partial(_labels, burst, share), range(planted)))
        truth = f"labels in bursts of {burst}; right answers from 90 % to {share:.0%}"
        yield Line("watch, labels", "found in >= 80 %", _share(found, planted), truth, SEED, planted)


def _unchanged(traffic: Traffic, seed: int) -> bool:
    return stands_out(seed, traffic, NOTHING)


def _planted(traffic: Traffic, place: int, seed: int) -> bool:
    return stands_out(seed, traffic, SHIFTS[place])


def _labels(burst: int, share: float, seed: int) -> bool:
    return loses_accuracy(seed, burst, share)
