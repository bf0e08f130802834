"""Whether a new model may get more traffic: what was seen of it against what was seen of the old one. No I/O.

Who asks, and what happens then, is tasks/serving/rollout.py; the statistics are below. The watch over weeks is
tasks/serving/monitor/anomalies.py. How often this is right is measured by benchmarks/operating_characteristics/canary.py. See
docs/rollout.md.

One sequential test serves everything that is counted of a new model: failures, slow first tokens, slow answers; the gateway's
breaker uses it for failures.

The test holds the share of requests beyond a limit against two numbers: more than `share` is bad, and a model is sound once it is
shown to have less than `worst`; until then nothing is known ("open"). Both answers are e-processes: ratios of the likelihood of
what was seen under a mixture of alternatives to that under the limit. So they may be looked at after every request: by Ville's
inequality the chance that one ever exceeds 1/alpha although its hypothesis is true is at most alpha (Ramdas et al.,
Game-theoretic statistics and safe anytime-valid inference, Statistical Science 38, 2023). Where the limit is a quantile of
`answers` other answers, the number beyond it has a Polya (beta-binomial) distribution, whatever the distribution of the
answers is, and that is the hypothesis: a limit that is known badly condemns nobody.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf, lgamma, log, log1p, pi
from typing import Any, Literal

from tasks.config.serving import RolloutConfig

WORSE = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 25.0)
"""Multiples of the share that the test looks for, and that nearly everything is beyond."""
BETTER = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Multiples of the share that sound models are expected to have."""
ALWAYS = 0.98
SMALLEST = 1e-6
"""Instead of a share of 0, with which one request beyond is certainty."""
Answer = Literal["bad", "sound", "open"]


@dataclass
class SequentialTest:
    """Whether requests are beyond a limit more often than `share`. State: the counts since the last time that it was sound.

    After each `sound` the counts begin anew, and the next round has a smaller part of the alpha (6 / (pi j)^2 of it in round j):
    a model that breaks after 10,000 good answers is found nearly as soon as one that breaks after 100.
    """

    share: float
    """At most 1; from there on nothing is bad."""
    worst: float
    """The share that is called sound with a chance of `missed` at most; `share` or more."""
    false_alarm: float
    """Chance at most that no more than `share` is called bad, however long it is looked at."""
    missed: float
    count: int = 0
    beyond: int = 0
    rounds: int = 0
    """Times that it was sound."""
    total: int = 0
    total_beyond: int = 0

    @property
    def sound(self) -> bool:
        """Whether `worst` was ever ruled out."""
        return self.rounds > 0 or self.share >= 1

    def add(self, count: int, beyond: int, *, answers: float = inf) -> Answer:
        """Count requests, of which some were beyond the limit; `answers` is how many answers the limit was estimated from."""
        self.count, self.beyond = self.count + count, self.beyond + beyond
        self.total, self.total_beyond = self.total + count, self.total_beyond + beyond
        if self.is_bad(answers=answers):
            return "bad"
        if self.count and self.share < 1 and self._rules_out_worst(answers):
            self.count = self.beyond = 0
            self.rounds += 1
        return "sound" if self.sound else "open"

    def is_bad(self, *, answers: float = inf, more: int = 0) -> bool:
        """Whether there are too many beyond the limit, if `more` of those under way are beyond it too. Changes nothing."""
        count, beyond = self.count + more, self.beyond + more
        if not beyond or self.share >= 1:
            return False
        share = max(self.share, SMALLEST)
        worse = [times * share for times in WORSE if times * share < ALWAYS] + [ALWAYS]
        evidence = _mixture(worse, count, beyond) - _null(share, count, beyond, answers)
        return evidence >= -log(self.false_alarm * 6 / (pi * (self.rounds + 1)) ** 2)

    def _rules_out_worst(self, answers: float) -> bool:
        """The farther out a quantile is, the less a number of answers says of it: so many fewer are counted."""
        better = [times * self.share for times in BETTER]
        known = answers * max(self.share, SMALLEST) / self.worst
        evidence = _mixture(better, self.count, self.beyond) - _null(self.worst, self.count, self.beyond, known)
        return evidence >= -log(self.missed)


def _mixture(shares: list[float], count: int, beyond: int) -> float:
    """Log-likelihood of a sequence under shares that are equally likely."""
    each = [_log_likelihood(share, count, beyond) for share in shares]
    most = max(each)
    return most + log(sum(exp(one - most) for one in each) / len(each)) if most > -inf else -inf


