"""A model against its champion on the same documents: sides, slices, losses with their intervals, and the checks of the gate.

What is missing, no number, or of too few documents is a failed check, never a passed one. What was measured is
tasks/jobs/evaluate.py; who asks is tasks/evaluate.py; how it looks is tasks/report/run_charts.py. See docs/evaluation.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.artifacts import Check
from tasks.config.evaluation import EvaluationConfig, GateRule
from tasks.evaluation import scores
from tasks.evaluation.performance import length_classes, plain
from tasks.evaluation.scores import Estimate, bits_per_byte, paired_difference, widened

# Which held-out documents make a slice: those of one source of a mixture, of one script, of one class of lengths.


COLUMNS = ("bytes", "tokens", "model_bits", "correct")
"""Of `documents.json`, what scores are sums of; bits of the model, tokens of its own tokenizer."""


@dataclass(frozen=True)
class Sums:
    """Documents as an evaluation scored them, columns of shape [documents]; what an older release did not write is None."""

    bytes: NDArray[np.float64]
    bits: NDArray[np.float64]
    tokens: NDArray[np.float64] | None
    correct: NDArray[np.float64] | None

    def part(self, chosen: NDArray[np.bool_]) -> Sums:
        """The chosen documents alone."""
        tokens = None if self.tokens is None else self.tokens[chosen]
        correct = None if self.correct is None else self.correct[chosen]
        return Sums(self.bytes[chosen], self.bits[chosen], tokens, correct)

    def __len__(self) -> int:
        return len(self.bytes)


def sums(documents: Mapping[str, Any]) -> Sums:
    """The columns of `documents.json`, or of one source in `sources.json`. Raises KeyError without bytes and bits."""
    columns = [documents.get(name) for name in COLUMNS]
    size, tokens, bits, correct = (None if column is None else np.asarray(column, np.float64) for column in columns)
    if size is None or bits is None:
        raise KeyError("bytes and model_bits")
    return Sums(size, bits, tokens, correct)


def masks(sizes: Sequence[float], kinds: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Slices of one corpus by name, each of shape [documents]: scripts where there are several, then classes of lengths."""
    lengths, scripts = np.asarray(sizes, np.float64), np.asarray(kinds)
    by_script = sorted(set(kinds)) if len(set(kinds)) > 1 else []
    result = {
        **{f"script {kind}": scripts == kind for kind in by_script},
        **{name: (lengths > low) & (lengths <= high) for name, low, high in length_classes(lengths)},
    }
    return {name: chosen for name, chosen in result.items() if chosen.any()}


def slices(documents: Mapping[str, Any], sources: Mapping[str, Any]) -> dict[str, Sums]:
    """Every slice of an evaluation by its name. `sources` is its `sources.json`, empty where the model learnt from one corpus."""
    whole = sums(documents)
    others = {f"source {name}": sums(each) for name, each in sources.get("others", {}).items()}
    return {
        **({f"source {sources['own']}": whole, **others} if others else {}),
        **{name: whole.part(chosen) for name, chosen in masks(documents["bytes"], documents.get("kinds", ())).items()},
    }


# One model as its evaluation tells it: a metric's value and what it rests on, the whole or a slice.


ALL = "all documents"
"""The name of the whole, beside those of slices."""
LOWER_IS_BETTER = frozenset({"bits_per_byte", "perplexity", "calibration_error"})
"""Of the metrics on held-out text; a suite says which of its own."""
PLACES = {"accuracy": ("accuracy", "estimate"), "gain_over_bigram": ("gain_over_bigram", "estimate")}
"""Where a metric stands in `evaluation.json`, when not under its own name."""
OF_THE_WHOLE = {**PLACES, "calibration_error": ("calibration", "error")}


