"""Drift of files against files: two corpora are read once, the documents that are looked at are measured, and both are compared.

Processes share the units of both corpora and then the measuring. Memory does not grow with the corpora: a unit's hashes and the
documents that are looked at (tasks/data/drift/sampling.py).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config.revalidation import DriftConfig
from tasks.data.corpus.inputs import Shard
from tasks.data.corpus.pool import on_processes
from tasks.data.drift.comparison import Side, compare
from tasks.data.drift.features import Measured, measure, together
from tasks.data.drift.sampling import Drawn, draw
from tasks.data.drift.vocabulary import Vocabulary, open_vocabulary

SLICE = 250
"""Documents that a process measures at once."""
SAMPLE = 64
"""Documents on which a tokenizer's fast engine must agree with the slow one."""


@dataclass(frozen=True)
class Corpus:
    """Files under the name that the evidence says."""

    ref: str
    shards: tuple[Shard, ...]


def drift_of(
    reference: Corpus,
    new: Corpus,
    config: DriftConfig,
    folder: Path,
    *,
    tokenizer: Path | None,
    text_field: str,
    workers: int,
    report: Callable[[int, str], None] = lambda read, doing: None,
) -> dict[str, Any]:
    """The new corpus against the reference, as drift.json says it; what lies in `folder` meanwhile may be deleted afterwards.

    `report` hears the bytes that were read, and what is being done. Raises ValueError when a file cannot be read on, or a folder
    holds no tokenizer.
    """
    began = time.perf_counter()
    drawn = draw(
        (reference.shards, new.shards),
        folder / "read",
        text_field=text_field,
        most=config.max_documents,
        seed=config.seed,
        workers=workers,
        report=lambda read: report(read, "read"),
    )
    seconds = {"read": time.perf_counter() - began}
    enough = min(each.documents for each in drawn) >= config.min_documents
    vocabulary = open_vocabulary(tokenizer, drawn[0].heads[:SAMPLE]) if tokenizer else None
    report(0, "measured")
    measured = _measure(drawn, vocabulary, folder / "measured", workers=workers) if enough else [_none(), _none()]
    seconds["measure"] = time.perf_counter() - began - seconds["read"]
    report(0, "compared")
    old, now = (Side(c.ref, d, m) for c, d, m in zip((reference, new), drawn, measured, strict=True))
    made = compare(old, now, config, vocabulary=vocabulary, seconds=seconds)
    seconds["all"] = time.perf_counter() - began
    seconds["compare"] = seconds["all"] - seconds["read"] - seconds["measure"]
    return made


def _measure(drawn: Sequence[Drawn], vocabulary: Vocabulary | None, folder: Path, *, workers: int) -> list[Measured]:
    """What is drawn, measured in slices by processes of their own."""
    folder.mkdir(parents=True)
    slices = [(side, start) for side, each in enumerate(drawn) for start in range(0, len(each.heads), SLICE)]

    def do(item: tuple[int, int], report: Callable[[int], None]) -> None:
        side, start = item
        some = slice(start, start + SLICE)
        result = measure(drawn[side].heads[some], drawn[side].lengths[some], vocabulary)
        (folder / f"{side}-{start}").write_bytes(pickle.dumps(result))

    on_processes(slices, do, workers=workers)
    read = [(side, pickle.loads((folder / f"{side}-{start}").read_bytes())) for side, start in slices]
    return [together([part for of, part in read if of == side]) for side in range(len(drawn))]


def _none() -> Measured:
    return measure([], np.zeros(0, np.int64), None)