def _log_likelihood(share: float, count: int, beyond: int) -> float:
    if share <= 0:
        return 0.0 if not beyond else -inf
    return beyond * log(share) + (count - beyond) * log1p(-share)


def _null(share: float, count: int, beyond: int, answers: float) -> float:
    """Log-likelihood of a sequence with a known share, or one that `answers` answers say, which is a Polya urn."""
    if answers == inf:
        return _log_likelihood(share, count, beyond)
    a, b = share * (answers + 1), (1 - share) * (answers + 1)
    return _log_beta(a + beyond, b + count - beyond) - _log_beta(a, b)


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


FALSE_ALARM = 0.01
"""Chance at most that a model as good as the old one loses its traffic in a rollout; each test has a part of it."""
OF_ERRORS, OF_TIMES, OF_ANSWERS = 0.25 * FALSE_ALARM, 0.1 * FALSE_ALARM, 0.1 * FALSE_ALARM
"""Parts of it: of each of two tests of failures (callers' requests, our own), of each of four of times, of all measures."""
MISSED = 0.01
"""Chance at most that a model is promoted that fails twice as often as it may, or is slower in the middle than it may be."""
NOTICED = 0.01
"""With a limit of 0 for failures, the share that is told apart from none."""
QUANTILES = {"median": (0.5, 0.5), "95th percentile": (0.05, 0.15)}
"""Of times: the share of the old model's own answers that take longer, and the share of the new one's that is ruled out."""
FEWEST_OLD = 100
"""Answers of the old model from which limits are made; until there are so many, times are not judged."""
MOST_OLD = 2000
"""The newest of them that are kept."""
ALONE = 2.0
"""Width of the limits of times in a last step that only the new model answers: a machine may have become slow meanwhile."""
RENEWED = 20
"""Requests to the old model after which the limits are made anew."""
LATE = 2.0
"""A request under way is late once it waits this many times longer than each of FEWEST_OLD or more requests to the old model."""
FEWEST_REQUESTS = 20
"""Least evidence of a step for which no `step_requests` are set."""
OF_PROMPTS = ("length",)
"""Measures that depend on what is asked: compared with the old model's under the same traffic, never with a reference."""
Measures = Mapping[str, Sequence[float]]
Check = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What was seen of one model since the traffic was set last; of the old one, the time before as well."""

    requests: int = 0
    """Of callers, that were answered or failed by the model's own fault: mirrored ones too, the callers' mistakes (4xx) not."""
    failures: int = 0
    """5xx, broken connections, no answer in time. One that was replayed on the old model failed all the same."""
    first_token: Sequence[float] = ()
    """Seconds to the first token of each streamed answer, oldest first."""
    seconds_per_token: Sequence[float] = ()
    """Of each answer, oldest first: after the first token where it was streamed, of the whole answer otherwise."""
    waiting: Sequence[float] = ()
    """Seconds that each request under way has waited for its answer to begin."""
    longest_wait: float = 0.0
    """Seconds until the answer began, of the slowest request."""
    measures: Measures = field(default_factory=dict)
    """Measures of answers by name, as tasks/formats/answers.py names them; `length` is in tokens."""
    probes: int = 0
    """Requests of our own: their failures send the traffic back, their answers are no evidence for a step."""
    probe_failures: int = 0
    trip: str = ""
    """Why whoever carries the traffic has sent it back already; empty: it has not."""


@dataclass(frozen=True)
class Verdict:
    """`passed`: the next step; `wait` for more requests; `back`; `not judged`: its time is over, and evidence is missing."""

    outcome: Literal["passed", "wait", "back", "not judged"]
    checks: tuple[Check, ...] = ()
    """The limits that were passed, or the evidence that is missing: name, measured, limit."""


def error_test(limit: float) -> SequentialTest:
    """The test of failures against `max_error_share`, for the judge and for the gateway's breaker."""
    worst = max(2 * limit, NOTICED) if limit < 0.5 else (1 + limit) / 2
    return SequentialTest(limit, worst, OF_ERRORS, MISSED / 2)  # half of what is stated: the bound is reached nearly


def late(waiting: Iterable[float], *, longest: float, requests: int) -> int:
    """How many of the requests under way are late, by the longest wait of so many requests to the old model.

    Whatever the distribution of waits, a new request waits longer than each of n others with a chance of 1 in n + 1.
    """
    return sum(seconds > LATE * longest for seconds in waiting) if requests >= FEWEST_OLD and longest else 0


