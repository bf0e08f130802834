"""What an endpoint answered lately, against what it answered before: whether it is an anomaly, and what moved.

Only measures are compared (tasks/formats/answers.py); there is no text. The reference is what the same endpoint answered with
the same model before. Two things must agree on an anomaly: random splits of all answers, by which the false-alarm rate is kept
over all columns together (tasks/drift/family.py), and other stretches of the reference as long as the window: traffic changes
with the hour, and what comes and goes is none. Who asks, and what is done then, does not live here. See docs/endpoint.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tasks.drift.family import Judged, judge
from tasks.drift.histograms import moved
from tasks.drift.splits import Splits, Values, greatest_step, split
from tasks.endpoints.local import outputs_of
from tasks.formats.answers import Answer
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


@dataclass(frozen=True)
class Measure:
    """A column: what is taken of an answer, and how large a difference must be to be worth telling."""

    name: str
    title: str
    of: Callable[[Answer], float | None]
    smallest: float = 0.1
    """Of the Kolmogorov-Smirnov statistic, the greatest distance of the two cumulative distributions; of how answers ended, of
    the total variation distance."""


def failed(answer: Answer) -> bool:
    """Whether it went wrong by the server's fault. 4xx are the user's, 429 among them."""
    return answer.status >= 500


MEASURES = (
    Measure("length", "tokens an answer", lambda a: a.completion_tokens),
    Measure("repetition", "share of repeated 3-grams of tokens", lambda a: a.repetition),
    Measure("entropy", "entropy of the next token, nats", lambda a: a.entropy),
    Measure("characters", "share of characters that are no text", lambda a: a.odd),
    Measure("latency", "seconds a token", lambda a: a.seconds / a.completion_tokens if a.completion_tokens else None),
    Measure("errors", "share of requests that failed by the server's fault", failed, smallest=0.02),
)
FINISHED = Measure("finished", "how answers ended", lambda a: None)
ENDS = ("stop", "length", "error")


def anomalies(
    home: Path, endpoint: str, *, since: float, config: ServiceConfig, before: float | None = None
) -> dict[str, Any] | None:
    """`service.json`: what an endpoint answered from `since` on, against what it answered before.

    Times are seconds since the epoch. With `before`, the reference ends there: what is already known as an anomaly does not
    become usual. None where the endpoint has written nothing with the model that it serves.
    """
    record = read_json(home / "endpoints" / endpoint / "endpoint.json")
    folder = outputs_of(home / "endpoints" / endpoint, str(record["model_ref"])) if record else None
    if folder is None or not folder.is_dir():
        return None
    told = read(folder)
    reference = [answer for answer in told if _ended(answer) < (since if before is None else before)]
    window = [answer for answer in told if _ended(answer) >= since]
    return {"endpoint": endpoint, "model": record["model_ref"], "since": since, **compare(reference, window, config)}


def read(folder: Path) -> list[Answer]:
    """What was measured with one model, by time; a user's mistakes are left out, and so is a line that was cut by a kill."""
    decoder, found = msgspec.json.Decoder(Answer), []
    for path in sorted(folder.glob("*.jsonl")):
        for line in _bytes(path).splitlines():
            try:
                found.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return sorted((answer for answer in found if not 400 <= answer.status < 500), key=_ended)


def _ended(answer: Answer) -> float:
    """When it was written: an answer that was under way at a look belongs to the next window, however slow it is."""
    return answer.time + answer.seconds


