"""Whether what a training ran on was too small, too large or right, by what it used of it. Pure.

What is judged was measured while it trained (tasks/jobs/training/metrics_logger.py); what was not measured is None, and no guess
takes its place. Which division and how many machines would be best is search.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Advice = Literal["smaller", "larger", "keep", "unknown"]

FULL = 0.92
"""Of the memory: above it the next longer text or fragment ends in out of memory."""
HALF_FITS = 0.45
"""Of the memory: in half of it there would still be a tenth free."""
IDLE = 0.4
"""Busy share below which half as fast a device would nearly do."""
WAITS = 0.2
"""Share of a step that waits for data, from which on the data is the matter and not the machine."""
TALKS = 0.4
"""Share of a step that ranks spend communicating, from which on fewer machines waste less."""


@dataclass(frozen=True)
class Use:
    """What a training used, as shares of what was there. None was not measured."""

    device: Literal["gpu", "cpu"]
    memory: float | None = None
    """The most, of the device's memory: the GPU's, else the machine's."""
    busy: float | None = None
    """The mean of its counter of utilisation."""
    data: float | None = None
    """Of a step's time, waiting for data; so the next ones."""
    communication: float | None = None
    checkpoint: float | None = None
    mfu: float | None = None
    out_of_memory: int = 0
    """Times that it ran out of memory."""
    machines: float = 1.0


@dataclass(frozen=True)
class Judged:
    """The advice, and what says so."""

    advice: Advice
    reasons: tuple[str, ...]


def judge(use: Use) -> Judged:
    """What to do with the machines of the next such training."""
    if use.out_of_memory:
        times = f"{use.out_of_memory} time{'s' * (use.out_of_memory > 1)}"
        return Judged("larger", (f"it ran out of memory {times}: more memory, or a smaller micro batch",))
    if use.memory is not None and use.memory > FULL:
        return Judged(
            "larger", (f"{use.memory:.0%} of the {use.device}'s memory was in use: more than {FULL:.0%} is no room",)
        )
    if use.communication is not None and use.communication > TALKS and use.machines > 1:
        text = (
            f"{use.communication:.0%} of a step is communication on {use.machines:g} machines: fewer would waste less"
        )
        return Judged("smaller", (text,))
    missing = [name for name, value in (("its memory", use.memory), ("how busy it was", use.busy)) if value is None]
    if missing:
        return Judged("unknown", (f"not measured: {' and '.join(missing)} of the {use.device}", *_beside(use)))
    assert use.memory is not None and use.busy is not None
    text = f"at most {use.memory:.0%} of the {use.device}'s memory and {use.busy:.0%} of its time were used"
    if use.data is not None and use.data > WAITS:
        waits = f"{use.data:.0%} of a step waits for data: faster storage, a cache or more prefetching first"
        return Judged("keep", (waits, text))
    if use.memory <= HALF_FITS and use.busy < IDLE:
        return Judged("smaller", (f"{text}: half as much would do", *_beside(use)))
    return Judged("keep", (text, *_beside(use)))


def _beside(use: Use) -> tuple[str, ...]:
    """What else was measured; it decides nothing here."""
    known = (("MFU", use.mfu), ("waiting for data", use.data), ("communication", use.communication))
    entries = [f"{name} {value:.0%}" for name, value in known if value is not None]
    return (", ".join(entries),) if entries else ()