class Judge:
    """Judges a whole rollout, one step after the other. State: the evidence so far, which adds up over the steps."""

    def __init__(self, config: RolloutConfig, *, reference: Measures | None = None) -> None:
        """`reference` holds samples or quantiles of measures, from the model itself, where the old model has too few answers."""
        self._config, self._reference = config, reference or {}
        self._errors, self._probes = error_test(config.max_error_share), error_test(config.max_error_share)
        self._times = {
            "time to the first token": _Times(config.max_slowdown),
            "time a token": _Times(config.max_slowdown),
        }
        self._before = Seen()
        """Of the new model at the last look."""
        self._compared = 0
        """Answers of the new model when measures were compared last."""

    def begin_step(self) -> None:
        """From now on the new model's counts start at nothing again; what was counted stays."""
        self._before, self._compared = Seen(), 0
        for times in self._times.values():
            times.taken = 0

    def look(self, green: Seen, blue: Seen, *, waited: float, last: bool = False, times: bool | None = None) -> Verdict:
        """Judge the new model (green) after `waited` seconds of a step.

        `last`: it is in service afterwards. `times`: the step needs an answer about times, which the last one does by default; a
        last one that does not has had it in the step before. A breach is told at once, however long the step still has.
        """
        times = last if times is None else times
        slow = self._slow(green, blue, width=ALONE if last and not times else 1.0)
        broken = [
            *([_check("traffic", green.trip, "carried by the new model")] if green.trip else []),
            *self._failed(green, blue),
            *slow,
            *self._shifted(green, blue),
        ]
        self._before = green
        if broken:
            return Verdict("back", tuple(broken))
        config = self._config
        missing = self._missing(green, waited, last=last, times=times)
        over = waited >= config.step_seconds
        if not missing and (config.step_requests or over):
            return Verdict("passed")
        return Verdict("not judged", tuple(missing)) if over else Verdict("wait", tuple(missing))

    def _failed(self, green: Seen, blue: Seen) -> list[Check]:
        config, before, result = self._config, self._before, []
        limit = f"at most a share of {config.max_error_share:g}"
        ours = max(0, green.probes - before.probes), max(0, green.probe_failures - before.probe_failures)
        if self._probes.add(*ours) == "bad":
            measured = f"{self._probes.total_beyond} of {self._probes.total} requests of our own failed"
            result.append(_check("errors of our own requests", measured, limit))
        new = max(0, green.requests - before.requests), max(0, green.failures - before.failures)
        hang = late(green.waiting, longest=blue.longest_wait, requests=blue.requests)
        if self._errors.add(*new) == "bad" or self._errors.is_bad(more=hang):
            under_way = f", {hang} under way are late" if hang else ""
            measured = f"{self._errors.total_beyond} of {self._errors.total} requests failed{under_way}"
            result.append(_check("errors", measured, limit))
        return result

    def _slow(self, green: Seen, blue: Seen, *, width: float) -> list[Check]:
        first, pace = self._times.values()
        first.add(green.first_token, blue.first_token, asked=blue.requests, width=width)
        pace.add(green.seconds_per_token, blue.seconds_per_token, asked=blue.requests, width=width)
        return [check for name, times in self._times.items() for check in times.broken(name)]

    def _missing(self, green: Seen, waited: float, *, last: bool, times: bool) -> list[Check]:
        """The evidence that a step still needs: requests and time, and at the end an answer of each test."""
        config = self._config
        fewest, least = config.step_requests or FEWEST_REQUESTS, min(config.least_seconds, config.step_seconds)
        results = []
        if green.requests < fewest:
            results.append(_check("evidence", f"{green.requests} requests", f"at least {fewest} in the step"))
        if waited < least:
            results.append(_check("duration", f"{waited:.3g} s", f"at least {least:g} s"))
        if last and not self._errors.sound:
            measured = f"{self._errors.total_beyond} of {self._errors.total} requests failed"
            results.append(_check("errors", measured, f"a share under {self._errors.worst:g} for sure"))
        return results + [check for name, one in self._times.items() for check in one.missing(name) if times]

    def _shifted(self, green: Seen, blue: Seen) -> list[Check]:
        """Measures are compared at every twentieth more answers: each look is a chance for a false alarm."""
        if green.requests < 1.05 * self._compared or green.requests == self._before.requests:
            return []
        self._compared, result = green.requests, []
        for name, new in green.measures.items():
            old = blue.measures.get(name, ())
            if not self._comparable(new, old) and name not in OF_PROMPTS:
                old = self._reference.get(name, ())
            if not self._comparable(new, old):
                continue
            apart = distance(new, old)
            if apart > self._config.max_output_shift:
                limit = f"at most {self._config.max_output_shift:g}"
                result.append(_check(f"{name} of answers", f"{apart:.2f} apart", limit))
        return result

    def _comparable(self, new: Sequence[float], old: Sequence[float]) -> bool:
        """Whether two samples of the same answers are hardly ever so far apart, at any look of any step, for any measure.

        By 2 exp(-2 d^2 n), Massart's bound, n the harmonic sum of both, summed over all n that follow.
        """
        if not new or not old:
            return False
        squared = max(self._config.max_output_shift, 0.1) ** 2
        looks = 3 * (len(self._config.steps) + 1)
        enough = log(2 * looks / (OF_ANSWERS * (1 - exp(-2 * squared)))) / (2 * squared)
        return len(new) * len(old) / (len(new) + len(old)) >= enough


