"""Reading a profile: the folder of files that tasks/data/corpus/profile.py writes. Pure; nothing is judged here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH_ROWS = 200_000
PARTNERS = ("exact_of", "near_of")
"""The columns that hold the row of another document."""
Columns = Mapping[str, Any]
"""`columns.json`, or one shard of `shards.json`."""
Row = dict[str, Any]
"""One document: its number as `row`, and its columns by name."""


@dataclass(frozen=True)
class Profile:
    """A corpus as it was measured."""

    folder: Path
    benchmarks: tuple[str, ...] = ()
    """Names of the datasets that the column `benchmark` counts in."""
    split: bool = True
    """Whether the column `heldout` says anything."""
    batch_rows: int = BATCH_ROWS
    """Most rows that are in memory at once."""

    @cached_property
    def columns(self) -> Columns:
        value: Columns = json.loads((self.folder / "columns.json").read_text(encoding="utf-8"))
        return value

    @cached_property
    def shards(self) -> list[Columns]:
        value: list[Columns] = json.loads((self.folder / "shards.json").read_text(encoding="utf-8"))
        return value

    @cached_property
    def names(self) -> list[str]:
        return [shard["name"] for shard in self.shards]

    @property
    def documents(self) -> int:
        """Readable ones: the rows."""
        return int(self.columns["documents"])

    def batches(self, columns: Iterable[str] | None = None) -> Iterator[tuple[int, Any]]:
        """The rows as pyarrow batches of at most `batch_rows`, each with the number of its first row."""
        import pyarrow.parquet as pq

        first = 0
        wanted = None if columns is None else list(columns)
        file = pq.ParquetFile(self.folder / "documents.parquet")
        for batch in file.iter_batches(batch_size=self.batch_rows, columns=wanted):
            yield first, batch
            first += batch.num_rows

    def rows(self, wanted: NDArray[np.bool_]) -> Iterator[Row]:
        """The rows that are wanted, in order."""
        import pyarrow as pa

        for first, batch in self.batches():
            local = wanted[first : first + batch.num_rows]
            for number, row in zip(
                np.flatnonzero(local).tolist(), batch.filter(pa.array(local)).to_pylist(), strict=True
            ):
                yield {"row": first + number, **row}

    def unreadable(self) -> Iterator[dict[str, Any]]:
        """The lines that are no documents: shard (its number), line, reason, raw."""
        index = {name: number for number, name in enumerate(self.names)}
        for item in self._lines("unreadable.jsonl"):
            yield {**item, "shard": index[item["shard"]]}

    def types(self, rows: set[int]) -> dict[tuple[int, str], set[str]]:
        """Types of what was found in some rows, by row and `secret` or `personal`; of each type the first 1,000 are known."""
        result: dict[tuple[int, str], set[str]] = {}
        for each in self._lines("findings.jsonl"):
            if each["row"] in rows:
                result.setdefault((each["row"], each["kind"]), set()).add(each["type"])
        return result

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        with open(self.folder / name, encoding="utf-8") as file:
            yield from map(json.loads, file)


class Places:
    """Shard and line of some rows, looked up in one pass."""

    def __init__(self, profile: Profile, rows: Iterable[int]) -> None:
        self._names = profile.names
        self._rows = np.unique(np.fromiter(rows, np.int64))
        self._shards, self._lines = np.zeros(len(self._rows), np.int32), np.zeros(len(self._rows), np.int64)
        for first, batch in profile.batches(("shard", "line")) if len(self._rows) else ():
            start, stop = np.searchsorted(self._rows, [first, first + batch.num_rows])
            local = self._rows[start:stop] - first
            self._shards[start:stop] = batch.column("shard").to_numpy()[local]
            self._lines[start:stop] = batch.column("line").to_numpy()[local]

    def __getitem__(self, row: int) -> str:
        """`SHARD:LINE` of a row that was asked for."""
        at = int(np.searchsorted(self._rows, row))
        assert at < len(self._rows) and self._rows[at] == row, f"row {row} was not asked for"
        return f"{self._names[self._shards[at]]}:{self._lines[at]}"
