"""What an endpoint answered lately, against what it answered before: whether it is an anomaly, and what moved.

Only measures are compared (tasks/formats/answers.py); there is no text. The reference is what the same endpoint answered with
the same model before, at the window's time of day, or the `reference.json` of the model. Two things must agree on an anomaly:
random splits of all answers, in blocks of those that hang together (tasks/serving/monitor/blocks.py), by which the false-alarm
rate is kept over all columns together (tasks/data/drift/splits.py); and stretches of the past as long as the window, by their
most unusual column: what comes and goes is no anomaly. Labels are judged beside them, by tasks/serving/monitor/blocks.py. Who
asks, and what is done then, does not live here. See docs/watch.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.common.process import read_json
from tasks.config.revalidation import ServiceConfig
from tasks.data.drift.histograms import moved
from tasks.data.drift.splits import Splits, Values, greatest_step, judge
from tasks.formats.answers import Answer, Label
from tasks.formats.model_folder import FEWEST, FILE, quantiles_of
from tasks.serving.local.endpoint import outputs_of
from tasks.serving.monitor.blocks import (
    DAY,
    SHARE,
    Run,
    accuracy_column,
    block_length,
    cut,
    judged,
    orders,
    same_time_of_day,
    without_hour,
)
from tasks.serving.monitor.measures import (
    ENDS,
    FINISHED,
    MEASURES,
    Measure,
    ended,
    failed,
    filled,
    how_ended,
    known,
    mean,
    present,
    read,
)

# The answers that a model's own `reference.json` stands for: what the export measured on prompts of its own.
#
# Users ask other things, so only what depends little on the question is taken of it: no lengths, no times, no ends. The
# file's form is tasks/formats/model_folder.py.


COMPARABLE = ("entropy", "odd")
MOST = 500
REFERENCE_SEED = 77


def answers_of_reference(folder: Path) -> list[Answer]:
    """As many answers as were measured, drawn evenly from the quantiles of each measure; none without the file."""
    payload = read_json(folder / FILE) if (folder / FILE).is_file() else None
    quantiles = quantiles_of(payload)
    if payload is None or not any(quantiles.get(name) for name in COMPARABLE):
        return []
    count = min(int(payload["count"]), MOST)
    entropy, odd = (_reference_drawn(quantiles.get(name, ()), count, place) for place, name in enumerate(COMPARABLE))
    return [
        Answer(time=0.0, seconds=0.0, max_tokens=0, entropy=one, odd=other)
        for one, other in zip(entropy, odd, strict=True)
    ]


def _reference_drawn(points: Sequence[float], count: int, place: int) -> Sequence[float | None]:
    """Values whose quantiles at even distances are these, in no order: how measures hang together is not known."""
    if not points:
        return [None] * count
    levels = (np.arange(count) + 0.5) / count
    values = np.interp(levels, np.linspace(0, 1, len(points)), points)
    return [float(value) for value in np.random.default_rng([REFERENCE_SEED, place]).permutation(values)]


T = TypeVar("T")
MOST_ANSWERS, RUNS = 2000, 20
"""Of each side that the tests look at: so many runs of neighbours, spread evenly over its time."""
SPLITS, MOST_SPLITS = 400, 4000
STRETCHES, FEWEST_STRETCHES = 20, 5
USUAL_SHARE = 0.9
"""Share of the reference's stretches that the window must be further off than, each by its most unusual column: the rest may have
been an anomaly itself."""
ERRORS_NEED = 10
"""Fewest requests that a share of errors is judged by."""
BINS = 8
NULL_SHOWN = 200
SEED = 1234
OTHER_PROMPTS = 0.3
"""Smallest distance from the model's own reference that is told: users ask other things than its prompts."""


