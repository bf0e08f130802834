"""How often to save: the interval that loses least to saving and to failures together.

Pure; all times in seconds. What a save costs is measured or estimated by the caller; how checkpoints are written is in
tasks/jobs/checkpoint.py. See docs/planning.md.
"""

from __future__ import annotations

import math

MIN_CHECKPOINTS = 10
"""A run is saved at least this often, however rare failures are: people stop runs too."""

WRITER_SHARE = 2.0
"""An interval is at least so many times as long as writing takes."""


def young_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """T = sqrt(2 C M) (Young 1974): first-order optimum of the computing time between two saves."""
    _require_positive(save_seconds, mean_seconds_between_failures)
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

    Not so often that the writer, which takes processors and the disk from training, is at work for more than half of the time.
    """
    found = checkpoint_every_steps(
        steps, step_seconds, save_seconds=stall_seconds, mean_seconds_between_failures=mean_seconds_between_failures
    )
    return min(max(found, math.ceil(WRITER_SHARE * write_seconds / step_seconds)), max(1, steps))


def _require_positive(save_seconds: float, mean_seconds_between_failures: float) -> None:
    if save_seconds <= 0 or mean_seconds_between_failures <= 0:
        raise ValueError(
            f"a save of {save_seconds} s and {mean_seconds_between_failures} s between failures: both must be above 0"
        )
