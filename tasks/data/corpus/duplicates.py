"""Which documents are equal, in a stated bound of memory: records are spilled to files by hash, each file sorted alone.

A partition holds about PARTITION records (up to MOST_PARTITIONS of them, 5 * 10^8 records), and one that holds more than twice
as many, copies of one document, is read in blocks. In memory are 24 bytes a record of a block and of its distinct hashes, and
about as much again for sorting: 150 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

PARTITION = 1 << 20
MOST_PARTITIONS = 512
"""Files that are open at once. From 5 * 10^8 records on, partitions grow."""
RECORD = np.dtype([("key", "<u8"), ("low", "<u8"), ("row", "<i8")])


class Spill:
    """Records on disk, divided by the first bits of their key. Rows must be added in rising order."""

    def __init__(self, folder: Path, records: int, *, partition: int = PARTITION) -> None:
        """`records`: how many will be added."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._block = 2 * partition
        self._count = min(MOST_PARTITIONS, max(1, -(-records // partition)))
        self._stack = ExitStack()
        self._files: list[BinaryIO] = []

    def __enter__(self) -> Self:
        for index in range(self._count):
            self._files.append(self._stack.enter_context(open(self._path(index), "wb")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def add(self, records: NDArray[Any]) -> None:
        """Append records to their partitions."""
        places = ((records["key"] >> np.uint64(32)) * np.uint64(self._count)) >> np.uint64(32)
        order = np.argsort(places, kind="stable")
        ends = np.searchsorted(places[order], np.arange(self._count), side="right")
        for index, part in enumerate(np.split(records[order], ends[:-1])):
            part.tofile(self._files[index])

    def blocks(self) -> Iterator[tuple[bool, NDArray[Any]]]:
        """Blocks of at most twice the records of a partition, and whether each begins a partition; files are deleted behind."""
        self._stack.close()
        for index in range(self._count):
            with open(self._path(index), "rb") as file:
                first = True
                while len(block := np.fromfile(file, RECORD, self._block)):
                    yield first, block
                    first = False
            self._path(index).unlink()

    def _path(self, index: int) -> Path:
        return self._folder / f"{index:03d}"


def groups(spill: Spill) -> Iterator[tuple[NDArray[Any], NDArray[np.int64]]]:
    """Records sorted by hash and row, and for each the index of the first with its hash.

    Of a partition in several blocks, the first record of every hash comes again with each later block.
    """
    kept = np.zeros(0, RECORD)
    for begins, block in spill.blocks():
        records = block if begins else np.concatenate((kept, block))
        records = records[np.lexsort((records["row"], records["low"], records["key"]))]
        new = np.ones(len(records), np.bool_)
        new[1:] = (records["key"][1:] != records["key"][:-1]) | (records["low"][1:] != records["low"][:-1])
        kept = records[new]
        yield records, np.flatnonzero(new)[np.cumsum(new) - 1]


def mark_exact(spill: Spill, exact_of: NDArray[np.int64]) -> None:
    """Write into `exact_of` the first row with the same content hash, for every row that is not the first."""
    for records, firsts in groups(spill):
        again = firsts != np.arange(len(records))
        exact_of[records["row"][again]] = records["row"][firsts[again]]