def anomalies(
    home: Path,
    endpoint: str,
    *,
    since: float,
    config: ServiceConfig,
    before: float | None = None,
    labels_since: float | None = None,
) -> dict[str, Any] | None:
    """`service.json`: what an endpoint answered from `since` on, against what it answered before.

    Times are seconds since the epoch. With `before`, the reference ends there: what is already known as an anomaly does not
    become usual. Labels are a window of their own, from `labels_since` on. None where the endpoint has written nothing with the
    model that it serves.
    """
    record = read_json(home / "endpoints" / endpoint / "endpoint.json")
    folder = outputs_of(home / "endpoints" / endpoint, str(record["model_ref"])) if record else None
    if record is None or folder is None or not folder.is_dir():
        return None
    payload, from_then = read(folder), since if labels_since is None else labels_since
    reference = [answer for answer in payload.answers if ended(answer) < (since if before is None else before)]
    window = [answer for answer in payload.answers if ended(answer) >= since]
    own = []
    if config.reference != "answers":
        started = read_json(Path(record.get("folder", "")) / "serve.json") or {}
        own = answers_of_reference(Path(str(started.get("model_folder", ""))))
    against = "model" if own and (config.reference == "model" or len(reference) < config.min_requests) else "answers"
    labels = (
        [label for label in payload.labels if label.time < (from_then if before is None else min(before, from_then))],
        [label for label in payload.labels if label.time >= from_then],
    )
    output = {"endpoint": endpoint, "model": record["model_ref"], "since": since, "against": against}
    return {
        **output,
        **compare(own if against == "model" else reference, window, config, labels=labels, against=against),
    }


def compare(
    reference: Sequence[Answer],
    window: Sequence[Answer],
    config: ServiceConfig,
    *,
    labels: tuple[Sequence[Label], Sequence[Label]] = ((), ()),
    against: str = "answers",
) -> dict[str, Any]:
    """Verdict, p_value and columns of two lists of answers, each in the order of time, and of the labels of both sides. Pure.

    A model's own reference (`against` is `model`) is as large as the export made it, so it needs FEWEST answers only.
    Where labels are judged too, each of the two gets half of the false-alarm rate.
    """
    counts = {"requests": len(window), "reference_requests": len(reference), "labels": len(labels[1])}
    accuracy = accuracy_column(*labels, config)
    share = SHARE if judged(accuracy) else 1.0
    own = against == "model"
    fewest = FEWEST if own else config.min_requests
    enough = len(window) >= config.min_requests and len(reference) >= fewest
    columns = _columns(reference, window, config, share, own=own, enough=enough)
    columns = [*_too_many_errors(columns, window, config), *([accuracy] if accuracy else [])]
    p_values = [column["p_value"] for column in columns if column["p_value"] is not None]
    verdicts = {column["verdict"] for column in columns}
    verdict = "anomaly" if "anomaly" in verdicts else "none" if enough and "none" in verdicts else "insufficient"
    return {**counts, "verdict": verdict, "p_value": min(p_values) if p_values else None, "columns": columns}


def _comparable(times: Values, window: Values, config: ServiceConfig) -> NDArray[np.bool_]:
    """Which answers are of the window's time of day, at least as many as it has: traffic changes with the hour.

    Both are times at which answers ended, in order.
    """
    fewest = max(config.min_requests, len(window))
    return same_time_of_day(times, float(window[0]), float(window[-1]), fewest=fewest)


def _ended(answers: Sequence[Answer]) -> Values:
    return np.array([ended(answer) for answer in answers], np.float64)


def _columns(
    reference: Sequence[Answer],
    window: Sequence[Answer],
    config: ServiceConfig,
    share: float,
    *,
    own: bool,
    enough: bool,
) -> list[dict[str, Any]]:
    """The measures' columns, judged at a share of the false-alarm rate where there are enough answers for that.

    What stands out must do so by every order in which answers may hang together; a column that one of them cannot judge is
    `insufficient`.
    """
    alike = reference
    if enough and not own:
        alike = list(compress(reference, _comparable(_ended(reference), _ended(window), config)))
    old, new = _drawn(alike), _drawn(window)
    measures = [measure for measure in (*MEASURES, FINISHED) if known(measure, old, new)]
    columns = [_column(measure, old, new) for measure in measures]
    if not enough:
        return columns
    rate = config.false_alarm_rate * share
    usual = np.full(len(measures), OTHER_PROMPTS) if own else _usual(measures, reference, window, config)
    callers = [[answer.caller for answer in side] for side in (old, new)]
    judged = [_by_order(measures, [*old, *new], runs, rate, learnt_from_new=own) for runs in orders(*callers)]
    return [
        column | _agreed(measure, each, usual[place], rate, share)
        for place, (column, measure, each) in enumerate(zip(columns, measures, zip(*judged, strict=True), strict=True))
    ]