@dataclass(frozen=True)
class Side:
    """The files of an evaluation, and whose it is."""

    ref: str
    """Reference of the checkpoint."""
    told: Mapping[str, Any]
    """`evaluation.json`."""
    documents: Mapping[str, Any]
    """`documents.json`."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """`sources.json`; empty where the model learnt from one corpus."""
    openings: Sequence[str] = ()
    """`openings.json`: how a few of the documents begin; empty where an earlier release measured."""

    @cached_property
    def parts(self) -> dict[str, Sums]:
        """The sums of the whole and of every slice. Raises KeyError when `documents.json` lacks what all need."""
        return {ALL: sums(self.documents), **slices(self.documents, self.sources)}

    @property
    def rows(self) -> dict[str, Mapping[str, Any]]:
        """The slices as `evaluation.json` tells them."""
        return {row["slice"]: row for row in self.told.get("slices", ())}

    def value(self, metric: str, slice: str = ALL) -> float | None:
        """What was measured; None where it was not. It may be no number."""
        suite, _, name = metric.rpartition(".")
        if suite:
            result = self._suite(suite).get("metrics", {}).get(name)
        else:
            whole = slice == ALL
            result = self.told if whole else self.rows.get(slice, {})
            for key in (OF_THE_WHOLE if whole else PLACES).get(metric, (metric,)):
                result = result.get(key) if isinstance(result, Mapping) else None
        return float(result) if isinstance(result, int | float) and not isinstance(result, bool) else None

    def count(self, metric: str, slice: str = ALL) -> int:
        """The documents or samples that a metric rests on; 0 where there is nothing."""
        suite, _, _ = metric.rpartition(".")
        if suite:
            return len(self.problems(metric)) or int(self._suite(suite).get("samples", 0))
        return int((self.told if slice == ALL else self.rows.get(slice, {})).get("documents", 0))

    def lower_is_better(self, metric: str) -> bool:
        suite, _, name = metric.rpartition(".")
        return name in self._suite(suite).get("lower_is_better", ()) if suite else metric in LOWER_IS_BETTER

    def given(self, metric: str) -> Any:
        """The sha256 of the files that a suite read, by file where it says so; None for what reads none."""
        suite, _, _ = metric.rpartition(".")
        return self._suite(suite).get("details", {}).get("sha256")

    def problems(self, metric: str) -> str:
        """1 or 0 for each problem of a suite, right or not; empty where the suite does not say, or has none."""
        suite, _, name = metric.rpartition(".")
        return str(self._suite(suite).get("problems", {}).get(name, "")) if suite else ""

    def why_not(self, metric: str) -> str:
        """Why a metric is missing, in words."""
        suite, _, _ = metric.rpartition(".")
        failed = self._suite(suite).get("failed", "") if suite else ""
        return f"missing: the suite {suite} {failed}" if failed else "missing"

    def _suite(self, name: str) -> Mapping[str, Any]:
        result: Mapping[str, Any] = self.told.get("suites", {}).get(name, {})
        return result


# The share by which a model is worse than the champion: with an interval where both were scored on the same documents.


PAIRED = ("bits_per_byte", "perplexity", "accuracy")
"""Metrics that are sums over documents, so that both models can be summed over the same drawn ones."""


class Incomparable(Exception):
    """There is no such share; the message says why."""


def loss(metric: str, mine: Side, theirs: Side, slice: str = ALL, *, drawn: Mapping[str, Any]) -> Estimate:
    """0 is as good as the champion, under 0 better. `drawn` are samples, confidence and seed. Raises Incomparable."""
    if metric in PAIRED:
        first, second = _part(mine, slice), _part(theirs, slice)
        result = _paired(metric, first, second, drawn)
    elif mine.problems(metric) or theirs.problems(metric):
        result = _by_problem(metric, mine, theirs, confidence=float(drawn["confidence"]))
    else:
        result = _unpaired(metric, mine, theirs, slice)
    if not all(map(math.isfinite, (result.estimate, result.low, result.high))):
        raise Incomparable("not a number")
    return result


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
        # Share by which a count is smaller. Nothing on the champion's side is no tie: nothing was shown.
        if not theirs.correct.sum():
            raise Incomparable("the champion has none right: a tie of nothing")
        with np.errstate(divide="ignore", invalid="ignore"):
            return scores.relative_gain(mine.correct, theirs.correct, **drawn)
    more = scores.ratio(mine.bits - theirs.bits, mine.tokens, **drawn)
    return Estimate(*(2.0**value - 1 for value in (more.estimate, more.low, more.high)))


@dataclass(frozen=True)
class Wins:
    """Of the problems that two models were given, those that one alone has right; and the share won less the share lost."""

    won: int
    lost: int
    problems: int
    gain: Estimate
    """One end lies on the other side of 0 than the estimate, or at it, unless McNemar's exact test tells the models apart."""

    def __str__(self) -> str:
        return f"{self.won} won and {self.lost} lost of {self.problems}"


def wins(metric: str, mine: Side, theirs: Side, *, confidence: float) -> Wins:
    """The same problems by two models: Tango's score interval, and the exact test by the binomial distribution.

    At 95 % it takes six problems that one side alone has right. Raises Incomparable.
    """
    first, second = mine.problems(metric), theirs.problems(metric)
    if not (first and second):
        raise Incomparable("not told problem by problem on one side")
    if mine.given(metric) != theirs.given(metric) or len(first) != len(second):
        raise Incomparable("not measured on the same files")
    pairs = list(zip(first, second, strict=True))
    lost, won = pairs.count(("0", "1")), pairs.count(("1", "0"))
    result = paired_difference(won, lost, len(pairs), confidence=confidence)
    low = result.low if _told_apart(won, lost, confidence) else min(result.low, 0.0)
    high = result.high if _told_apart(lost, won, confidence) else max(result.high, 0.0)
    return Wins(won, lost, len(pairs), Estimate(result.estimate, low, high))


