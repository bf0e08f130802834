"""Records sorted by a hash, in runs on disk: any range of hashes is read out of all runs, in a stated bound of memory.

A run belongs to the documents of one part of a corpus, in whose order their rows count. Processes and machines that share the
runs take a range of hashes each: all records of one hash lie in one range. What a range yields depends on the records alone, not
on how they were divided into runs or blocks. Whoever reads a block holds about 75 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.tokens import Hashes

RECORD = np.dtype([("key", "<u8"), ("low", "<u8"), ("row", "<i8")])
"""`key` and `low` together are the hash, `low` being 0 where a hash has 64 bits; `row` counts in the whole corpus."""
BLOCK = 1 << 20
"""Records that are sorted at once."""
RANGE, MOST_RANGES = 1 << 15, 4096
"""Records of a range, on average, until there are as many ranges as there may be; from then on ranges grow."""
NEIGHBOURS = 4
"""Records before it in its bucket that a record is yielded with, beside the bucket's first."""
KEYS = 1 << 64


@dataclass(frozen=True)
class Range:
    """The hashes of one unit of work."""

    index: int
    first: int
    last: int
    """Still part of it."""


@dataclass(frozen=True)
class Run:
    """A file of one run: all keys, all lows where there are any, all rows (32 bits, from the run's first)."""

    path: Path
    first: int
    """Row of the corpus that the run's rows count from."""
    wide: bool
    """Whether there are lows."""

    def __len__(self) -> int:
        return self.path.stat().st_size // (20 if self.wide else 12)

    def places(self, keys: Hashes, start: int, stop: int) -> NDArray[np.int64]:
        """Where each of some keys would stand between two places of the run, before all that equal it."""
        return start + np.searchsorted(np.memmap(self.path, np.uint64, "r", start * 8, (stop - start,)), keys)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Records between two places."""
        size, count = len(self), stop - start
        records = np.zeros(count, RECORD)
        with open(self.path, "rb") as file:
            file.seek(8 * start)
            records["key"] = np.fromfile(file, np.uint64, count)
            if self.wide:
                file.seek(8 * (size + start))
                records["low"] = np.fromfile(file, np.uint64, count)
            file.seek((16 if self.wide else 8) * size + 4 * start)
            records["row"] = np.fromfile(file, np.uint32, count)
        records["row"] += self.first
        return records


def write_run(path: Path, keys: Hashes, rows: NDArray[Any], lows: Hashes | None = None) -> None:
    """Write records as one run; of equal hashes the rows must rise."""
    order = np.argsort(keys, kind="stable") if lows is None else np.lexsort((lows, keys))
    with open(path, "wb") as file:
        for column in (keys, *(() if lows is None else (lows,)), rows.astype(np.uint32)):
            column[order].tofile(file)


def ranges(records: int) -> list[Range]:
    """All hashes, in ranges for about so many records; the same whoever shares them."""
    count = min(MOST_RANGES, max(1, -(-records // RANGE)))
    bounds = [KEYS * index // count for index in range(count + 1)]
    return [Range(index, bounds[index], bounds[index + 1] - 1) for index in range(count)]


Span = tuple[Run, int, int]
Bucketed = tuple[NDArray[Any], NDArray[np.int64]]


def buckets(
    runs: Sequence[Run], wanted: Range, *, without: NDArray[np.bool_] | None = None, block: int = BLOCK
) -> Iterator[Bucketed]:
    """Records of a range sorted by hash and row, and for each the index of the first with its hash; about a block at a time.

    `runs` are in the order of their rows; rows of `without` are passed over. A hash that has more records than a block comes in
    several: each begins with the hash's first record and the NEIGHBOURS last ones that came before.
    """

    def read(run: Run, start: int, stop: int) -> NDArray[Any]:
        records = run.read(start, stop)
        return records if without is None else records[~without[records["row"]]]

    def divided(spans: list[Span], first: int, last: int, count: int) -> Iterator[Bucketed]:
        for part in _divided(spans, first, last, -(-count * 17 // (16 * block))):
            yield from blocks(*part)

    def blocks(spans: list[Span], first: int, last: int) -> Iterator[Bucketed]:
        count = sum(stop - start for _, start, stop in spans)
        if count > block and first < last:
            yield from divided(spans, first, last, count)
        elif count > block:
            carried = np.zeros(0, RECORD)
            for run, begin, end in spans:
                for start in range(begin, end, block):
                    fresh = read(run, start, min(start + block, end))
                    records, firsts, ends = _sorted(np.concatenate((carried, fresh)))
                    place = np.arange(len(records))
                    carried = records[(place == firsts) | (place >= ends - NEIGHBOURS)]
                    yield records, firsts
        elif spans:
            yield _sorted(np.concatenate([read(*span) for span in spans]))[:2]

    whole = [(run, 0, len(run)) for run in runs]
    share = sum(stop for _, _, stop in whole) * (wanted.last - wanted.first + 1) // KEYS
    yield from divided([span for span in whole if span[2]], wanted.first, wanted.last, share)


def _divided(spans: list[Span], first: int, last: int, parts: int) -> Iterator[tuple[list[Span], int, int]]:
    """Keys from `first` to `last` in parts of equal width: of each the spans that have some, its first key and its last.

    Hashes lie evenly, so a part fits into a block. A run is looked into once, however many parts there are.
    """
    parts = min(last - first + 1, max(1, parts))
    begins = [first + (last - first + 1) * part // parts for part in range(parts)]
    edges = np.array([*begins, min(last + 1, KEYS - 1)], np.uint64)
    places = np.empty((len(spans), parts + 1), np.int64)
    for number, (run, start, stop) in enumerate(spans):
        places[number] = run.places(edges, start, stop)
        if last == KEYS - 1:  # nothing stands beyond the last key
            places[number, -1] = stop
    for part, (begin, after) in enumerate(zip(begins, [*begins[1:], last + 1], strict=True)):
        filled = np.flatnonzero(places[:, part] < places[:, part + 1]).tolist()
        yield [(spans[n][0], *places[n, part : part + 2].tolist()) for n in filled], begin, after - 1


def _sorted(records: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """Records by hash and row; of each, the index of the first with its hash, and the one after the last."""
    records = records[np.lexsort((records["row"], records["low"], records["key"]))]
    new = np.ones(len(records), np.bool_)
    new[1:] = (records["key"][1:] != records["key"][:-1]) | (records["low"][1:] != records["low"][:-1])
    begins, which = np.flatnonzero(new), np.cumsum(new) - 1
    return records, begins[which], np.append(begins[1:], len(records))[which]
