"""Conversations packed into rows: which of them are learned and which share a row, by their lengths and a seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.formats.mmididx import sequence_lengths

BUFFER = 4096
"""Conversations that are packed together: what keeps packing linear in their number."""


def fits(sizes: NDArray[np.integer], length: int) -> NDArray[np.bool_]:
    """Which conversations of so many tokens are learned with rows of `length`: those with something to predict, and no longer."""
    return (sizes > 1) & (sizes <= length + 1)


def pack(sizes: NDArray[np.integer], room: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Conversations row by row, shape [conversations], and where each row begins among them, shape [rows + 1].

    First-fit decreasing within each buffer of the shuffled conversations. Every size is at most `room`. The shuffle is that of
    raw PCG64 draws, a stream that numpy keeps forever (NEP 19).
    """
    shuffled = np.argsort(np.random.PCG64(seed).random_raw(len(sizes)), kind="stable")
    packed, counts = [shuffled[:0]], [np.zeros(1, np.int64)]
    for first in range(0, len(sizes), BUFFER):
        members = shuffled[first : first + BUFFER]
        members = members[np.argsort(-sizes[members].astype(np.int64), kind="stable")]
        left, rows = np.full(len(members), room), np.empty(len(members), np.int64)
        for place, size in enumerate(sizes[members].tolist()):
            rows[place] = row = int(np.argmax(left[: place + 1] >= size))
            left[row] -= size
        packed.append(members[np.argsort(rows, kind="stable")])
        counts.append(np.bincount(rows))
    return np.concatenate(packed), np.concatenate(counts).cumsum()


def count_rows(prefixes: Sequence[Path], length: int, seed: int) -> int:
    """Rows that the conversations of these datasets are packed into, by their indexes alone."""
    sizes = np.concatenate([sequence_lengths(prefix) for prefix in prefixes])
    _, begins = pack(sizes[fits(sizes, length)], length + 1, seed)
    return len(begins) - 1
