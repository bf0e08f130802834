"""What is taken of an answer to compare it by: the columns of a judgement. Who judges is tasks/serving/monitor/anomalies.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tasks.common.errors import IntegrityError
from tasks.common.seal import opened
from tasks.formats.answers import Answer, Label

# Reads what servers wrote of their answers, and what callers said of them.
#
# Who writes is tasks/jobs/serving/outputs.py, and tasks/jobs/serving/feedback.py.


T = TypeVar("T", Answer, Label)
LABELS = "feedback"
"""Folder of the labels, in that of a model's answers."""


class Told(NamedTuple):
    """Of one model at one endpoint, by time."""

    answers: list[Answer]
    labels: list[Label]


def read(folder: Path) -> Told:
    """What was measured with one model, and the labels; a line that was cut by a kill is left out."""
    answers = [answer for answer in map(_own, _lines(folder, Answer)) if not 400 <= answer.status < 500]
    last = {
        (label.id, label.caller): label for label in sorted(_lines(folder / LABELS, Label), key=lambda one: one.time)
    }
    labels = (label for label in last.values() if not label.rung)
    return Told(sorted(answers, key=ended), sorted(labels, key=lambda one: one.time))


def ended(answer: Answer) -> float:
    """When it was written: an answer that was under way at a look belongs to the next window, however slow it is."""
    return answer.time + answer.seconds


def between(answers: Sequence[Answer], begins: float, ends: float) -> list[Answer]:
    return [answer for answer in answers if begins <= ended(answer) < ends]


def _own(answer: Answer) -> Answer:
    """What another model answered, because this one could not, says that it did, and nothing of this one's text and speed."""
    if not answer.rung:
        return answer
    nothing = dict.fromkeys(
        ("completion_tokens", "repetition", "entropy", "odd", "first_seconds", "refused", "unparsed")
    )
    return replace(answer, **nothing)  # type: ignore[arg-type]


def _lines(folder: Path, kind: type[T]) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    for path in sorted(folder.glob("*.jsonl")):
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # an older file makes room while we read
            continue
        for line in data.splitlines():
            try:
                yield decoder.decode(opened(line, where=str(path)))
            except (msgspec.DecodeError, UnicodeDecodeError, IntegrityError):
                continue


SEED = 99


@dataclass(frozen=True)
class Measure:
    """A column: what is taken of an answer, and how large a difference must be to be worth telling."""

    name: str
    title: str
    of: Callable[[Answer], float | None]
    smallest: float = 0.1
    """Of the Kolmogorov-Smirnov statistic, the greatest distance of the two cumulative distributions; of how answers ended, of
    the total variation distance."""
    rare: bool = False
    """Whether it is a column only where it ever happened."""


def _pace(answer: Answer) -> float | None:
    return answer.seconds / answer.completion_tokens if answer.completion_tokens and answer.seconds else None


def failed(answer: Answer) -> bool:
    """Whether it went wrong by the server's fault. 4xx are the user's, 429 among them."""
    return answer.status >= 500


MEASURES = (
    Measure("length", "tokens an answer", lambda a: a.completion_tokens),
    Measure("repetition", "share of repeated 3-grams of tokens", lambda a: a.repetition),
    Measure("entropy", "entropy of the next token, nats", lambda a: a.entropy),
    Measure("characters", "share of characters that are no text", lambda a: a.odd),
    Measure("latency", "seconds a token", _pace),
    Measure("refusals", "share of answers that begin with a refusal", lambda a: a.refused, smallest=0.02, rare=True),
    Measure("unparsed", "share of answers that are not what is expected", lambda a: a.unparsed, smallest=0.05),
    Measure("degraded", "share of answers by a lower rung", lambda a: bool(a.rung), smallest=0.05, rare=True),
    Measure("errors", "share of requests that failed by the server's fault", failed, smallest=0.02),
)
FINISHED = Measure("finished", "how answers ended", lambda a: None)
ENDS = ("stop", "length", "error")


def how_ended(answer: Answer) -> str:
    """Nothing where another model answered, and in a model's own reference."""
    return "error" if failed(answer) else answer.finish_reason


def known(measure: Measure, old: Sequence[Answer], new: Sequence[Answer]) -> bool:
    """Whether there is anything to compare; of requests that failed there is always something."""
    if measure.name == "errors":
        return True
    if measure is FINISHED:
        return all(any(map(how_ended, side)) for side in (old, new))
    if measure.rare and not any(measure.of(answer) for answer in (*old, *new)):
        return False
    return all(any(measure.of(answer) is not None for answer in side) for side in (old, new))


def present(measure: Measure, answers: Sequence[Answer]) -> NDArray[np.float64]:
    return np.array([value for answer in answers if (value := measure.of(answer)) is not None], np.float64)


def filled(measure: Measure, answers: Sequence[Answer]) -> NDArray[np.float64]:
    """What is not known is drawn from what is known of both sides together: it speaks for no difference, however much it is."""
    values = np.array([np.nan if (value := measure.of(answer)) is None else value for answer in answers], np.float64)
    missing = np.isnan(values)
    values[missing] = np.random.default_rng(SEED).choice(values[~missing], int(missing.sum()))
    return values


def mean(measure: Measure, answers: Sequence[Answer]) -> float | None:
    values = present(measure, answers)
    return float(values.mean()) if len(values) else None