class _Times:
    """One kind of time: the tests at its quantiles, and the old model's answers that the limits are made from."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._tests = {
            name: SequentialTest(share, worst, OF_TIMES, MISSED) for name, (share, worst) in QUANTILES.items()
        }
        self._limits: dict[str, float] = {}
        self._width = 1.0
        self._known = 0
        """Answers of the old model that the limits are made from."""
        self._asked = 0
        """Requests that the old model had had then."""
        self._bad: set[str] = set()
        self._any = False
        self.taken = 0
        """How many of the new model's times of this step are counted."""

    def add(self, new: Sequence[float], old: Sequence[float], *, asked: int, width: float) -> None:
        """Count the new model's times that are new, by limits from the old model's answers up to now, of so many requests.

        Limits are taken `width` times.
        """
        self._any = self._any or bool(new)
        if len(new) <= self.taken:
            return
        enough = len(old) >= max(FEWEST_OLD, min(self._known, MOST_OLD // 2))
        if enough and not (self._known and 0 <= asked - self._asked < RENEWED):
            ordered = sorted(old[-MOST_OLD:])
            self._known, self._asked = len(ordered), asked
            for name, test in self._tests.items():
                # A new answer is longer than that one with a chance of `share`.
                place = min(self._known, ceil((1 - test.share) * (self._known + 1)))
                self._limits[name] = self._slowdown * ordered[place - 1]
        if not self._known:
            return
        fresh, self.taken, self._width = new[self.taken :], len(new), width
        for name, test in self._tests.items():
            beyond = sum(time > width * self._limits[name] for time in fresh)
            if test.add(len(fresh), beyond, answers=self._known) == "bad":
                self._bad.add(name)

    def broken(self, name: str) -> list[Check]:
        """The quantiles at which the new model is too slow."""
        return [
            _check(f"{quantile} of the {name}", *self._told(quantile))
            for quantile in self._tests
            if quantile in self._bad
        ]

    def missing(self, name: str) -> list[Check]:
        """The quantiles at which it is not known yet; none of what no answer says, such as first tokens without streams."""
        if self._any and not self._known:
            return [_check(f"the {name}", "no limit", f"at least {FEWEST_OLD} answers of the old model")]
        open_ = [quantile for quantile, test in self._tests.items() if self._any and not test.sound]
        return [_check(f"{quantile} of the {name}", *self._told(quantile, sure=True)) for quantile in open_]

    def _told(self, quantile: str, *, sure: bool = False) -> tuple[str, str]:
        test, limit = self._tests[quantile], self._width * self._limits.get(quantile, 0.0)
        share = f"a share under {test.worst:g} for sure" if sure else f"a share of {test.share:g}"
        return f"{test.total_beyond} of {test.total} answers over {limit * 1000:.3g} ms", share


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Greatest distance of two cumulative distributions (Kolmogorov-Smirnov), 0 to 1."""
    left, right = sorted(one), sorted(other)
    places = {*left, *right}
    return max(abs(bisect_right(left, x) / len(left) - bisect_right(right, x) / len(right)) for x in places)


def _check(name: str, measured: str, limit: str) -> Check:
    return {"name": name, "measured": measured, "limit": limit}
