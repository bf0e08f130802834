"""What a model's answers looked like when it was exported: `reference.json` of a model, for whoever watches its answers later.

The export writes it (tasks/jobs/exporting/reference.py); the judge of a rollout and the watch compare an endpoint's answers with
it. `measures` holds those of tasks/formats/answers.py, by name: `count` of them, their `mean`, and `quantiles`, LEVELS values
from the smallest to the largest at even distances. Numbers only, and no text. Pure; the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VERSION = 1
FILE = "reference.json"
LEVELS = 21
FEWEST = 20
"""Answers; fewer say too little for a model to be sent back by."""
MEASURES = ("length", "entropy", "repetition", "odd")
"""Tokens of an answer; the others as in tasks/formats/answers.py."""


def summary(values: Mapping[str, Sequence[float]], *, prompts: int, max_tokens: int) -> dict[str, Any]:
    """What is written: of each measure of `prompts` answers, of at most `max_tokens` tokens each, taken greedily."""
    payload = {name: _told(sorted(values[name])) for name in MEASURES if values.get(name)}
    return {"version": VERSION, "count": prompts, "max_tokens": max_tokens, "greedy": True, "measures": payload}


def quantiles_of(payload: Any) -> dict[str, list[float]]:
    """The quantiles of each measure that enough answers were measured for; nothing of what is no such file."""
    measures = payload.get("measures") if isinstance(payload, Mapping) and payload.get("version") == VERSION else None
    if not isinstance(measures, Mapping):
        return {}
    enough = {str(name): text["quantiles"] for name, text in measures.items() if text["count"] >= FEWEST}
    return {name: [float(value) for value in quantiles] for name, quantiles in enough.items()}


def _told(ordered: list[float]) -> dict[str, Any]:
    levels = [step / (LEVELS - 1) * (len(ordered) - 1) for step in range(LEVELS)]
    quantiles = [round(_between(ordered, level), 6) for level in levels]
    return {"count": len(ordered), "mean": round(sum(ordered) / len(ordered), 6), "quantiles": quantiles}


def _between(ordered: list[float], place: float) -> float:
    """The value at a place between two, on the line through both."""
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
