"""Whether a new model may get more traffic: what was seen of it against what was seen of the old one. Pure.

Who asks, and what happens then, is rollout.py. The watch over weeks is tasks/service_outputs.py: it may wait for certainty. This
one has seconds, and a way back that costs nothing: it is strict. See docs/rollout.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.serving_config import RolloutConfig

QUIET_SECONDS = 5.0
"""After which a step is over that nobody asked anything in, of either model: there is nothing to judge by."""
FEWEST_FAILURES = 3
"""Failed requests that count as more than bad luck; below, a share says nothing."""
FEWEST_ANSWERS = 20
"""Answers of each side, below which neither times nor measures are compared: a 95th percentile of fewer is the slowest one."""
OF_PROMPTS = ("length",)
"""Measures that depend on what is asked: compared with the old model's under the same traffic, never with a reference."""
Measures = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Seen:
    """What was seen of one model since the traffic was set last; of the old one, the minutes before as well."""

    requests: int = 0
    """That were answered, or failed by the model's own fault: mirrored ones too, the callers' mistakes (4xx) not."""
    failures: int = 0
    """5xx, broken connections, no answer in time. One that was replayed on the old model failed all the same."""
    seconds_per_token: Sequence[float] = ()
    """Of each answer, waiting included."""
    measures: Measures = field(default_factory=dict)
    """Measures of answers by name, as tasks/formats/answers.py names them; `length` is in tokens."""
    trip: str = ""
    """Why whoever carries the traffic has sent it back already; empty: it has not."""


@dataclass(frozen=True)
class Verdict:
    """`go` to the next step, `wait` for more requests, or `back`."""

    said: Literal["go", "wait", "back"]
    checks: tuple[dict[str, Any], ...] = ()
    """The limits that were passed: name, measured, limit."""


def judge(
    green: Seen, blue: Seen, config: RolloutConfig, *, waited: float, reference: Measures | None = None
) -> Verdict:
    """Judge the new model (green) after `waited` seconds of a step.

    A breach is told at once, however long the step still has. `reference` holds samples or quantiles of measures, from the model
    itself: it stands in where the old model has too few answers.
    """
    broken = [check for check in (_tripped(green), _errors(green, config), _slow(green, blue, config)) if check]
    broken += _shifted(green, blue, config, reference or {})
    if broken:
        return Verdict("back", tuple(broken))
    enough = green.requests >= config.step_requests if config.step_requests else not config.step_seconds
    over = bool(config.step_seconds) and waited >= config.step_seconds
    quiet = waited >= QUIET_SECONDS and not green.requests and not blue.requests
    return Verdict("go" if enough or over or quiet else "wait")


def too_many_errors(requests: int, failures: int, limit: float) -> bool:
    """Whether failures are plain enough to send traffic back without a look at anything else."""
    return failures >= FEWEST_FAILURES and failures > limit * requests


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed. Needs one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Greatest distance of two cumulative distributions (Kolmogorov-Smirnov), 0 to 1."""
    left, right = sorted(one), sorted(other)
    places = {*left, *right}
    return max(abs(bisect_right(left, x) / len(left) - bisect_right(right, x) / len(right)) for x in places)


def _tripped(green: Seen) -> dict[str, Any] | None:
    return _check("traffic", green.trip, "carried by the new model") if green.trip else None


def _errors(green: Seen, config: RolloutConfig) -> dict[str, Any] | None:
    if not too_many_errors(green.requests, green.failures, config.max_error_share):
        return None
    measured = f"{green.failures} of {green.requests} requests failed"
    return _check("errors", measured, f"at most a share of {config.max_error_share:g}")


def _slow(green: Seen, blue: Seen, config: RolloutConfig) -> dict[str, Any] | None:
    """The median must agree with the 95th percentile: one stall of the machine is no slow model."""
    new, old = green.seconds_per_token, blue.seconds_per_token
    if min(len(new), len(old)) < FEWEST_ANSWERS:
        return None
    tail, limit = percentile(new, 0.95), config.max_slowdown * percentile(old, 0.95)
    if tail <= limit or percentile(new, 0.5) <= percentile(old, 0.5):
        return None
    return _check("p95 of the time a token", f"{tail * 1000:.2f} ms", f"at most {limit * 1000:.2f} ms")


def _shifted(green: Seen, blue: Seen, config: RolloutConfig, reference: Measures) -> list[dict[str, Any]]:
    found = []
    for name, new in green.measures.items():
        old = blue.measures.get(name, ())
        if len(old) < FEWEST_ANSWERS and name not in OF_PROMPTS:
            old = reference.get(name, ())
        if len(new) < FEWEST_ANSWERS or not old:
            continue
        apart = distance(new, old)
        if (len(old) >= FEWEST_ANSWERS or old is reference.get(name)) and apart > config.max_output_shift:
            found.append(_check(f"{name} of answers", f"{apart:.2f} apart", f"at most {config.max_output_shift:g}"))
    return found


def _check(name: str, measured: str, limit: str) -> dict[str, Any]:
    return {"name": name, "measured": measured, "limit": limit}