def _told_apart(more: int, fewer: int, confidence: float) -> bool:
    """Whether so many one way and so few the other come about by chance rarely enough (McNemar's test, one side of it)."""
    differ = more + fewer
    chance: float = sum(math.comb(differ, count) for count in range(more, differ + 1)) / 2**differ
    return chance <= (1 - confidence) / 2


def _by_problem(metric: str, mine: Side, theirs: Side, *, confidence: float) -> Estimate:
    """On the same problems, as a share of the champion's right ones."""
    gain = wins(metric, mine, theirs, confidence=confidence).gain
    right = theirs.problems(metric)
    if "1" not in right:
        raise Incomparable("the champion has 0: a share of it says nothing")
    share = right.count("1") / len(right)
    return Estimate(-gain.estimate / share, -gain.high / share, -gain.low / share)


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


# Champion and challenger by slice, as JSON: what the terminal, the report, MLflow and Prefect show of the comparison.


SCHEMA = "headway/comparison/1"


def against(mine: Side, theirs: Side, config: EvaluationConfig) -> dict[str, Any]:
    """Both models on the same documents. Losses are shares: over 0 this model is worse than the champion.

    Intervals are each by itself at `evaluation.confidence`: among many slices some lie apart by chance.
    """
    rows = [_row(name, mine, theirs, config) for name in (ALL, *mine.rows)]
    suites = [
        {
            "metric": f"{suite}.{name}",
            "candidate": value,
            "champion": theirs.value(f"{suite}.{name}"),
            "samples": mine.count(f"{suite}.{name}"),
            **_wins(f"{suite}.{name}", mine, theirs, config),
        }
        for suite, entry in mine.told.get("suites", {}).items()
        for name, value in entry["metrics"].items()
    ]
    return {
        "schema": SCHEMA,
        "candidate": mine.ref,
        "champion": theirs.ref,
        "confidence": config.confidence,
        "rows": rows,
        "suites": suites,
    }


def in_words(payload: Mapping[str, Any]) -> str:
    """The comparison in a line: the whole, and the slice that this model does worst on."""
    whole, *others = payload["rows"]
    judged = [row for row in others if row["loss"]]
    text = f"against the champion {_loss(whole, payload)}"
    if judged:
        worst = max(judged, key=lambda row: float(row["loss"]["estimate"]))
        text += f"; worst slice {worst['slice']} {_loss(worst, payload)}"
    for row in payload["suites"]:
        if row["metric"].startswith("prompts.") and "gain" in row:
            text += f"; {row['metric']} {row['won']} won and {row['lost']} lost of {row['samples']}"
    return text


