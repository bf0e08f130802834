"""Which documents equal an earlier one, or nearly repeat it: MinHash signatures, candidates by bands, verified by signatures.

A document is the set of its runs of 5 words (tasks/data/corpus/tokens.py); similarity is Jaccard's. rensa makes 128 hashes, of
which 16 bits each are kept (Li and Koenig 2010, b-bit minwise hashing: unequal ones agree once in 65,536): 256 bytes a
document on disk. The estimate's standard deviation is sqrt(s (1 - s) / 128), 0.035 at 0.8. Documents of fewer than 5 words
have no signature: only equal ones are found. rensa lives here; who looks at which hashes is tasks/data/corpus/linking.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus.runs import NEIGHBOURS, RECORD
from tasks.data.corpus.tokens import Words, mixed, ngrams

HASHES = 128
SHINGLE = 5
SEED = 42
AT_ONCE = 2048
"""Documents whose hashes are Python numbers at one time: 10 MB."""
CHUNK = 16_384
Signatures = NDArray[np.uint16]
_process: dict[str, int] = {}
"""The id of the process in which rensa has started its threads, as `first`."""


def signatures(words: Words) -> tuple[Signatures, NDArray[np.bool_]]:
    """A signature a document, shape [documents, HASHES], and whether the document has one (5 words or more).

    Raises RuntimeError in a process forked from one that has called it: rensa's threads are gone there, and it would wait for
    them without end.
    """
    from rensa import RMinHash

    if (first := _process.setdefault("first", os.getpid())) != os.getpid():
        raise RuntimeError(
            f"process {first} made signatures before it forked this one: make them in one of the two only"
        )

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


Buckets = Iterable[tuple[NDArray[Any], NDArray[np.int64]]]
"""Records sorted by hash and row, and of each the index of the first with its hash."""
LINK = np.dtype([("row", "<i8"), ("of", "<i8"), ("similarity", "<f4")])
"""A row, the earlier one that it repeats, and how similar they are."""
Links = NDArray[Any]


def equal(buckets: Buckets) -> Links:
    """The first row with the same hash, of every row that is not the first."""
    return joined([_equal(records, firsts) for records, firsts in buckets])


def _equal(records: NDArray[Any], firsts: NDArray[np.int64]) -> Links:
    again = np.flatnonzero(firsts != np.arange(len(records)))
    links = np.zeros(len(again), LINK)
    links["row"], links["of"], links["similarity"] = records["row"][again], records["row"][firsts[again]], 1.0
    return links


def similar(
    buckets: Buckets, values: Callable[[NDArray[np.int64]], Signatures], threshold: float, *, since: int = 0
) -> Links:
    """Of rows from `since` on, the earliest row met with a similarity from the threshold on; `values` looks signatures up.

    A row is compared with the first of its bucket and the NEIGHBOURS before it: linear, not quadratic.
    """
    return joined([_similar(records["row"], firsts, values, threshold, since) for records, firsts in buckets])


def joined(links: Iterable[Links]) -> Links:
    """Of each row the link to the earliest one, in the order of rows: the same in whatever order links come."""
    every = np.concatenate([np.zeros(0, LINK), *links])
    every = every[np.lexsort((every["of"], every["row"]))]
    first = np.ones(len(every), np.bool_)
    first[1:] = every["row"][1:] != every["row"][:-1]
    return every[first]


def _similar(
    rows: NDArray[np.int64],
    firsts: NDArray[np.int64],
    values: Callable[[NDArray[np.int64]], Signatures],
    threshold: float,
    since: int,
) -> Links:
    known, place = np.unique(rows, return_inverse=True)
    earliest, similarity = np.full(len(known), known.max(initial=0) + 1), np.zeros(len(known), np.float32)
    for later, earlier in _candidates(rows, firsts):
        open_ = (rows[later] >= since) & (rows[earlier] < earliest[place[later]])
        pairs = np.unique(np.stack((place[later[open_]], place[earlier[open_]]), axis=1), axis=0)
        for start in range(0, len(pairs), CHUNK):
            one, other = pairs[start : start + CHUNK].T
            share = (values(known[one]) == values(known[other])).mean(axis=1, dtype=np.float32)
            near = share >= threshold
            one, other, share = one[near], other[near], share[near]
            one, first = np.unique(one, return_index=True)  # pairs are sorted: the first is the earliest
            better = known[other[first]] < earliest[one]
            earliest[one[better]] = known[other[first][better]]
            similarity[one[better]] = share[first][better]
    linked = np.flatnonzero(similarity)
    links = np.zeros(len(linked), LINK)
    links["row"], links["of"], links["similarity"] = known[linked], earliest[linked], similarity[linked]
    return links


def _candidates(
    rows: NDArray[np.int64], firsts: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Pairs of a record and an earlier one of its bucket: the first, then each of the NEIGHBOURS before it."""
    index = np.arange(len(rows))
    for others in (firsts, *(index - back for back in range(1, NEIGHBOURS + 1))):
        fits = np.flatnonzero((others >= firsts) & (others < index))
        fits = fits[rows[others[fits]] < rows[fits]]
        yield fits, others[fits]
