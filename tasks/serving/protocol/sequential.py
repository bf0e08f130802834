"""One sequential test for everything that is counted of a new model: failures, slow first tokens, slow answers. Pure.

What is counted, and against which limit, is judge.py; the gateway's breaker uses the same test for failures. Standard library
only: the gateway loads this.

The test holds the share of requests beyond a limit against two numbers: more than `share` is bad, and a model is sound once it is
shown to have less than `worst`; until then nothing is known ("open"). Both answers are e-processes: ratios of the likelihood of
what was seen under a mixture of alternatives to that under the limit. So they may be looked at after every request: by Ville's
inequality the chance that one ever exceeds 1/alpha although its hypothesis is true is at most alpha (Ramdas et al.,
Game-theoretic statistics and safe anytime-valid inference, Statistical Science 38, 2023). Where the limit is a quantile of
`answers` other answers, the number beyond it has a Polya (beta-binomial) distribution, whatever the distribution of the
answers is, and that is the hypothesis: a limit that is known badly condemns nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, lgamma, log, log1p, pi
from typing import Literal

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
