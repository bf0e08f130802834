"""The answers that a model's own `reference.json` stands for: what the export measured on prompts of its own.

Users ask other things, so only what depends little on the question is taken of it: no lengths, no times, no ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.formats.answers import Answer
from tasks.process import read_json

FILE = "reference.json"
COMPARABLE = ("entropy", "odd")
MOST = 500
SEED = 77


def answers_of_reference(folder: Path) -> list[Answer]:
    """As many answers as were measured, drawn evenly from what the file says of each measure; none without the file."""
    told = read_json(folder / FILE) if (folder / FILE).is_file() else None
    count = min(int((told or {}).get("count") or 0), MOST)
    drawn = {name: _drawn(_points(told, name), count, place) for place, name in enumerate(COMPARABLE)}
    return [
        Answer(
            time=0.0, seconds=0.0, max_tokens=0, **{name: values[number] for name, values in drawn.items() if values}
        )
        for number in range(count)
    ]


def _points(told: Any, name: str) -> list[float]:
    """Samples, or quantiles at even distances, of one measure."""
    said = ((told or {}).get("measures") or {}).get(name) or {}
    points = said.get("quantiles") or said.get("samples") or () if isinstance(said, dict) else said
    return [float(point) for point in points]


def _drawn(points: Sequence[float], count: int, place: int) -> list[float]:
    """Values whose quantiles are these points, in no order: how measures hang together is not known."""
    if not points:
        return []
    levels = (np.arange(count) + 0.5) / max(count, 1)
    values = (
        np.interp(levels, np.linspace(0, 1, len(points)), sorted(points))
        if len(points) > 1
        else np.full(count, points[0])
    )
    return [float(value) for value in np.random.default_rng([SEED, place]).permutation(values)]
