"""Reads what servers wrote of their answers, and what callers said of them.

Who writes is tasks/jobs/serving/outputs.py, and tasks/jobs/serving/feedback.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tasks.common.errors import IntegrityError
from tasks.common.seal import opened
from tasks.formats.answers import Answer, Label

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
        for line in _bytes(path).splitlines():
            try:
                yield decoder.decode(opened(line, where=str(path)))
            except (msgspec.DecodeError, UnicodeDecodeError, IntegrityError):
                continue


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # an older file makes room while we read
        return b""
