"""What is measured of one answer of an endpoint, and what its caller said of it later: one JSON object a line.

Numbers and names only, and no word of a text, unless an endpoint was told to keep texts. Servers write it
(tasks/jobs/serving/outputs.py, tasks/jobs/serving/feedback.py), tasks/serving/monitor/anomalies.py reads it. Standard library
only: the serving image has little more.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from tasks.common.seal import sealed

GRAM = 3
ODD = ("Cc", "Cn", "Co", "Cs")
"""Unicode's categories of control signs, and of what no character is assigned to."""
REFUSAL_BEGINS = 240
"""Characters of an answer in which a refusal is looked for: who refuses says so first."""
MOST_PARSED = 20_000
"""Characters of an answer that is parsed; a longer one is not looked at."""
Expected = Literal["", "json", "python"]
_REFUSAL = re.compile(
    r"\bI(?:'m| am) (?:(?:really |very |so )?(?:sorry|afraid)|unable to|not able to)\b"
    r"|\bI (?:cannot|can't|can not|won't|will not)\b|\bas an? (?:AI|language model|assistant)\b|\bI must (?:decline|refuse)\b",
    re.IGNORECASE,
)


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
    id: str = ""
    """Of the request, as in its header X-Request-Id."""
    model: str = ""
    """Reference of what answered; empty in lines of releases that told none, where the folder says it."""
    rung: str = ""
    """`previous` or `smaller`, when the full model could not answer."""
    caller: str = ""
    """Name of who asked, where keys are asked for."""
    first_seconds: float | None = None
    """Until the first piece of the answer."""
    refused: bool | None = None
    """Whether the answer begins with a refusal. English only."""
    unparsed: bool | None = None
    """Whether an answer that ended by itself is not what the endpoint is to answer with (`deployment.answers.expects`)."""
    prompt: str | None = None
    text: str | None = None
    """Both without secrets, and cut; only where `deployment.answers.keep_text` says so."""


@dataclass(frozen=True)
class Label:
    """What a caller said of an answer. Of several labels of one request the last one counts."""

    time: float
    """When it was said, in seconds since the epoch."""
    id: str
    """Of the request."""
    asked: float
    """When the request came."""
    right: float
    """1 for a right answer, 0 for a wrong one, or a score between."""
    model: str = ""
    rung: str = ""
    caller: str = ""
    comment: str = ""
    """Without secrets, and cut; only where texts are kept."""


def line(payload: Answer | Label) -> bytes:
    """The line of an answer or a label, its end included; an answer's fields that say nothing are left out."""
    kept = {name: value for name, value in asdict(payload).items() if name in _ALWAYS or value not in (None, "")}
    return sealed(json.dumps(kept, separators=(",", ":")).encode()) + b"\n"


_ALWAYS = frozenset(("time", "seconds", "max_tokens", "status", "asked", "right"))


def repetition(tokens: Sequence[int]) -> float | None:
    """Share of 3-grams that came before in the same tokens; None for fewer than two of them."""
    grams = [tuple(tokens[place : place + GRAM]) for place in range(len(tokens) - GRAM + 1)]
    return round(1 - len(set(grams)) / len(grams), 4) if len(grams) > 1 else None


def odd_share(text: str) -> float | None:
    """Share of characters that are no text; None without a character."""
    odd = sum(sign == "\ufffd" or (unicodedata.category(sign) in ODD and sign not in "\t\n\r") for sign in text)
    return round(odd / len(text), 4) if text else None


def refuses(text: str) -> bool | None:
    """Whether a text begins with a refusal, by a list of English turns; None for an empty one."""
    return bool(_REFUSAL.search(text[:REFUSAL_BEGINS].replace("\u2019", "'"))) if text.strip() else None


def unparsed(prompt: str, text: str, expects: Expected, *, finish_reason: str) -> bool | None:
    """Whether an answer is not what was expected: JSON by itself, or Python that goes on from the prompt.

    None where nothing is expected, for an answer that was cut by its length, and for one that is too long to look at.
    """
    if not expects or finish_reason != "stop" or len(prompt) + len(text) > MOST_PARSED:
        return None
    try:
        if expects == "json":
            json.loads(text)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an odd escape in somebody's answer is no warning of ours
                ast.parse(prompt + text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return True
    return False
