"""What is measured of one answer of an endpoint, one JSON object a line. Numbers and names only: never a word of a text.

Servers write it (tasks/jobs/outputs.py), tasks/service_outputs.py reads it. Standard library only: the serving image has no more.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass

GRAM = 3
ODD = ("Cc", "Cn", "Co", "Cs")
"""Unicode's categories of control signs, and of what no character is assigned to."""


@dataclass(frozen=True)
class Answer:
    """A request and its answer. None: there was nothing to measure it by."""

    time: float
    """When the request came, in seconds since the epoch."""
    seconds: float
    """Until it was answered, waiting included."""
    max_tokens: int
    """That were asked for."""
    status: int = 200
    error: str = ""
    """Class of what went wrong."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    repetition: float | None = None
    """Share of the answer's 3-grams of tokens that it had before."""
    entropy: float | None = None
    """Mean entropy of the next token, in nats, over the first tokens of the answer."""
    odd: float | None = None
    """Share of characters that are no text: control signs, unassigned ones, U+FFFD for bytes that are no UTF-8."""


def line(answer: Answer) -> bytes:
    """The line of an answer, its end included."""
    return json.dumps(asdict(answer), separators=(",", ":")).encode() + b"\n"


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of 3-grams that came before in the same tokens; None for fewer than two of them."""
    grams = [tuple(tokens[place : place + GRAM]) for place in range(len(tokens) - GRAM + 1)]
    return round(1 - len(set(grams)) / len(grams), 4) if len(grams) > 1 else None


def odd_share(text: str) -> float | None:
    """Share of characters that are no text; None without a character."""
    odd = sum(sign == "\ufffd" or (unicodedata.category(sign) in ODD and sign not in "\t\n\r") for sign in text)
    return round(odd / len(text), 4) if text else None
