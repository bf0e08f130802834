"""The share by which a model is worse than the champion: with an interval where both were scored on the same documents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.evaluation import scores
from tasks.evaluation.comparison_sides import ALL, Side
from tasks.evaluation.comparison_slices import Sums
from tasks.evaluation.scores import Estimate, paired_difference

PAIRED = ("bits_per_byte", "perplexity", "accuracy")
"""Metrics that are sums over documents, so that both models can be summed over the same drawn ones."""


class Incomparable(Exception):
    """There is no such share; the message says why."""


def loss(metric: str, mine: Side, theirs: Side, slice: str = ALL, *, drawn: Mapping[str, Any]) -> Estimate:
    """0 is as good as the champion, under 0 better. `drawn` are samples, confidence and seed. Raises Incomparable."""
    if metric in PAIRED:
        first, second = _part(mine, slice), _part(theirs, slice)
        found = _paired(metric, first, second, drawn)
    elif mine.problems(metric) or theirs.problems(metric):
        found = _by_problem(metric, mine, theirs, confidence=float(drawn["confidence"]))
    else:
        found = _unpaired(metric, mine, theirs, slice)
    if not all(map(math.isfinite, (found.estimate, found.low, found.high))):
        raise Incomparable("not a number")
    return found


def _paired(metric: str, mine: Sums, theirs: Sums, drawn: Mapping[str, Any]) -> Estimate:
    if len(mine) != len(theirs) or not np.array_equal(mine.bytes, theirs.bytes):
        raise Incomparable("not measured on the same documents")
    if not (np.isfinite(mine.bits).all() and np.isfinite(theirs.bits).all()):
        raise Incomparable("not a number")
    if metric == "bits_per_byte":
        if not theirs.bits.sum() > 0:
            raise Incomparable("the champion has no bits")
        return scores.relative_loss(mine.bits, theirs.bits, **drawn)
    if mine.tokens is None or theirs.tokens is None or mine.correct is None or theirs.correct is None:
        raise Incomparable("missing")
    if not np.array_equal(mine.tokens, theirs.tokens):
        raise Incomparable("the tokenizers differ, so only bits_per_byte can be compared")
    if metric == "accuracy":
        return _less(mine.correct, theirs.correct, drawn)
    more = scores.ratio(mine.bits - theirs.bits, mine.tokens, **drawn)
    return Estimate(*(2.0**value - 1 for value in (more.estimate, more.low, more.high)))


def _less(mine: Any, theirs: Any, drawn: Mapping[str, Any]) -> Estimate:
    """Share by which a count is smaller. Nothing on the champion's side is no tie: nothing was shown."""
    if not theirs.sum():
        raise Incomparable("the champion has none right: a tie of nothing")
    with np.errstate(divide="ignore", invalid="ignore"):
        return scores.relative_gain(mine, theirs, **drawn)


def _by_problem(metric: str, mine: Side, theirs: Side, *, confidence: float) -> Estimate:
    """On the same problems, as a share of the champion's right ones; the low end is over 0 only where McNemar's test says so.

    That is the exact test, by the binomial distribution: at 95 % it takes six problems that one side alone has right.
    """
    first, second = mine.problems(metric), theirs.problems(metric)
    if not (first and second):
        raise Incomparable("not told problem by problem on one side")
    if mine.given(metric) != theirs.given(metric) or len(first) != len(second):
        raise Incomparable("not measured on the same files")
    if "1" not in second:
        raise Incomparable("the champion has 0: a share of it says nothing")
    pairs = list(zip(first, second, strict=True))
    lost, won = pairs.count(("0", "1")), pairs.count(("1", "0"))
    found = paired_difference(lost, won, len(pairs), confidence=confidence)
    differ = lost + won
    chance = sum(math.comb(differ, count) for count in range(lost, differ + 1)) / 2**differ
    low = found.low if chance <= (1 - confidence) / 2 else min(found.low, 0.0)
    share = second.count("1") / len(pairs)
    return Estimate(found.estimate / share, low / share, found.high / share)


def _unpaired(metric: str, mine: Side, theirs: Side, slice: str) -> Estimate:
    """By the two values alone: there is no interval, all three are the same."""
    first, second = mine.value(metric, slice), theirs.value(metric, slice)
    if first is None or second is None:
        raise Incomparable("missing on the champion's side" if first is not None else "missing")
    if not (math.isfinite(first) and math.isfinite(second)):
        raise Incomparable("not a number")
    if mine.given(metric) != theirs.given(metric):
        raise Incomparable("not measured on the same files")
    if mine.lower_is_better(metric):
        share = 0.0 if first == second == 0 else math.inf if second <= 0 else first / second - 1
    elif second <= 0:
        raise Incomparable(f"the champion has {second:g}: a share of it says nothing")
    else:
        share = 1 - first / second
    if math.isinf(share):
        raise Incomparable(f"the champion has 0, this model {first:g}")
    return Estimate(share, share, share)


def _part(side: Side, slice: str) -> Sums:
    try:
        return side.parts[slice]
    except KeyError as error:
        raise Incomparable(f"missing: {error.args[0]}") from None
