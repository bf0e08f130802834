"""A profile as it is read, and the documents of a corpus that break a rule: where they stand, and why in a few words.

Which rows break which rule is tasks/data/judging.py's to say; what becomes of them, tasks/data/corpus/dividing.py's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.dividing import Marked

BATCH_ROWS = 200_000
PARTNERS = ("exact_of", "near_of")
"""The columns that hold the row of another document."""
Columns = Mapping[str, Any]
"""`columns.json`, or one shard of `shards.json`."""
Row = dict[str, Any]
"""One document: its number as `row`, and its columns by name."""


@dataclass(frozen=True)
class Profile:
    """A corpus as it was measured: the folder of files that tasks/data/corpus/profile.py writes."""

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

    def known(self) -> Iterator[dict[str, Any]]:
        """The documents of earlier corpora that some repeat: row (beyond those of this one), place."""
        return self._lines("known.jsonl")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        with open(self.folder / name, encoding="utf-8") as file:
            yield from map(json.loads, file)


class Places:
    """Shard and line of some rows, looked up in one pass."""

    def __init__(self, profile: Profile, rows: Iterable[int]) -> None:
        self._names = profile.names
        self._rows = np.unique(np.fromiter(rows, np.int64))
        self._shards, self._lines = np.zeros(len(self._rows), np.int32), np.zeros(len(self._rows), np.int64)
        own = int(np.searchsorted(self._rows, profile.documents))
        wanted = set(self._rows[own:].tolist())
        self._known = (
            {each["row"]: each["place"] for each in profile.known() if each["row"] in wanted} if wanted else {}
        )
        for first, batch in profile.batches(("shard", "line")) if own else ():
            start, stop = np.searchsorted(self._rows, [first, first + batch.num_rows])
            local = self._rows[start:stop] - first
            self._shards[start:stop] = batch.column("shard").to_numpy()[local]
            self._lines[start:stop] = batch.column("line").to_numpy()[local]

    def __getitem__(self, row: int) -> str:
        """`SHARD:LINE` of a row that was asked for; of a document of an earlier corpus `NAME: SHARD:LINE`."""
        if row in self._known:
            return str(self._known[row])
        at = int(np.searchsorted(self._rows, row))
        assert at < len(self._rows) and self._rows[at] == row, f"row {row} was not asked for"
        return f"{self._names[self._shards[at]]}:{self._lines[at]}"


BORDER = "held-out contamination"
"""The name of what no single document breaks: repeating one on the other side of the held-out border."""


class Teller:
    """Says in a few words how documents break a rule; never what they say."""

    def __init__(self, profile: Profile, rows: Iterable[Row]) -> None:
        """`rows` are those that will be told of, read once."""
        partners, result = array("q"), set()
        for row in rows:
            partners.extend(row[column] for column in PARTNERS if row[column] >= 0)
            if row["secrets"] or row["personal"]:
                result.add(row["row"])
        self._places = Places(profile, partners)
        self._types = profile.types(result) if result else {}
        self._benchmarks = profile.benchmarks

    def __call__(self, rule: str, row: Row) -> str:
        match rule:
            case "too short" | "too long":
                return f"{row['characters']} characters"
            case "control characters" | "replacement characters":
                return f"{row[rule.partition(' ')[0]]:.1%} {rule}"
            case "repeated lines":
                return f"{row['repeated']:.1%} in repeated lines"
            case "exact duplicates":
                return f"repeats {self._places[row['exact_of']]}"
            case "near duplicates":
                return f"{row['near_similarity']:.2f} like {self._places[row['near_of']]}"
            case "contamination":
                return f"holds a document of {self._benchmarks[row['benchmark']]}"
            case "secrets" | "personal data":
                return ", ".join(sorted(self._types.get((row["row"], KINDS[rule]), {"of a type that was found often"})))
            case _:
                assert rule == BORDER, rule
                return f"repeats {self._places[partner(row)]} across the border"


KINDS = {"secrets": "secret", "personal data": "personal"}
"""What findings of a rule are called in a profile."""


def partner(row: Row) -> int:
    """The row of the earlier document that this one repeats, exactly or nearly; -1 when it repeats none."""
    return int(row["exact_of"] if row["exact_of"] >= 0 else row["near_of"])


def samples_of(profile: Profile, wanted: Mapping[str, list[int]]) -> dict[str, tuple[str, ...]]:
    """`SHARD:LINE: why` of a few rows, by rule."""
    mask = np.zeros(profile.documents, bool)
    for numbers in wanted.values():
        mask[numbers] = True
    rows = {row["row"]: row for row in profile.rows(mask)}
    tell = Teller(profile, rows.values())
    place = {number: f"{profile.names[row['shard']]}:{row['line']}" for number, row in rows.items()}
    return {rule: tuple(f"{place[n]}: {tell(rule, rows[n])}" for n in numbers) for rule, numbers in wanted.items()}


def mark(rows: Iterable[tuple[Row, tuple[str, ...]]], tell: Teller) -> Iterator[Marked]:
    """Rows with the rules that they break, as lines of the quarantine."""
    for row, rules in rows:
        yield Marked(row["shard"], row["line"], rules, "; ".join(tell(rule, row) for rule in rules))


def mark_unreadable(profile: Profile) -> Iterator[Marked]:
    """The lines that are no documents, as lines of the quarantine."""
    for item in profile.unreadable():
        yield Marked(item["shard"], item["line"], ("unreadable",), item["reason"], item["raw"])