def _loss(row: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    if not (result := row["loss"]):
        return "not comparable"
    word = "more" if result["estimate"] > 0 else "fewer"
    interval = f"{result['low']:+.1%} to {result['high']:+.1%}"
    return f"{abs(result['estimate']):.1%} {word} bits ({payload['confidence']:.0%} interval {interval})"


def _row(name: str, mine: Side, theirs: Side, config: EvaluationConfig) -> dict[str, Any]:
    enough = mine.count("bits_per_byte", name) >= config.min_slice_documents or name == ALL
    return {
        "slice": name,
        "status": "measured" if enough else "insufficient",
        "documents": mine.count("bits_per_byte", name),
        "candidate": _bits_per_byte(mine, name),
        "champion": _bits_per_byte(theirs, name),
        "loss": _estimate("bits_per_byte", mine, theirs, name, config) if enough else None,
        "candidate_accuracy": mine.value("accuracy", name),
        "champion_accuracy": theirs.value("accuracy", name),
        "accuracy_loss": _estimate("accuracy", mine, theirs, name, config) if enough else None,
    }


def _estimate(metric: str, mine: Side, theirs: Side, name: str, config: EvaluationConfig) -> dict[str, float] | None:
    try:
        return plain(loss(metric, mine, theirs, name, drawn=sampling(config)))
    except Incomparable:
        return None


def _bits_per_byte(side: Side, name: str) -> float | None:
    try:
        part = side.parts[name]
        return bits_per_byte(part.bits, part.bytes)
    except (KeyError, ValueError):  # not there, or no numbers: the checks say so
        return None


def _wins(metric: str, mine: Side, theirs: Side, config: EvaluationConfig) -> dict[str, Any]:
    try:
        result = wins(metric, mine, theirs, confidence=config.confidence)
    except Incomparable:
        return {}
    return {"won": result.won, "lost": result.lost, "gain": plain(result.gain)}


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
    results: list[Check] = []
    for pattern in rule.slices:
        results += _by_pattern(rule, pattern, mine, theirs, config, seed_noise)
    return tuple(results)


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
    other: str = "champion",
) -> Check:
    """The non-inferiority of a model: the high end of the interval of its relative loss must not lie over the margin.

    Of bits per byte the interval is widened by the noise of seeds, where it is known. What has not passed is worse when the low
    end lies over 0 (over the margin, where that is less); otherwise there was too little to judge by, which closes the gate too.
    """
    what = f"relative loss to the {other}" if metric == "bits_per_byte" else f"relative loss of {metric} to the {other}"
    by_problem = bool(mine.problems(metric) or theirs.problems(metric))
    paired = metric in PAIRED or by_problem
    interval = f", high end of the {config.confidence:.0%} interval" if paired else ""
    of = "" if slice == ALL else f" of the slice {slice}"
    limit = f"<= {margin:.4g}"
    try:
        result = loss(metric, mine, theirs, slice, drawn=sampling(config))
    except Incomparable as why:
        again = f"{metric} cannot be compared with the {other}'s ({why}). Measure both again: `headway retrain --from evaluate`."
        return Check(name=f"{what}{of}{interval}", measured=str(why), limit=limit, passed=False, remedy=again)
    if metric == "bits_per_byte":
        remedy = f"{remedy} {_of_seeds(seed_noise, config)}".strip()
        result = widened(result, seed_noise, confidence=config.confidence) if seed_noise else result
    passed = result.high <= margin
    insufficient = not passed and paired and result.low <= min(margin, 0.0)
    if insufficient:
        remedy = (
            f"Not enough to judge: the loss lies between {result.low:+.1%} and {result.high:+.1%}. "
            f"{MORE_PROBLEMS if by_problem else MORE_TEXT} {remedy}"
        )
    return Check(
        name=f"{what}{of}{interval}",
        measured=result.high,
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
        output = mine.why_not(rule.metric) if value is None else "not a number"
        known = f" Slices: {', '.join(mine.rows)}." if slice not in (ALL, *mine.rows) else ""
        remedy = f"Nothing says what {rule.metric} is: correct comparison.rules, or what measures it.{known}"
        yield Check(name=_name(rule, slice), measured=output, limit="a number", passed=False, remedy=remedy)
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
            rule.metric,
            margin,
            mine,
            theirs,
            config,
            slice=slice,
            seed_noise=seed_noise,
            remedy=remedy,
            other=rule.against,
        )
    if rule.min_gain is not None and theirs is not None:
        yield gain_check(rule.metric, rule.min_gain, mine, theirs, config, other=rule.against, remedy=remedy)


def gain_check(
    metric: str, least: float, mine: Side, theirs: Side, config: EvaluationConfig, *, other: str, remedy: str = ""
) -> Check:
    """The gain over another model: the low end of the interval of problems won less problems lost must lie over `least`.

    What has not passed is too small a gain when the high end lies under `least` too; otherwise there was too little to judge by.
    """
    name = f"gain of {metric} over the {other}, low end of the {config.confidence:.0%} interval"
    limit = f"> {least:.4g}"
    try:
        result = wins(metric, mine, theirs, confidence=config.confidence)
    except Incomparable as why:
        again = f"{metric} cannot be compared with the {other}'s ({why}). Measure both again: `headway retrain --from evaluate`."
        return Check(name=name, measured=str(why), limit=limit, passed=False, remedy=again)
    gain, passed = result.gain, result.gain.low > least
    insufficient = not passed and gain.high >= least
    figures = f"{result}: the gain lies between {gain.low:+.1%} and {gain.high:+.1%}."
    remedy = f"Not enough to judge: {figures} {MORE_PROBLEMS} {remedy}" if insufficient else f"{figures} {remedy}"
    return Check(
        name=name,
        measured=gain.low,
        limit=limit,
        passed=passed,
        insufficient=insufficient,
        count=result.problems,
        remedy=remedy,
    )


def _too_few(rule: GateRule, slice: str, count: int, fewest: int, *, passed: bool) -> Check:
    what, more = "documents", "give more held-out text"
    if "." in rule.metric:
        what, more = "samples", "raise evaluation.probe_samples, or give the suite more tasks or prompts"
    return Check(
        name=_name(rule, slice),
        measured=f"{count} {what}",
        limit=f">= {fewest} {what}",
        passed=passed,
        warned=passed,
        insufficient=not passed,
        count=count,
        remedy=f"Too few {what} to judge by: {more}, or lower min_documents of the rule.",
    )


def _fewest(rule: GateRule, slice: str, config: EvaluationConfig) -> int:
    if rule.min_documents:
        return rule.min_documents
    return config.min_documents if slice == ALL else config.min_slice_documents


def _name(rule: GateRule, slice: str) -> str:
    return rule.metric if slice == ALL else f"{rule.metric} of the slice {slice}"
