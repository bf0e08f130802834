"""The answers that a model's own `reference.json` stands for: what the export measured on prompts of its own.

Users ask other things, so only what depends little on the question is taken of it: no lengths, no times, no ends. The file's form
is tasks/formats/model_folder.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks.common.process import read_json
from tasks.formats.answers import Answer
from tasks.formats.model_folder import FILE, quantiles_of

COMPARABLE = ("entropy", "odd")
MOST = 500
SEED = 77


def answers_of_reference(folder: Path) -> list[Answer]:
    """As many answers as were measured, drawn evenly from the quantiles of each measure; none without the file."""
    payload = read_json(folder / FILE) if (folder / FILE).is_file() else None
    quantiles = quantiles_of(payload)
    if payload is None or not any(quantiles.get(name) for name in COMPARABLE):
        return []
    count = min(int(payload["count"]), MOST)
    entropy, odd = (_drawn(quantiles.get(name, ()), count, place) for place, name in enumerate(COMPARABLE))
    return [
        Answer(time=0.0, seconds=0.0, max_tokens=0, entropy=one, odd=other)
        for one, other in zip(entropy, odd, strict=True)
    ]


def _drawn(points: Sequence[float], count: int, place: int) -> Sequence[float | None]:
    """Values whose quantiles at even distances are these, in no order: how measures hang together is not known."""
    if not points:
        return [None] * count
    levels = (np.arange(count) + 0.5) / count
    values = np.interp(levels, np.linspace(0, 1, len(points)), points)
    return [float(value) for value in np.random.default_rng([SEED, place]).permutation(values)]