def compare(reference: Sequence[Answer], window: Sequence[Answer], config: ServiceConfig) -> dict[str, Any]:
    """Verdict, p_value and columns of two lists of answers, each in the order of time. Pure."""
    counts = {"requests": len(window), "reference_requests": len(reference)}
    old, new = _drawn(reference), _drawn(window)
    measures = [measure for measure in MEASURES if _known(measure, old) and _known(measure, new)]
    if min(len(window), len(reference)) < config.min_requests:
        columns = [_column(measure, old, new) for measure in measures]
        judged = None
    else:
        values = _values(measures, old, new, config.false_alarm_rate)
        judged = judge(values, config.false_alarm_rate)
        usual = _usual(measures, old, reference, window)
        columns = [
            _column(measure, old, new) | _judged(measure, values[:, place], judged, place, usual[place], config)
            for place, measure in enumerate([*measures, FINISHED])
        ]
    if judged is None and columns:
        columns.append(_column(FINISHED, old, new))
    columns = _too_many_errors(columns, window, config)
    verdicts = {column["verdict"] for column in columns}
    verdict = "anomaly" if "anomaly" in verdicts else "none" if judged else "insufficient"
    p_value = float(judged.p_values.min()) if judged else None
    return {**counts, "verdict": verdict, "p_value": p_value, "columns": columns}


def _values(measures: Sequence[Measure], old: Sequence[Answer], new: Sequence[Answer], rate: float) -> Values:
    """How far the sides of each split lie apart, shape [splits + 1, measures and how they ended]."""
    splits = split(len(old), len(new), splits=min(max(SPLITS, math.ceil(4 / rate)), MOST_SPLITS), seed=SEED)
    return _distances(measures, [*old, *new], splits)


def _distances(measures: Sequence[Measure], answers: Sequence[Answer], splits: Splits) -> Values:
    found = [greatest_step(_filled(measure, answers), splits) for measure in measures]
    found.append(_total_variation(np.array([[_end(answer) == end for end in ENDS] for answer in answers]), splits))
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
        return np.zeros(len(measures) + 1)
    starts = np.linspace(0, len(reference) - len(window), count).astype(int)
    stretches = (_drawn(reference[start : start + len(window)]) for start in starts)
    apart = [_distances(measures, [*old, *one], _as_they_are(len(old), len(one)))[0] for one in stretches]
    return np.asarray(np.quantile(apart, USUAL_SHARE, axis=0), np.float64)


def _as_they_are(old: int, new: int) -> Splits:
    return Splits(np.array([[0] * old + [1] * new], np.float32))


def _judged(
    measure: Measure, values: Values, judged: Judged, place: int, usual: float, config: ServiceConfig
) -> dict[str, Any]:
    threshold = max(float(judged.thresholds[place]), measure.smallest, float(usual))
    unusual = judged.p_values[place] <= config.false_alarm_rate and values[0] >= threshold
    return {
        "value": float(values[0]),
        "threshold": threshold,
        "p_value": float(judged.p_values[place]),
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
        "reference": _mean(measure, old),
        "new": _mean(measure, new),
        "moved": list(moved(now, before)),
        "histogram": {"labels": labels, "reference": shares[0], "new": shares[1]},
        "null": [],
    }


def _histograms(measure: Measure, old: Sequence[Answer], new: Sequence[Answer]) -> tuple[Counter[str], Counter[str]]:
    """Both sides in the same bins, which hold equal shares of the reference where that can be."""
    if measure is FINISHED:
        before, now = (
            Counter({end: sum(_end(answer) == end for answer in side) for end in ENDS}) for side in (old, new)
        )
        return before, now
    sides = [_present(measure, side) for side in (old, new)]
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


def _end(answer: Answer) -> str:
    return "error" if failed(answer) else answer.finish_reason


def _known(measure: Measure, answers: Sequence[Answer]) -> bool:
    """Whether there is anything to compare; of requests that failed there is always something."""
    return measure.name == "errors" or any(measure.of(answer) is not None for answer in answers)


def _present(measure: Measure, answers: Sequence[Answer]) -> NDArray[np.float64]:
    return np.array([value for answer in answers if (value := measure.of(answer)) is not None], np.float64)


def _filled(measure: Measure, answers: Sequence[Answer]) -> NDArray[np.float64]:
    """What is not known gets the middle of both sides together: it speaks for no difference."""
    middle = float(np.median(_present(measure, answers)))
    return np.array([middle if (value := measure.of(answer)) is None else value for answer in answers], np.float64)


def _mean(measure: Measure, answers: Sequence[Answer]) -> float | None:
    values = _present(measure, answers)
    return float(values.mean()) if len(values) else None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # an older file makes room while we read
        return b""
