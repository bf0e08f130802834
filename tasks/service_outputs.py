"""What an endpoint answered lately, against what it answered before: whether it is an anomaly, and what moved.

Only measures are compared (tasks/formats/answers.py); there is no text. The reference is what the same endpoint answered with
the same model before, or the `reference.json` of the model. Two things must agree on an anomaly: random splits of all answers, by
which the false-alarm rate is kept over all columns together (tasks/drift/family.py), and other stretches of the reference as long
as the window: traffic changes with the hour, and what comes and goes is none. Labels are judged beside them, by
tasks/answering/accuracy.py. Who asks, and what is done then, does not live here. See docs/watch.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.answering.accuracy import SHARE, accuracy_column, judged
from tasks.answering.measures import ENDS, FINISHED, MEASURES, Measure, failed, filled, how_ended, known, mean, present
from tasks.answering.reading import ended, read
from tasks.answering.reference import answers_of_reference
from tasks.drift.family import Judged, judge
from tasks.drift.histograms import moved
from tasks.drift.splits import Splits, Values, greatest_step, split
from tasks.endpoints.local import outputs_of
from tasks.formats.answers import Answer, Label
from tasks.formats.reference import FEWEST
from tasks.process import read_json
from tasks.revalidation_config import ServiceConfig

MOST_ANSWERS = 2000
"""Of each side that the tests look at, spread evenly over its time."""
SPLITS, MOST_SPLITS = 400, 4000
STRETCHES, FEWEST_STRETCHES = 20, 5
USUAL_SHARE = 0.9
"""Share of the reference's stretches that the window must be further off than: the rest may have been an anomaly itself."""
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
    told, from_then = read(folder), since if labels_since is None else labels_since
    reference = [answer for answer in told.answers if ended(answer) < (since if before is None else before)]
    window = [answer for answer in told.answers if ended(answer) >= since]
    own = [] if config.reference == "answers" else answers_of_reference(_model_folder(record))
    against = "model" if own and (config.reference == "model" or len(reference) < config.min_requests) else "answers"
    labels = (
        [label for label in told.labels if label.time < (from_then if before is None else min(before, from_then))],
        [label for label in told.labels if label.time >= from_then],
    )
    said = {"endpoint": endpoint, "model": record["model_ref"], "since": since, "against": against}
    return {**said, **compare(own if against == "model" else reference, window, config, labels=labels, against=against)}


def _model_folder(record: dict[str, Any]) -> Path:
    started = read_json(Path(record.get("folder", "")) / "serve.json") or {}
    return Path(str(started.get("model_folder", "")))


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
    columns = _columns(reference, window, config, share, OTHER_PROMPTS if own else 0.0, enough=enough)
    columns = [*_too_many_errors(columns, window, config), *([accuracy] if accuracy else [])]
    p_values = [column["p_value"] for column in columns if column["p_value"] is not None]
    verdicts = {column["verdict"] for column in columns}
    verdict = "anomaly" if "anomaly" in verdicts else "none" if enough else "insufficient"
    return {**counts, "verdict": verdict, "p_value": min(p_values) if p_values else None, "columns": columns}


def _columns(
    reference: Sequence[Answer],
    window: Sequence[Answer],
    config: ServiceConfig,
    share: float,
    smallest: float,
    *,
    enough: bool,
) -> list[dict[str, Any]]:
    """The measures' columns, judged at a share of the false-alarm rate where there are enough answers for that."""
    old, new = _drawn(reference), _drawn(window)
    measures = [measure for measure in (*MEASURES, FINISHED) if known(measure, old, new)]
    if not enough:
        return [_column(measure, old, new) for measure in measures]
    rate = config.false_alarm_rate * share
    values = _values(measures, old, new, rate)
    judgement = judge(values, rate)
    usual = np.maximum(_usual(measures, old, reference, window), smallest)
    columns = [
        _column(measure, old, new) | _judged(measure, values[:, place], judgement, place, usual[place], rate)
        for place, measure in enumerate(measures)
    ]
    return [column | {"p_value": min(column["p_value"] / share, 1.0)} for column in columns]


def _values(measures: Sequence[Measure], old: Sequence[Answer], new: Sequence[Answer], rate: float) -> Values:
    """How far the sides of each split lie apart, shape [splits + 1, measures]."""
    splits = split(len(old), len(new), splits=min(max(SPLITS, math.ceil(4 / rate)), MOST_SPLITS), seed=SEED)
    return _distances(measures, [*old, *new], splits)


def _distances(measures: Sequence[Measure], answers: Sequence[Answer], splits: Splits) -> Values:
    found = [
        _total_variation(np.array([[how_ended(answer) == end for end in ENDS] for answer in answers]), splits)
        if measure is FINISHED
        else greatest_step(filled(measure, answers), splits)
        for measure in measures
    ]
    return np.stack(found, axis=1)


def _total_variation(labels: NDArray[np.bool_], splits: Splits) -> Values:
    """Half the sum of the differences of all shares, of each split; `labels` is [answers, labels], one of each row set."""
    of_old, of_new = splits.sizes
    new = splits.new @ labels.astype(np.float32)
    old = labels.sum(axis=0) - new
    return np.asarray(np.abs(new / of_new - old / of_old).sum(axis=1) / 2, np.float64)


def _usual(
    measures: Sequence[Measure], old: Sequence[Answer], reference: Sequence[Answer], window: Sequence[Answer]
) -> Values:
    """How far most stretches of the reference, as many answers long as the window, lie from all of it; 0 with too few of them."""
    count = min(STRETCHES, len(reference) // len(window))
    if count < FEWEST_STRETCHES:
        return np.zeros(len(measures))
    starts = np.linspace(0, len(reference) - len(window), count).astype(int)
    stretches = (_drawn(reference[start : start + len(window)]) for start in starts)
    apart = [_distances(measures, [*old, *one], _as_they_are(len(old), len(one)))[0] for one in stretches]
    return np.asarray(np.quantile(apart, USUAL_SHARE, axis=0), np.float64)


def _as_they_are(old: int, new: int) -> Splits:
    return Splits(np.array([[0] * old + [1] * new], np.float32))


def _judged(
    measure: Measure, values: Values, judgement: Judged, place: int, usual: float, rate: float
) -> dict[str, Any]:
    threshold = max(float(judgement.thresholds[place]), measure.smallest, float(usual))
    unusual = judgement.p_values[place] <= rate and values[0] >= threshold
    return {
        "value": float(values[0]),
        "threshold": threshold,
        "p_value": float(judgement.p_values[place]),
        "verdict": "anomaly" if unusual else "none",
        "null": [round(float(value), 6) for value in values[1 : NULL_SHOWN + 1]],
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


def _drawn(answers: Sequence[Answer]) -> list[Answer]:
    if len(answers) <= MOST_ANSWERS:
        return list(answers)
    return [answers[int(place)] for place in np.linspace(0, len(answers) - 1, MOST_ANSWERS)]