def _by_order(
    measures: Sequence[Measure], answers: Sequence[Answer], runs: Sequence[Run], rate: float, *, learnt_from_new: bool
) -> list[_Judged | None]:
    """Every measure by splits of blocks; None where there are too few blocks for anything to stand out.

    How far answers hang together is learnt from the reference, because an anomaly that begins in the window hangs together as
    well; from the window where the reference has no order. Measures whose blocks are of one length are judged as a family, and
    each family has its part of the rate.
    """
    values = [_values(measure, answers) for measure in measures]
    clock = None if learnt_from_new else _time_of_day(answers, runs)
    learnt, stretch = [run for run in runs if run.new is learnt_from_new], sum(len(run.rows) for run in runs if run.new)
    lengths = [block_length(without_hour(one, clock, learnt), learnt, stretch=stretch) for one in values]
    results: list[_Judged | None] = [None] * len(measures)
    for length in sorted(set(lengths)):
        places = [place for place, one in enumerate(lengths) if one == length]
        blocks, part = cut(runs, length), len(places) / len(measures)
        if blocks.possible() < 1 / (rate * part):
            continue
        count = min(max(SPLITS, math.ceil(4 / (rate * part))), MOST_SPLITS)
        splits = Splits(blocks.drawn(splits=count, seed=SEED))
        apart = np.stack([_distances(measures[place], values[place], splits) for place in places], axis=1)
        judgement = judge(apart, rate * part)
        for column, place in enumerate(places):
            p_value, threshold = float(judgement.p_values[column]), float(judgement.thresholds[column])
            results[place] = _Judged(apart[:, column], min(p_value / part, 1.0), threshold)
    return results


def _time_of_day(answers: Sequence[Answer], runs: Sequence[Run]) -> Values | None:
    """Seconds from the window's middle, by the clock; None where the reference has none of it on another day."""
    times = _ended(answers)
    new = times[np.concatenate([run.rows for run in runs if run.new])]
    middle = float(new.min() + new.max()) / 2
    if times.min() > middle - DAY:
        return None
    return np.asarray((times - middle + DAY / 2) % DAY - DAY / 2, np.float64)


class _Judged(NamedTuple):
    """A measure by one order: its distances, of the question first and then of splits; p-value over all measures; threshold."""

    apart: Values
    p_value: float
    threshold: float


def _values(measure: Measure, answers: Sequence[Answer]) -> Values:
    """Of each answer what sides are compared by: its rank, so that no huge value drowns the rest; of ends a row of 0 and 1."""
    if measure is FINISHED:
        return np.array([[how_ended(answer) == end for end in ENDS] for answer in answers], np.float64)
    _, ranks = np.unique(filled(measure, answers), return_inverse=True)
    return np.asarray(ranks, np.float64)


def _distances(measure: Measure, values: Values, splits: Splits) -> Values:
    return _total_variation(values, splits) if measure is FINISHED else greatest_step(values, splits)


def _total_variation(labels: Values, splits: Splits) -> Values:
    """Half the sum of the differences of all shares, of each split; `labels` is [answers, labels], one of each row set."""
    of_new = splits.new.sum(axis=1, keepdims=True)
    new = splits.new @ labels.astype(np.float32)
    old = labels.sum(axis=0) - new
    return np.asarray(np.abs(new / of_new - old / (len(labels) - of_new)).sum(axis=1) / 2, np.float64)


