"""Which answers may change sides where nothing has changed: blocks of those that hang together, not answers one by one. Pure.

Requests come in bursts that are alike, a slow minute is slow for everybody, callers ask what they ask. A permutation test of
single answers takes fifty answers of ten bursts for fifty answers. So blocks are permuted whole (Good, Permutation, Parametric
and Bootstrap Tests of Hypotheses, 3rd ed. 2005, ch. 9), as long as the answers themselves ask for: the variance of the sum of
neighbours says how far they hang together (overlapping batch means; Meketon and Schmeiser, Winter Simulation Conference 1984).
Where they do not, a block is one answer, and the test is exact.

Whether callers call fewer answers right than before is a permutation test of the means of two lists of labels, in such blocks.
It is one-sided: more right answers are no anomaly. A label is 1, 0 or a score between, so a test of means serves all three (Good,
ch. 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tasks.config.revalidation import ServiceConfig
from tasks.formats.answers import Label

DAY = 86_400.0
PAD_SECONDS = 1800.0
"""Before and after the window's time of day, on the same day and on others, from which its reference is taken."""
CERTAIN = 3.0
"""Standard errors by which the variance of longer blocks must be larger for them to be taken."""
MARGIN = 6
"""Times as long as they have to be at least: a block that begins within a burst holds a part of it. Bursts of B cost a block of
6 B an eighteenth of its variance, one of B a third."""
LEAST_SERIES = 4
"""Blocks of the longest length that is looked at."""
CHUNKS = 10
"""Stretches that a series must have for its oddest tenth to be left out: it may have been an anomaly itself."""


class Run(NamedTuple):
    """Answers in the order of time, all of one side."""

    rows: NDArray[np.int64]
    """Their places among all answers, those of the reference first."""
    new: bool
    stratum: int
    """Blocks change sides with blocks of the same stratum only."""
    whole: bool = False
    """Whether all of it is one block: of a caller who is on one side only, nobody knows what is usual."""


@dataclass(frozen=True)
class Blocks:
    """What changes sides as one. Shapes [answers], [blocks], [blocks]."""

    of: NDArray[np.int64]
    new: NDArray[np.bool_]
    stratum: NDArray[np.int64]

    def possible(self) -> int:
        """Splits that there are; with fewer than one by the false-alarm rate nothing can stand out."""
        sides = (self.new[self.stratum == each] for each in np.unique(self.stratum))
        return math.prod(math.comb(len(side), int(side.sum())) for side in sides)

    def drawn(self, *, splits: int, seed: int) -> NDArray[np.float32]:
        """Which answers are on the new side, shape [splits + 1, answers]: as it is, and `splits` random splits of the blocks."""
        chance = np.random.default_rng(seed)
        rows = np.repeat(self.new[None].astype(np.float32), splits + 1, axis=0)
        for each in np.unique(self.stratum):
            places = np.flatnonzero(self.stratum == each)
            count = int(self.new[places].sum())
            if not 0 < count < len(places):
                continue
            keys = chance.random((splits, len(places)), np.float32)
            chosen = places[np.argpartition(keys, count - 1, axis=1)[:, :count]]
            rows[1:, places] = 0
            np.put_along_axis(rows[1:], chosen, 1, axis=1)
        return np.ascontiguousarray(rows[:, self.of])


def orders(old: Sequence[str], new: Sequence[str]) -> list[list[Run]]:
    """The orders in which neighbours may hang together, from the callers of both sides in the order of time.

    By time always; where there are several callers, by caller too. Who is on both sides is compared with himself only: who asks
    may change without a change of the answers. What stands out must stand out in all of them.
    """
    by_time = [Run(np.arange(len(old)), False, 0), Run(np.arange(len(old), len(old) + len(new)), True, 0)]
    callers = np.array([*old, *new])
    names = np.unique(callers)
    if len(names) < 2:
        return [by_time]
    by_caller = []
    for number, name in enumerate(names, 1):
        rows = np.flatnonzero(callers == name)
        sides = [(rows[rows < len(old)], False), (rows[rows >= len(old)], True)]
        both = all(len(side) for side, _ in sides)
        by_caller += [Run(side, to, number if both else 0, whole=not both) for side, to in sides if len(side)]
    return [by_time, by_caller]


