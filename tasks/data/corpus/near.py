"""Which documents nearly repeat an earlier one: MinHash signatures, candidates by bands, verified by the signatures.

A document is the set of its runs of 5 words (tasks/data/corpus/tokens.py); similarity is Jaccard's. rensa makes 128 hashes, of
which 16 bits each are kept (Li and Koenig 2010, b-bit minwise hashing: unequal ones agree once in 65,536): 256 bytes a
document on disk. The estimate's standard deviation is sqrt(s (1 - s) / 128), 0.035 at 0.8. Documents of fewer than 5 words
have no signature: only equal ones are found. rensa lives here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.duplicates import RECORD, Spill, groups
from tasks.data.corpus.tokens import Words, mixed, ngrams

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
