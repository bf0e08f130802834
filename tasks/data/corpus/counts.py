"""What is counted while a unit is read, and how long each kind of work took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.measures import CLASSES

WORDS = 4096
"""Buckets of the histogram of words."""


@dataclass
class Tally:
    """What is counted of one shard within one unit."""

    lines: int = 0
    documents: int = 0
    unreadable: int = 0
    bytes: int = 0
    characters: int = 0
    classes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(CLASSES), np.int64))


@dataclass
class Counts:
    """What is counted of one unit."""

    rows: int = 0
    read: int = 0
    shards: dict[int, Tally] = field(default_factory=dict)
    types: dict[str, Counter[str]] = field(default_factory=lambda: {"secret": Counter(), "personal": Counter()})
    words: NDArray[np.int64] = field(default_factory=lambda: np.zeros(WORDS, np.int64))
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        shards = {index: {**asdict(tally), "classes": tally.classes.tolist()} for index, tally in self.shards.items()}
        return {
            "rows": self.rows,
            "read": self.read,
            "shards": shards,
            "types": self.types,
            "seconds": self.seconds,
        }
