"""The documents of a corpus that break a rule: where they stand, why, and the files of the quarantine.

Which rows break which rule is tasks/data/judging.py's to say.
"""

from __future__ import annotations

import gzip
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.inputs import LINE_LIMIT, kind_of
from tasks.data.corpus.reading import opened

# Shards without some of their lines, and those lines by themselves: what a quarantine is made of.
#
# A shard is streamed, whatever its size; the bytes of what stays are not touched. Which lines go is
# tasks/data/judging.py's.


PART_BYTES = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
ROWS_AT_ONCE = 1024

Lines = Collection[int]
"""Numbers of lines, or of Parquet's rows, from 1."""


def rewrite(folder: Path, target: Path, without: Mapping[str, Lines]) -> int:
    """Copy a dataset's folder; shards named in `without` lose these lines. Returns how many files were written.

    A shard that is left empty is left out. Compressed shards are compressed anew, the same for the same lines.
    """
    written = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name not in without:
            shutil.copyfile(path, place)
            written += 1
        elif _copy_without(path, place, frozenset(without[name])):
            written += 1
        else:
            place.unlink(missing_ok=True)
    return written


def set_aside(path: Path, lines: Lines) -> Iterator[tuple[int, Any]]:
    """These lines of a shard in order, each as its JSON value, or its Parquet row.

    None stands for what is no JSON, longer than LINE_LIMIT, or a plain file.
    """
    kind, wanted = kind_of(path, named=False), frozenset(lines)
    if kind == "parquet":
        import pyarrow.parquet as pq

        first = 1
        for batch in pq.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE):
            for number in range(first, first + batch.num_rows):
                if number in wanted:
                    row = batch.slice(number - first, 1).to_pylist()[0]
                    yield number, json.loads(json.dumps(row, default=str))
            first += batch.num_rows
    elif kind == "text":
        yield from ((line, None) for line in sorted(wanted))
    else:
        with opened(path, kind) as (file, _):
            yield from _lines_of(file, wanted)


def _copy_without(path: Path, place: Path, lines: frozenset[int]) -> bool:
    """Write what is left of a shard; whether anything is."""
    kind = kind_of(path, named=False)
    if kind == "text":
        return False
    if kind == "parquet":
        # Row groups stay as they are, but for their rows; schema and compression stay.
        import pyarrow as pa
        import pyarrow.parquet as pq

        source = pq.ParquetFile(path)
        codec = source.metadata.row_group(0).column(0).compression if source.num_row_groups else "SNAPPY"
        kept = 0
        with pq.ParquetWriter(place, source.schema_arrow, compression=codec) as writer:
            first = 1
            for group in range(source.num_row_groups):
                table = source.read_row_group(group)
                wanted = [number not in lines for number in range(first, first + table.num_rows)]
                first += table.num_rows
                if any(wanted):
                    writer.write_table(table.filter(pa.array(wanted)))
                    kept += sum(wanted)
        return kept > 0
    kept = False
    with opened(path, kind) as (file, _), _compressed(place, kind) as out:
        for number, part in _parts(file):
            if number not in lines:
                out.write(part)
                kept = True
    return kept


def _parts(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Every line with its number; a long one comes in parts."""
    number = 1
    while part := file.readline(PART_BYTES):
        yield number, part
        number += part.endswith(b"\n")


def _lines_of(file: IO[bytes], lines: frozenset[int]) -> Iterator[tuple[int, Any]]:
    held, raw = 0, bytearray()
    for number, part in _parts(file):
        if number != held and held:
            yield held, _value(raw)
            held, raw = 0, bytearray()
        if number in lines:
            held = number
            raw += part if len(raw) <= LINE_LIMIT else b""
    if held:
        yield held, _value(raw)


def _value(raw: bytearray) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig")) if len(raw) <= LINE_LIMIT else None
    except (ValueError, RecursionError):
        return None


@contextmanager
def _compressed(place: Path, kind: str) -> Iterator[IO[bytes]]:
    """A file that is compressed while it is written, without time or name in it."""
    with open(place, "wb") as raw:
        if kind == "jsonl.gz":
            with gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0) as file:
                yield file  # type: ignore[misc]
        elif kind == "jsonl.zst":
            from tasks.data.corpus.reading import zstd

            with zstd.ZstdFile(raw, "wb", level=ZSTD_LEVEL) as file:
                yield file  # type: ignore[misc]
        else:
            yield raw


# Reading a profile: the folder of files that tasks/data/corpus/profile.py writes. Pure; nothing is judged here.


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


@dataclass(frozen=True)
class Marked:
    """One line that goes to the quarantine."""

    shard: int
    line: int
    rules: tuple[str, ...]
    detail: str
    raw: str | None = None
    """What stands there, where it is no document; its first bytes."""


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


def write(corpus: Path, target: Path, names: list[str], *marked: Iterator[Marked]) -> dict[str, array[int]]:
    """Write `quarantine.jsonl` and `quarantine.json` (counts by rule and shard); returns the lines that go, by shard.

    `marked` are streams in the order of shards and lines. A document's own value stands in `raw` where it can be read.
    """
    rules: Counter[str] = Counter()
    gone: dict[str, array[int]] = {}
    with open(target / "quarantine.jsonl", "w", encoding="utf-8") as file:
        for shard, group in groupby(merge(*marked, key=_place), key=lambda one: one.shard):
            lines = {one.line: one for one in group}
            name = names[shard]
            gone[name] = array("q", lines)
            for line, value in set_aside(corpus / name, lines.keys()):
                one = lines[line]
                rules.update(one.rules)
                payload = {"shard": name, "line": line, "rules": one.rules, "detail": one.detail}
                file.write(json.dumps({**payload, "raw": one.raw if value is None else value}) + "\n")
    shards = {name: len(lines) for name, lines in gone.items()}
    counted = {"documents": sum(shards.values()), "rules": dict(rules), "shards": shards}
    (target / "quarantine.json").write_text(json.dumps(counted, indent=1))
    return gone


def _place(marked: Marked) -> tuple[int, int]:
    return marked.shard, marked.line
