"""The rules of the gate as checks. What is missing, no number, or of too few documents is a failed check, never a passed one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from tasks.artifacts import Check
from tasks.config.evaluation import EvaluationConfig, GateRule
from tasks.evaluation.comparison_losses import PAIRED, Incomparable, loss
from tasks.evaluation.comparison_sides import ALL, Side
from tasks.evaluation.scores import Estimate, widened

WILD = frozenset("*?[")
MORE_TEXT = "More held-out text (evaluation.max_bytes, preprocessing.heldout_fraction) narrows what is of documents."
MORE_PROBLEMS = "Give the suite more problems: docs/evaluation.md says how many a margin takes."


def rule_checks(
    rule: GateRule, mine: Side, theirs: Side | None, config: EvaluationConfig, *, seed_noise: float | None = None
) -> tuple[Check, ...]:
    """What a rule asks of a model. `theirs` is None without a champion, and when the champion is this very checkpoint.

    A slice that is named must be there with documents enough. Of those that a pattern finds, the ones with too few are told, and
    at least one must be left to judge.
    """
    if not rule.slices:
        return tuple(_judged(rule, ALL, mine, theirs, config, seed_noise))
    found: list[Check] = []
    for pattern in rule.slices:
        found += _by_pattern(rule, pattern, mine, theirs, config, seed_noise)
    return tuple(found)


def sampling(config: EvaluationConfig) -> dict[str, Any]:
    """How documents are drawn again."""
    return {"samples": config.bootstrap_samples, "confidence": config.confidence, "seed": config.seed}


def relative_check(
    metric: str,
    margin: float,
    mine: Side,
    theirs: Side,
    config: EvaluationConfig,
    *,
    slice: str = ALL,
    seed_noise: float | None = None,
    remedy: str = "",
) -> Check:
    """The non-inferiority of a model: the high end of the interval of its relative loss must not lie over the margin.

    Of bits per byte the interval is widened by the noise of seeds, where it is known. What has not passed is worse when the low
    end lies over 0 (over the margin, where that is less); otherwise there was too little to judge by, which closes the gate too.
    """
    what = (
        "relative loss to the champion" if metric == "bits_per_byte" else f"relative loss of {metric} to the champion"
    )
    by_problem = bool(mine.problems(metric) or theirs.problems(metric))
    paired = metric in PAIRED or by_problem
    interval = f", high end of the {config.confidence:.0%} interval" if paired else ""
    of = "" if slice == ALL else f" of the slice {slice}"
    limit = f"<= {margin:.4g}"
    try:
        found = loss(metric, mine, theirs, slice, drawn=sampling(config))
    except Incomparable as why:
        again = f"{metric} cannot be compared with the champion's ({why}). Measure both again: `headway retrain --from evaluate`."
        return Check(name=f"{what}{of}{interval}", measured=str(why), limit=limit, passed=False, remedy=again)
    if metric == "bits_per_byte":
        remedy = f"{remedy} {_of_seeds(seed_noise, config)}".strip()
        found = widened(found, seed_noise, confidence=config.confidence) if seed_noise else found
    passed = found.high <= margin
    insufficient = not passed and paired and found.low <= min(margin, 0.0)
    if insufficient:
        remedy = (
            f"Not enough to judge: the loss lies between {found.low:+.1%} and {found.high:+.1%}. "
            f"{MORE_PROBLEMS if by_problem else MORE_TEXT} {remedy}"
        )
    return Check(
        name=f"{what}{of}{interval}",
        measured=found.high,
        limit=limit,
        passed=passed,
        insufficient=insufficient,
        remedy=remedy,
    )


def _of_seeds(noise: float | None, config: EvaluationConfig) -> str:
    """What the interval says of other seeds of training."""
    if noise is None:
        return (
            "The noise of seeds is not known, so the interval is of documents alone: train the recipe with two or more other "
            "seeds, and set comparison.seed_noise to what `headway seeds` says."
        )
    of_equals = widened(Estimate(0.0, 0.0, 0.0), noise, confidence=config.confidence).high
    return f"By seeds alone (comparison.seed_noise {noise:.2%}) models of one recipe lie up to {of_equals:.1%} apart."


def _by_pattern(
    rule: GateRule, pattern: str, mine: Side, theirs: Side | None, config: EvaluationConfig, seed_noise: float | None
) -> Iterator[Check]:
    if not WILD & set(pattern):
        yield from _judged(rule, pattern, mine, theirs, config, seed_noise)
        return
    names = [name for name in mine.rows if fnmatchcase(name, pattern)]
    fewest = _fewest(rule, ALL if not names else names[0], config)
    enough = [name for name in names if mine.count(rule.metric, name) >= fewest]
    for name in names:
        if name in enough:
            yield from _judged(rule, name, mine, theirs, config, seed_noise)
        else:
            yield _too_few(rule, name, mine.count(rule.metric, name), fewest, passed=True)
    if not enough:
        known = ", ".join(mine.rows) or "none"
        yield Check(
            name=f"{rule.metric} of the slices {pattern}",
            measured="no slice with enough documents" if names else "no such slice",
            limit=f"a slice of {fewest} documents",
            passed=False,
            remedy=f"Name slices that there are in comparison.rules: {known}. More held-out text makes them larger: "
            "evaluation.max_bytes, preprocessing.heldout_fraction.",
        )


def _judged(
    rule: GateRule, slice: str, mine: Side, theirs: Side | None, config: EvaluationConfig, seed_noise: float | None
) -> Iterator[Check]:
    """The limits of a rule on the whole or on one slice; one failed check when there is nothing to hold to them."""
    value, count = mine.value(rule.metric, slice), mine.count(rule.metric, slice)
    fewest = _fewest(rule, slice, config)
    if value is None or not math.isfinite(value):
        said = mine.why_not(rule.metric) if value is None else "not a number"
        known = f" Slices: {', '.join(mine.rows)}." if slice not in (ALL, *mine.rows) else ""
        remedy = f"Nothing says what {rule.metric} is: correct comparison.rules, or what measures it.{known}"
        yield Check(name=_name(rule, slice), measured=said, limit="a number", passed=False, remedy=remedy)
        return
    if count < fewest:
        yield _too_few(rule, slice, count, fewest, passed=False)
        return
    remedy = "The champion stays; comparison.rules has the limit. Train longer or on better data, or change it."
    if rule.at_least is not None:
        passed, limit = value >= rule.at_least, f">= {rule.at_least:.4g}"
        yield Check(name=_name(rule, slice), measured=value, limit=limit, passed=passed, remedy=remedy)
    if rule.at_most is not None:
        passed, limit = value <= rule.at_most, f"<= {rule.at_most:.4g}"
        yield Check(name=_name(rule, slice), measured=value, limit=limit, passed=passed, remedy=remedy)
    if rule.max_loss_to_champion is not None and theirs is not None:
        margin = rule.max_loss_to_champion
        yield relative_check(
            rule.metric, margin, mine, theirs, config, slice=slice, seed_noise=seed_noise, remedy=remedy
        )


def _too_few(rule: GateRule, slice: str, count: int, fewest: int, *, passed: bool) -> Check:
    what, more = "documents", "give more held-out text"
    if "." in rule.metric:
        what, more = "samples", "raise evaluation.probe_samples, or give the suite more tasks"
    return Check(
        name=_name(rule, slice),
        measured=f"{count} {what}",
        limit=f">= {fewest} {what}",
        passed=passed,
        warned=passed,
        count=count,
        remedy=f"Too few {what} to judge by: {more}, or lower min_documents of the rule.",
    )


def _fewest(rule: GateRule, slice: str, config: EvaluationConfig) -> int:
    if rule.min_documents:
        return rule.min_documents
    return config.min_documents if slice == ALL else config.min_slice_documents


def _name(rule: GateRule, slice: str) -> str:
    return rule.metric if slice == ALL else f"{rule.metric} of the slice {slice}"
