"""Which documents equal an earlier one, or nearly repeat it: MinHash signatures, candidates by bands, verified by signatures.

A document is the set of its runs of 5 words (tasks/data/corpus/tokens.py); similarity is Jaccard's. rensa makes 128 hashes, of
which 16 bits each are kept (Li and Koenig 2010, b-bit minwise hashing: unequal ones agree once in 65,536): 256 bytes a
document on disk. The estimate's standard deviation is sqrt(s (1 - s) / 128), 0.035 at 0.8. Documents of fewer than 5 words
have no signature: only equal ones are found. rensa lives here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.tokens import Words, mixed, ngrams

# Which documents are equal, in a stated bound of memory: records are spilled to files by hash, each file sorted alone.
#
# A partition holds about PARTITION records (up to MOST_PARTITIONS of them, 5 * 10^8 records), and one that holds more
# than twice as many, copies of one document, is read in blocks. In memory are 24 bytes a record of a block and of its
# distinct hashes, and about as much again for sorting: 150 MB.


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


HASHES = 128
SHINGLE = 5
SEED = 42
NEIGHBOURS = 4
"""Records before it in its bucket that a document is compared with, beside the bucket's first: linear, not quadratic."""
AT_ONCE = 2048
"""Documents whose hashes are Python numbers at one time: 10 MB."""
CHUNK = 16_384
Signatures = NDArray[np.uint16]


def signatures(words: Words) -> tuple[Signatures, NDArray[np.bool_]]:
    """A signature a document, shape [documents, HASHES], and whether the document has one (5 words or more)."""
    from rensa import RMinHash

    shingles = ngrams(words, SHINGLE)
    values = np.zeros((len(words.bounds) - 1, HASHES), np.uint16)
    for start in range(0, len(values), AT_ONCE):
        bounds = shingles.bounds[start : start + AT_ONCE + 1]
        hashes = shingles.hashes[bounds[0] : bounds[-1]]
        made = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes, (bounds - bounds[0]).astype(np.uint64), HASHES, SEED
        )
        values[start : start + AT_ONCE] = np.array(made.to_rows(), np.uint32)
    return values, np.diff(shingles.bounds) > 0


def rows_per_band(threshold: float) -> int:
    """Hashes a band: a pair is found with chance 1 - (1 - s^r)^(128 / r).

    From a threshold of 0.8 on 8 in 16 bands: 95 % at s = 0.8, 99.99 % at 0.9. Below, 4 in 32 bands: 87 % at 0.5.
    """
    return 8 if threshold >= 0.8 else 4


def band_records(rows: NDArray[np.int64], values: Signatures, per_band: int) -> NDArray[Any]:
    """One record a document and band, in the order of rows; equal bands have equal keys."""
    parts = np.ascontiguousarray(values).view(np.uint64).reshape(len(values), HASHES // per_band, per_band // 4)
    keys = np.arange(HASHES // per_band, dtype=np.uint64)[None, :] * np.uint64(0xA24BAED4963EE407)
    for index in range(parts.shape[2]):
        keys = mixed(keys ^ mixed(parts[:, :, index]))
    records = np.zeros(keys.size, RECORD)
    records["key"], records["row"] = keys.ravel(), np.repeat(rows, keys.shape[1])
    return records


def mark_near(
    spill: Spill, values: Signatures, threshold: float, near_of: NDArray[np.int64], similarity: NDArray[np.float32]
) -> None:
    """Write into `near_of` the earliest row found with a similarity from the threshold on, and into `similarity` how near."""
    for records, firsts in groups(spill):
        for rows, others in _candidates(records["row"], firsts):
            known = near_of[rows]
            open_ = (known < 0) | (others < known)
            _verify(rows[open_], others[open_], values, threshold, near_of, similarity)


def _candidates(
    rows: NDArray[np.int64], firsts: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of a row and an earlier one of its bucket: the first, then each of the NEIGHBOURS before it."""
    index = np.arange(len(rows))
    for others in (firsts, *(index - back for back in range(1, NEIGHBOURS + 1))):
        fits = (others >= firsts) & (others < index)
        later, earlier = rows[index[fits]], rows[others[fits]]
        differ = earlier < later
        yield later[differ], earlier[differ]


def _verify(
    rows: NDArray[np.int64],
    others: NDArray[np.int64],
    values: Signatures,
    threshold: float,
    near_of: NDArray[np.int64],
    similarity: NDArray[np.float32],
) -> None:
    pairs = np.unique(np.stack((rows, others), axis=1), axis=0)
    for start in range(0, len(pairs), CHUNK):
        later, earlier = pairs[start : start + CHUNK].T
        share = (values[later] == values[earlier]).mean(axis=1, dtype=np.float32)
        near = share >= threshold
        later, earlier, share = later[near], earlier[near], share[near]
        later, first = np.unique(later, return_index=True)  # pairs are sorted: the first is the earliest
        better = (near_of[later] < 0) | (earlier[first] < near_of[later])
        near_of[later[better]] = earlier[first][better]
        similarity[later[better]] = share[first][better]


def open_signatures(path: Path, rows: int) -> Signatures:
    """Signatures of all documents as they lie on disk; the pages that are read can be given back at any time."""
    if not rows:
        return np.zeros((0, HASHES), np.uint16)
    return np.memmap(path, np.uint16, "r", shape=(rows, HASHES))
