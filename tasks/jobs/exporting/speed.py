"""How fast an exported model is beside PyTorch: pairs of runs, one after the other, on the same prompt and threads.

The machine may be busy with other things, so a pair's two runs are next to each other, the order turns from pair to pair, and
what counts is the median of the pairs' ratios, with an interval that assumes nothing of their distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import comb
from statistics import median

FEWEST_PAIRS = 5
MOST_PAIRS = 15
DOUBT = 0.05
"""Of the interval of the median."""


@dataclass(frozen=True)
class Race:
    """Seconds a token of both sides, pair by pair."""

    onnx: tuple[float, ...]
    torch: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return sorted(ours / theirs for ours, theirs in zip(self.onnx, self.torch, strict=True))

    def told(self) -> dict[str, float]:
        """`slowdown`: time of ONNX Runtime over that of PyTorch for a token, and the ends of its interval; tokens a second."""
        ratios = self.ratios
        beyond = outside(len(ratios))
        return {
            "slowdown": median(ratios),
            "slowdown_low": ratios[beyond],
            "slowdown_high": ratios[-1 - beyond],
            "tokens_per_second_onnx": 1 / median(self.onnx),
            "tokens_per_second_torch": 1 / median(self.torch),
        }


def race(onnx: Callable[[], int], torch: Callable[[], int], *, seconds: float) -> Race:
    """Run both in turns for about so many seconds, but at least FEWEST_PAIRS times; each says how many tokens it made.

    The first run of each warms up, and is not counted.
    """
    sides = (onnx, torch)
    for side in sides:
        side()
    taken: tuple[list[float], list[float]] = ([], [])
    ends = time.monotonic() + seconds
    while len(taken[0]) < FEWEST_PAIRS or (len(taken[0]) < MOST_PAIRS and time.monotonic() < ends):
        first = len(taken[0]) % 2
        for turn in (first, 1 - first):
            taken[turn].append(_seconds_a_token(sides[turn]))
    return Race(tuple(taken[0]), tuple(taken[1]))


def outside(pairs: int) -> int:
    """How many of the sorted values lie below the interval of their median, and as many above (a sign test turned round)."""
    beyond = 0
    while 2 * sum(comb(pairs, below) for below in range(beyond + 2)) <= DOUBT * 2**pairs:
        beyond += 1
    return beyond


def _seconds_a_token(side: Callable[[], int]) -> float:
    began = time.perf_counter()
    tokens = side()
    return (time.perf_counter() - began) / max(tokens, 1)
