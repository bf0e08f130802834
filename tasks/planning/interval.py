"""How often to save: the interval that loses least to saving and to failures together.

Pure; all times in seconds. What a save costs is measured or estimated by the caller; how checkpoints are written is in
tasks/jobs/checkpoint/snapshot.py. See docs/planning.md.
"""

from __future__ import annotations

import math

MIN_CHECKPOINTS = 10
"""A run is saved at least this often, however rare failures are: people stop runs too."""

WRITER_SHARE = 2.0
"""So many times as long as writing takes an interval is where that costs hardly anything: the writer takes processors, memory and
disk from training (two cores: a step of 4.9 ms took 9.5 ms while a save was written)."""
WORTH = 0.005
"""Share of useful time that shorter intervals must bring for the writer to be at work for more than half of the time."""


def young_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """T = sqrt(2 C M) (Young 1974): first-order optimum of the computing time between two saves."""
    if save_seconds <= 0 or mean_seconds_between_failures <= 0:
        raise ValueError(
            f"a save of {save_seconds} s and {mean_seconds_between_failures} s between failures: both must be above 0"
        )
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def daly_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Daly 2006, equation 37: Young's with two further terms; holds where saving is not small against M.

    T = sqrt(2 C M) [1 + sqrt(C / 2M) / 3 + (C / 2M) / 9] - C for C < 2M, else T = M.
    """
    young = young_interval(save_seconds, mean_seconds_between_failures)
    share = save_seconds / (2 * mean_seconds_between_failures)
    if share >= 1:
        return mean_seconds_between_failures
    return young * (1 + math.sqrt(share) / 3 + share / 9) - save_seconds


def useful_share(interval_seconds: float, save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Share of useful time where failures are exponential, and recovery and writing beside training cost nothing.

    T / M / (e^((T + C) / M) - 1), Daly 2006, equation 20, without its restart: that multiplies it (checkpointing.py).
    """
    cycle = (interval_seconds + save_seconds) / mean_seconds_between_failures
    return interval_seconds / mean_seconds_between_failures * math.exp(-cycle) / -math.expm1(-cycle)


def with_time_to_write(
    interval_seconds: float, *, save_seconds: float, write_seconds: float, mean_seconds_between_failures: float
) -> float:
    """The interval that is wanted, made as long as the writer needs.

    Never shorter than a write, for one checkpoint is written at a time; and WRITER_SHARE times as long, unless that costs more
    than WORTH of the time.
    """
    shortest, spared = max(interval_seconds, write_seconds), max(interval_seconds, WRITER_SHARE * write_seconds)
    if spared == shortest:
        return shortest
    lost = useful_share(shortest, save_seconds, mean_seconds_between_failures) - useful_share(
        spared, save_seconds, mean_seconds_between_failures
    )
    return spared if lost <= WORTH else shortest


def checkpoint_every_steps(
    steps: int, step_seconds: float, *, save_seconds: float, mean_seconds_between_failures: float
) -> int:
    """Steps between checkpoints by Daly's interval; at least 1, and at most a tenth of the run where it has ten steps.

    `save_seconds` is the time that training stands still for one save.
    """
    wanted = round(daly_interval(save_seconds, mean_seconds_between_failures) / step_seconds)
    return max(1, min(wanted, steps // MIN_CHECKPOINTS))


def corrected_every_steps(
    steps: int,
    step_seconds: float,
    *,
    stall_seconds: float,
    write_seconds: float,
    mean_seconds_between_failures: float,
) -> int:
    """`checkpoint_every_steps` by what was measured: the time that training stood still, and the time until it was committed.

    Not oftener than `with_time_to_write` lets.
    """
    result = checkpoint_every_steps(
        steps, step_seconds, save_seconds=stall_seconds, mean_seconds_between_failures=mean_seconds_between_failures
    )
    seconds = with_time_to_write(
        result * step_seconds,
        save_seconds=stall_seconds,
        write_seconds=write_seconds,
        mean_seconds_between_failures=mean_seconds_between_failures,
    )
    return min(max(result, math.ceil(seconds / step_seconds)), max(1, steps))
