"""Histograms with fixed bins, so that two versions of a corpus are compared without their data. See docs/data.md.

Bin i counts edges[i] <= value < edges[i + 1]; the last bin has no upper edge. Who compares: tasks/data/drift/histograms.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LENGTHS: tuple[float, ...] = tuple(sorted({0, *(round(2 ** (half / 2)) for half in range(61))}))
"""Half octaves from 1 to 2^30 characters; empty documents have a bin of their own."""
SHARES: tuple[float, ...] = (0.0, 1e-9, 1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, *(round(0.1 * i, 1) for i in range(1, 11)))
"""Shares of a document, finer where little is much; none at all has a bin of its own."""
COUNTS: tuple[float, ...] = (0, 1, 2, 3, 4, 5, 10, 20, 50, 100)
RATIOS: tuple[float, ...] = tuple(round(1 + 0.1 * i, 1) for i in range(31))
"""Bytes a character: 1 is ASCII, 4 is the most that UTF-8 has."""
EDGES: dict[str, tuple[float, ...]] = {
    "characters": LENGTHS,
    "bytes_per_character": RATIOS,
    "control": SHARES,
    "replacement": SHARES,
    "repeated": SHARES,
    "secrets": COUNTS,
    "personal": COUNTS,
}
"""The bins of each column."""


def bins_of(values: NDArray[Any], edges: tuple[float, ...]) -> NDArray[np.int64]:
    """The index of each value's bin; a value below the first edge counts as the first bin."""
    return np.maximum(np.searchsorted(np.asarray(edges), values, side="right") - 1, 0)


def count(values: NDArray[Any], edges: tuple[float, ...]) -> NDArray[np.int64]:
    """How many values fall into each bin, shape [len(edges)]."""
    return np.bincount(bins_of(values, edges), minlength=len(edges))


def plain(edges: tuple[float, ...], counts: NDArray[np.int64]) -> dict[str, list[float]]:
    """A histogram as JSON."""
    return {"edges": list(edges), "counts": counts.tolist()}
