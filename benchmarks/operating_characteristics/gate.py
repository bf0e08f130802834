"""How often the champion's gate lets through a model that is worse by the margin, and calls an equal one worse: the product's own
check, on made-up documents and seeds whose truth is known.

A model's true quality is its recipe's times the luck of its seed; documents differ in length, in how hard they are, and in how
well either model does on them. Without the noise in the settings the interval is of documents alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from benchmarks.operating_characteristics import Line
from tasks.config.evaluation import ComparisonConfig, EvaluationConfig
from tasks.evaluation.comparison import Side, gain_check, relative_check
from tasks.report.scaling import noise as estimated

SEED = 20
MARGIN = ComparisonConfig().max_loss_to_champion
CONFIG = EvaluationConfig(bootstrap_samples=1000)
DOCUMENTS = (5, 20, 200)
NOISES = (0.0, 0.01, 0.02)
SEEDS = (2, 3, 5, 10)
"""Trainings from which the noise of seeds is estimated."""
SUITE_METRIC, SUITE_MARGIN = "code.pass_share", 0.1
PROBLEMS = (20, 200, 1000)
PROMPTS = (20, 60, 200)
GAINS = (
    (0.0, 0.0, "passed: <= 2.5 %, failed: <= 2.5 %"),
    (-0.1, 0.0, "passed: <= 2.5 %"),
    (0.2, 0.0, "failed: <= 2.5 %"),
    (-0.1, -0.1, "passed: <= 2.5 %, failed: <= 2.5 %"),
    (0.0, -0.1, "failed: <= 2.5 %"),
)
"""True gains, what a rule asks for, and how often it may be wrong."""
OF_DOCUMENTS = 0.01
"""Relative standard deviation of the bits of a document, beside its truth, of either model."""


def verdicts(
    documents: int, noise: float, loss: float, *, known: bool, trials: int, seeds: int | None = None
) -> Counter[str]:
    """How often the check says passed, failed and insufficient of a recipe that is worse by `loss`.

    The noise is `known` exactly, not known, or with `seeds` what `headway seeds` says of so many other trainings of the recipe.
    """
    chance = np.random.default_rng([SEED, documents, round(noise * 1e4), round(loss * 1e4)])
    return Counter(_verdict(chance, documents, noise, loss, known=known, seeds=seeds) for _ in range(trials))


def _verdict(
    chance: np.random.Generator, documents: int, noise: float, loss: float, *, known: bool, seeds: int | None
) -> str:
    sizes = chance.lognormal(6.0, 0.8, documents).round() + 20
    bits = 2.0 * sizes * chance.normal(1.0, 0.15, documents).clip(0.5)
    mine = _side("candidate", sizes, bits * (1 + loss), chance, noise)
    theirs = _side("champion", sizes, bits, chance, noise)
    seed_noise = noise if known else None
    if seeds:
        seed_noise = estimated((2.0 * chance.normal(1.0, noise, seeds)).tolist(), confidence=CONFIG.confidence)
    return relative_check("bits_per_byte", MARGIN, mine, theirs, CONFIG, seed_noise=seed_noise).outcome


def _side(name: str, sizes: np.ndarray, bits: np.ndarray, chance: np.random.Generator, noise: float) -> Side:
    drawn = bits * chance.normal(1.0, noise) * chance.normal(1.0, OF_DOCUMENTS, len(bits))
    return Side(name, {}, {"bytes": sizes.tolist(), "model_bits": drawn.tolist()})


def suite_verdicts(problems: int, loss: float, trials: int) -> Counter[str]:
    """How often a suite's check says what, of a model that has `loss` fewer of the problems right than a champion with half.

    Problems differ in how hard they are: each is right with a chance of its own, the same for both models but for the loss.
    """
    chance = np.random.default_rng([SEED, problems, round(loss * 1e4)])
    found: Counter[str] = Counter()
    for _ in range(trials):
        easy = chance.beta(1.0, 1.0, problems)
        champion = _suite("champion", chance.random(problems) < easy)
        candidate = _suite("candidate", (chance.random(problems) < easy) & (chance.random(problems) >= loss / 0.5))
        found[relative_check(SUITE_METRIC, SUITE_MARGIN, candidate, champion, CONFIG).outcome] += 1
    return found


def gain_verdicts(problems: int, gain: float, least: float, trials: int) -> Counter[str]:
    """How often a rule's `min_gain` says what, of a model that has `gain` more of the problems right than one with half.

    Problems differ in how hard they are, as above; what a model gains are chances among those that it would have wrong, what it
    loses among those that it would have right.
    """
    chance = np.random.default_rng([SEED, problems, round(1e4 + gain * 1e4), round(1e4 + least * 1e4)])
    found: Counter[str] = Counter()
    for _ in range(trials):
        easy = chance.beta(1.0, 1.0, problems)
        theirs, mine, drawn = (chance.random(problems) for _ in range(3))
        right = (mine < easy) | (drawn < 2 * gain) if gain >= 0 else (mine < easy) & (drawn >= -2 * gain)
        sides = _suite("candidate", right), _suite("champion", theirs < easy)
        found[gain_check(SUITE_METRIC, least, *sides, CONFIG, other="champion").outcome] += 1
    return found


def _suite(name: str, right: np.ndarray) -> Side:
    told = {
        "metrics": {"pass_share": float(right.mean())},
        "problems": {"pass_share": "".join("01"[int(one)] for one in right)},
    }
    return Side(name, {"suites": {"code": {**told, "samples": len(right)}}}, {})


def rows(quick: bool) -> Iterator[Line]:
    """Recipes that are worse by the margin, then equal ones; with the noise known, not known, and estimated."""
    trials = 100 if quick else 2000
    for known in (True, False):
        for noise in NOISES if known else NOISES[1:]:
            for documents in DOCUMENTS:
                yield from _pair(documents, noise, known=known, trials=trials)
    for seeds in SEEDS:
        yield from _pair(200, 0.02, known=True, trials=trials, seeds=seeds)
    for problems in PROBLEMS:
        for truth, loss in (("equal", 0.0), ("ten points worse", 0.1)):
            found = suite_verdicts(problems, loss, trials)
            said = ", ".join(f"{name} {_share(found[name], trials)}" for name in ("passed", "failed", "insufficient"))
            stated = "called worse: <= 2.5 %" if not loss else "passed: <= 2.5 % where the margin is under the loss"
            yield Line("gate, suite", stated, said, f"{truth}, {problems} problems, half right", SEED, trials)
    for problems in PROMPTS:
        for gain, least, stated in GAINS:
            found = gain_verdicts(problems, gain, least, trials)
            said = ", ".join(f"{name} {_share(found[name], trials)}" for name in ("passed", "failed", "insufficient"))
            truth = f"gains {gain:+.0%}, min_gain {least:+.0%}, {problems} prompts, half right"
            yield Line("gate, prompts", stated, said, truth, SEED, trials)


def _pair(documents: int, noise: float, *, known: bool, trials: int, seeds: int | None = None) -> Iterator[Line]:
    how = f"estimated from {seeds} seeds" if seeds else "known" if known else "not known (as before)"
    where = f"{documents} documents, noise of seeds {noise:.0%}, {how}"
    stated = "<= 5 %, nominal 2.5 %" if known else "nothing"
    worse = verdicts(documents, noise, MARGIN, known=known, trials=trials, seeds=seeds)
    equal = verdicts(documents, noise, 0.0, known=known, trials=trials, seeds=seeds)
    yield Line(
        "gate",
        f"passed: {stated}",
        f"passed {_share(worse['passed'], trials)}",
        f"worse by the margin, {where}",
        SEED,
        trials,
    )
    yield Line(
        "gate",
        f"called worse: {stated}",
        f"called worse {_share(equal['failed'], trials)}, passed {_share(equal['passed'], trials)}, "
        f"insufficient {_share(equal['insufficient'], trials)}",
        f"equal, {where}",
        SEED,
        trials,
    )


def _share(found: int, of: int) -> str:
    return f"{found / of:.1%}"