def _usual(
    measures: Sequence[Measure], reference: Sequence[Answer], window: Sequence[Answer], config: ServiceConfig
) -> Values:
    """How far most stretches of the past lay from what was comparable with them then; 0 with too few of them.

    A stretch is as many answers long as the window, and what it is compared with ends as long before it: an hour that changes
    while an anomaly stands is as usual as it was before. It is as far as its most unusual column, in units of that column's
    median stretch.
    """
    times, size = _ended(reference), len(window)
    gap, apart = max(ended(window[0]) - times[-1], 0.0), []
    values = [_values(measure, reference) for measure in measures]
    for start in np.linspace(0, len(times) - size, min(STRETCHES, len(times) // size)).astype(int):
        earlier = times[: min(start, np.searchsorted(times, times[start] - gap, "right"))]
        unlike = times[0] <= ended(window[0]) - DAY < times[0] + ended(window[0]) - times[start]
        # The window's hour is known from another day then, and the stretch's is not.
        if len(earlier) < config.min_requests or unlike:
            continue
        chosen = np.flatnonzero(_comparable(earlier, times[start : start + size], config))
        rows = [*_drawn(chosen.tolist()), *_drawn(range(start, start + size))]
        sides = Splits((np.array(rows) >= start)[None].astype(np.float32))
        apart.append(
            [float(_distances(*one, sides)[0]) for one in zip(measures, (v[rows] for v in values), strict=True)]
        )
    if len(apart) < FEWEST_STRETCHES:
        return np.zeros(len(measures))
    unit = np.median(apart, axis=0)
    times_unit = np.divide(apart, unit, out=np.zeros((len(apart), len(measures))), where=unit > 0)
    return np.asarray(np.quantile(times_unit.max(axis=1), USUAL_SHARE) * unit, np.float64)


def _agreed(
    measure: Measure, judged: Sequence[_Judged | None], usual: float, rate: float, share: float
) -> dict[str, Any]:
    """A column by all orders: the largest p-value and threshold; nothing where one of them cannot judge."""
    sure = [each for each in judged if each is not None]
    if len(sure) < len(judged):
        return {}
    value, p_value = float(sure[0].apart[0]), max(each.p_value for each in sure)
    threshold = max(*(each.threshold for each in sure), measure.smallest, usual)
    return {
        "value": value,
        "threshold": threshold,
        "p_value": min(p_value / share, 1.0),
        "verdict": "anomaly" if p_value <= rate and value >= threshold else "none",
        "null": [round(float(each), 6) for each in sure[0].apart[1 : NULL_SHOWN + 1]],
    }


def _column(measure: Measure, old: Sequence[Answer], new: Sequence[Answer]) -> dict[str, Any]:
    """What a column looks like on both sides, before anything is judged."""
    before, now = _histograms(measure, old, new)
    labels = [label for label in before | now if before[label] or now[label]]
    shares = [[side[label] / (sum(side.values()) or 1) for label in labels] for side in (before, now)]
    return {
        "name": measure.name,
        "title": measure.title,
        "unit": "",
        "value": None,
        "threshold": None,
        "p_value": None,
        "verdict": "insufficient",
        "reference": mean(measure, old),
        "new": mean(measure, new),
        "moved": list(moved(now, before)),
        "histogram": {"labels": labels, "reference": shares[0], "new": shares[1]},
        "null": [],
    }


def _histograms(measure: Measure, old: Sequence[Answer], new: Sequence[Answer]) -> tuple[Counter[str], Counter[str]]:
    """Both sides in the same bins, which hold equal shares of the reference where that can be."""
    if measure is FINISHED:
        before, now = (
            Counter({end: sum(how_ended(answer) == end for answer in side) for end in ENDS}) for side in (old, new)
        )
        return before, now
    sides = [present(measure, side) for side in (old, new)]
    bins = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(sides[0] if len(sides[0]) else [0.0], bins, method="lower"))
    labels = [f"up to {edge:.6g}" for edge in edges] + [f"over {edges[-1]:.6g}"]
    placed = (np.bincount(np.searchsorted(edges, side, "left"), minlength=len(labels)) for side in sides)
    before, now = (Counter(dict(zip(labels, map(int, counts), strict=True))) for counts in placed)
    return before, now


def _too_many_errors(
    columns: list[dict[str, Any]], window: Sequence[Answer], config: ServiceConfig
) -> list[dict[str, Any]]:
    """More failing requests than may be are an anomaly at once, whatever was before."""
    share = sum(map(failed, window)) / len(window) if window else 0.0
    if len(window) < ERRORS_NEED or share <= config.max_error_share:
        return columns
    over = {"verdict": "anomaly", "value": share, "threshold": config.max_error_share, "new": share}
    return [column | over if column["name"] == "errors" else column for column in columns]


def _drawn(answers: Sequence[T]) -> list[T]:
    if len(answers) <= MOST_ANSWERS:
        return list(answers)
    ends = np.linspace(0, len(answers), RUNS + 1).astype(int)[1:]
    return [answer for end in ends for answer in answers[end - MOST_ANSWERS // RUNS : end]]
