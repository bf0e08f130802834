"""Which documents equal an earlier one, or nearly repeat it: MinHash signatures, candidates by bands, verified by signatures.

A document is the set of its runs of 5 words (tasks/data/corpus/tokens.py); similarity is Jaccard's. rensa makes 128 hashes, of
which 16 bits each are kept (Li and Koenig 2010, b-bit minwise hashing: unequal ones agree once in 65,536): 256 bytes a
document on disk. The estimate's standard deviation is sqrt(s (1 - s) / 128), 0.035 at 0.8. Documents of fewer than 5 words
have no signature: only equal ones are found. rensa lives here.

Any number of processes finds them, by ranges of hashes, each done once. Every part of a corpus has its hashes and bands as sorted
runs (runs.py). First the ranges of content hashes are gone through, then, without what is equal to an earlier document, those of
bands. A range reads its records out of all runs, and writes the links that it makes into a file of its own; the earliest link of
a document counts. So the result does not depend on who did which range.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tasks.common.process import whole
from tasks.data.corpus.pool import Told, on_processes
from tasks.data.corpus.runs import NEIGHBOURS, RECORD, Range, Run, buckets, ranges, write_run
from tasks.data.corpus.tokens import Hashes, Words, mixed, ngrams

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
    parts = []
    for records, firsts in buckets:
        again = np.flatnonzero(firsts != np.arange(len(records)))
        links = np.zeros(len(again), LINK)
        links["row"], links["of"], links["similarity"] = records["row"][again], records["row"][firsts[again]], 1.0
        parts.append(links)
    return joined(parts)


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


PIECE = 1 << 17
"""Documents of a run: about 60 MB are held while it is sorted."""
OPEN_FILES = 1024
Step = Literal["exact", "near"]
STEPS: tuple[Step, ...] = ("exact", "near")


def write_runs(
    folder: Path, high: Hashes, low: Hashes, values: Signatures | None, signed: NDArray[np.bool_], threshold: float
) -> None:
    """Write a part's runs: of the content hashes, and of the bands of documents that have a signature."""
    for number, start in enumerate(range(0, len(high), PIECE)):
        rows = np.arange(start, min(start + PIECE, len(high)))
        write_run(folder / f"exact-{number:03d}.run", high[rows], rows, low[rows])
        if values is not None and len(chosen := rows[signed[rows]]):
            records = band_records(chosen, values[chosen], rows_per_band(threshold))
            write_run(folder / f"near-{number:03d}.run", records["key"], records["row"])


@dataclass(frozen=True)
class Part:
    """Documents with their runs in a folder."""

    folder: Path
    rows: int
    signatures: Path
    """File of the signatures, one after the other."""
    skipped: int = 0
    """Signatures in the file before the part's first."""

    @property
    def skipped_bytes(self) -> int:
        return self.skipped * 2 * HASHES


@dataclass(frozen=True)
class Linking:
    """What is looked for among the parts of a corpus, and where the links of each range lie."""

    parts: tuple[Part, ...]
    folder: Path
    threshold: float | None
    """Similarity from which documents are near duplicates; None: only equal ones are looked for."""
    since: int = 0
    """The corpus's first document; those before it are of earlier corpora."""

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The first row of each part, and the count of all rows."""
        return np.cumsum([0, *(part.rows for part in self.parts)])

    def ranges(self, step: Step) -> list[Range]:
        """The units of work of a step."""
        rows = int(self.firsts[-1])
        if step == "exact":
            return ranges(rows)
        return ranges(rows * HASHES // rows_per_band(self.threshold)) if self.threshold else []

    def links_of(self, step: Step, wanted: Range) -> Path:
        """The file of a range's links; it is there when the range is done."""
        return self.folder / f"{step}-{wanted.index:06d}.npz"

    def done(self, step: Step, wanted: Range) -> bool:
        """Whether a range's links are there."""
        return self.links_of(step, wanted).exists()

    def do(self, step: Step, wanted: Sequence[Range], *, workers: int = 1, report: Told = lambda count: None) -> None:
        """Go through ranges of a step, unless they are done, on processes of their own; `report` hears how many are.

        Before `near`, all ranges of `exact` must be done, whoever does them.
        """
        left = [each for each in wanted if not self.done(step, each)]
        if not left:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        runs = self._runs(step)
        link = self._near(runs) if step == "near" else lambda each: equal(buckets(runs, each))

        def do(each: Range, report: Told) -> None:
            began = time.process_time()
            links = link(each)
            with whole(self.links_of(step, each)) as file:
                np.savez(file, links=links, seconds=time.process_time() - began)
            report(1)

        on_processes(left, do, workers=workers, already=len(wanted) - len(left), report=report)

    def read(self, step: Step) -> Iterator[tuple[Links, float]]:
        """The links of each range, and the seconds of a processor that finding them took. All ranges must be done."""
        for wanted in self.ranges(step):
            with np.load(self.links_of(step, wanted), allow_pickle=False) as file:
                yield file["links"], float(file["seconds"])

    def _runs(self, step: Step) -> list[Run]:
        runs = []
        for part, first in zip(self.parts, self.firsts.tolist(), strict=False):
            paths = sorted(part.folder.glob(f"{step}-*.run"))
            runs += [Run(path, first, wide=step == "exact") for path in paths]
        return runs

    def _near(self, runs: Sequence[Run]) -> Callable[[Range], Links]:
        assert self.threshold is not None
        threshold, values, again = self.threshold, self._signatures(), np.zeros(self.firsts[-1], np.bool_)
        for links, _ in self.read("exact"):
            again[links["row"]] = True

        def link(wanted: Range) -> Links:
            return similar(buckets(runs, wanted, without=again), values, threshold, since=self.since)

        return link

    def _signatures(self) -> Callable[[NDArray[np.int64]], Signatures]:
        @lru_cache(maxsize=OPEN_FILES)
        def opened(index: int) -> Signatures:
            part = self.parts[index]
            return np.memmap(part.signatures, np.uint16, "r", part.skipped_bytes, (part.rows, HASHES))

        def values(rows: NDArray[np.int64]) -> Signatures:
            result = np.empty((len(rows), HASHES), np.uint16)
            which = np.searchsorted(self.firsts, rows, "right") - 1
            for index in np.unique(which).tolist():
                chosen = np.flatnonzero(which == index)
                result[chosen] = opened(index)[rows[chosen] - self.firsts[index]]
            return result

        return values