def cut(runs: Sequence[Run], length: int) -> Blocks:
    """Blocks of about so many answers."""
    of = np.zeros(sum(len(run.rows) for run in runs), np.int64)
    new: list[bool] = []
    stratum: list[int] = []
    for run in runs:
        for rows in np.array_split(run.rows, 1 if run.whole else max(1, round(len(run.rows) / length))):
            of[rows] = len(new)
            new.append(run.new)
            stratum.append(run.stratum)
    return Blocks(of, np.array(new), np.array(stratum))


def block_length(values: NDArray[np.float64], runs: Sequence[Run], *, stretch: int) -> int:
    """How long blocks have to be for values of shape [answers] or [answers, labels]: 1 where neighbours do not hang together.

    The given runs are looked at, each against its own mean. `stretch` is the length of what may have been an anomaly in them.
    """
    table = values.reshape(len(values), -1)
    return max(_length([_usual(column[run.rows], stretch) for run in runs]) for column in table.T)


def without_hour(
    values: NDArray[np.float64], clock: NDArray[np.float64] | None, runs: Sequence[Run]
) -> NDArray[np.float64]:
    """Values without what the time of day makes of those of some runs, a cubic of it: sides of the same hours have that alike.

    `clock` is in seconds around the window, or None where only one day is known, of which the hour cannot be told from a change.
    """
    if clock is None or np.ptp(clock) == 0:
        return values
    powers = np.vander(clock / np.abs(clock).max(), 4)
    rows = np.concatenate([run.rows for run in runs])
    return np.asarray(values - powers @ np.linalg.lstsq(powers[rows], values[rows], rcond=None)[0], np.float64)


def _length(series: Sequence[NDArray[np.float64]]) -> int:
    centred = [each - each.mean() for each in series if len(each) > 1]
    freedom = sum(len(each) - 1 for each in centred)
    variance = sum(float((each**2).sum()) for each in centred) / freedom if freedom else 0.0
    if variance < 1e-12:
        return 1
    lengths, growths, errors = [1], [1.0], [0.0]
    while long := [each for each in centred if len(each) >= LEAST_SERIES * 2 * lengths[-1]]:
        length = 2 * lengths[-1]
        totals = [np.concatenate([[0.0], np.cumsum(each)]) for each in long]
        sums = [total[length:] - total[:-length] for total in totals]
        free = sum(len(one) * length * (1 - length / len(each)) for one, each in zip(sums, long, strict=True))
        lengths.append(length)
        growths.append(sum(float((one**2).sum()) for one in sums) / free / variance)
        errors.append(math.sqrt(4 * length / (3 * sum(map(len, long)))))
    for place, length in enumerate(lengths):
        later = zip(growths[place + 1 :], errors[place + 1 :], strict=True)
        if all(growth <= growths[place] * (1 + CERTAIN * error) for growth, error in later):
            return 1 if length == 1 else MARGIN * length
    raise AssertionError("the longest length has no longer one")


def _usual(values: NDArray[np.float64], stretch: int) -> NDArray[np.float64]:
    """A series without the oddest tenth of its stretches, where it has ten."""
    count = len(values) // stretch
    if count < CHUNKS:
        return values
    chunks = np.array_split(values, count)
    means = np.array([chunk.mean() for chunk in chunks])
    oddest = set(np.argsort(-np.abs(means - np.median(means)))[: count // CHUNKS].tolist())
    return np.concatenate([chunk for place, chunk in enumerate(chunks) if place not in oddest])


def same_time_of_day(times: NDArray[np.float64], begins: float, ends: float, *, fewest: int) -> NDArray[np.bool_]:
    """Which times are of the time of day of a window, on its day or on another, with PAD_SECONDS on both sides.

    With fewer than `fewest` of them the pads are doubled until there are as many, or all are taken.
    """
    after = (times - begins) % DAY
    apart = np.minimum(np.maximum(after - (ends - begins), 0.0), DAY - after)
    pad = PAD_SECONDS
    while (apart <= pad).sum() < fewest and pad < DAY:
        pad *= 2
    return np.asarray(apart <= pad)


NAME, TITLE = "accuracy", "share of answers that callers call right"
SPLITS = 10_000
MOST_LABELS = 20_000
"""Of each side that the test looks at, the newest."""
DIGITS = 2
"""Of a score."""
SHARE = 0.5
"""Of the false-alarm rate, where labels are judged beside the measures: the other half is theirs."""
NULL_SHOWN = 200
BINS = (0.0, 0.25, 0.5, 0.75, 1.0)
LABELS = ("0", "up to 0.25", "up to 0.5", "up to 0.75", "up to 1")
SEED = 4321


def accuracy_column(before: Sequence[Label], now: Sequence[Label], config: ServiceConfig) -> dict[str, Any] | None:
    """The column of accuracy, as those of tasks/serving/monitor/anomalies.py; None without a label on one side.

    `insufficient` with fewer than `min_labels` on either side, and where they come in too few bursts for a loss to be certain.
    Its p-value is corrected for standing beside the measures.
    """
    if not before or not now:
        return None
    sides = [sorted(side[-MOST_LABELS:], key=lambda label: label.asked) for side in (before, now)]
    old, new = (np.round([label.right for label in side], DIGITS) for side in sides)
    column: dict[str, Any] = {
        "name": NAME,
        "title": TITLE,
        "unit": "",
        "value": None,
        "threshold": None,
        "p_value": None,
        "verdict": "insufficient",
        "reference": float(old.mean()),
        "new": float(new.mean()),
        "moved": [],
        "histogram": {"labels": list(LABELS), "reference": _shares(old), "new": _shares(new)},
        "null": [],
    }
    if min(len(old), len(new)) < config.min_labels:
        return column
    callers = [[label.caller for label in side] for side in sides]
    return column | _judged(old, new, callers, config)


def judged(column: dict[str, Any] | None) -> bool:
    return column is not None and column["verdict"] != "insufficient"


class _Null(NamedTuple):
    """What one order says of a loss: how often it comes by chance, and which losses do."""

    losses: NDArray[np.float64]
    p_value: float
    certain: float


def _judged(
    old: NDArray[np.float64], new: NDArray[np.float64], callers: Sequence[Sequence[str]], config: ServiceConfig
) -> dict[str, Any]:
    """Value is the loss of the mean. An anomaly is certain by every order, and large enough to matter."""
    loss, rate = float(old.mean() - new.mean()), config.false_alarm_rate * SHARE
    values = np.concatenate([old, new])
    nulls = []
    for runs in orders(*callers):
        blocks = cut(runs, block_length(values, runs, stretch=len(new)))
        if blocks.possible() < 1 / rate:
            return {}
        losses = _losses(values, blocks)
        p_value = (1 + int((losses >= loss - 1e-12).sum())) / (1 + len(losses))
        nulls.append(_Null(losses, p_value, float(np.quantile(losses, 1 - rate, method="higher"))))
    p_value = max(null.p_value for null in nulls)
    unusual = p_value <= rate and loss >= config.smallest_accuracy_loss
    return {
        "value": loss,
        "threshold": max(*(null.certain for null in nulls), config.smallest_accuracy_loss),
        "p_value": min(p_value / SHARE, 1.0),
        "verdict": "anomaly" if unusual else "none",
        "moved": [f"right {old.mean():.1%} -> {new.mean():.1%}"],
        "null": [round(float(value), 6) for value in nulls[0].losses[:NULL_SHOWN]],
    }


def _losses(values: NDArray[np.float64], blocks: Blocks) -> NDArray[np.float64]:
    """The losses of random splits: how often each kind of block, by its labels and their sum, falls to the new side."""
    chance = np.random.default_rng(SEED)
    kinds = np.stack([np.bincount(blocks.of), np.round(np.bincount(blocks.of, values), DIGITS)], axis=1)
    new = np.zeros((SPLITS, 2))
    for stratum in np.unique(blocks.stratum):
        chosen = blocks.stratum == stratum
        each, counts = np.unique(kinds[chosen], axis=0, return_counts=True)
        count = int(blocks.new[chosen].sum())
        new += chance.multivariate_hypergeometric(counts, count, size=SPLITS, method="marginals") @ each
    count, right = kinds.sum(axis=0)
    return np.asarray((right - new[:, 1]) / (count - new[:, 0]) - new[:, 1] / new[:, 0], np.float64)


def _shares(values: NDArray[np.float64]) -> list[float]:
    counts = np.bincount(np.searchsorted(BINS, values, "left"), minlength=len(BINS))
    return [float(count) / len(values) for count in counts]
