"""Which documents of a corpus repeat an earlier one, found by any number of processes: ranges of hashes, each done once.

Every part of a corpus has its hashes and bands as sorted runs. First the ranges of content hashes are gone through, then, without
what is equal to an earlier document, those of bands. A range reads its records out of all runs, and writes the links that it
makes into a file of its own; the earliest link of a document counts. So the result does not depend on who did which range.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tasks.common.process import whole
from tasks.data.corpus import duplicates
from tasks.data.corpus.duplicates import Links, Signatures, band_records, rows_per_band
from tasks.data.corpus.pool import Told, on_processes
from tasks.data.corpus.runs import Range, Run, buckets, ranges, write_run
from tasks.data.corpus.tokens import Hashes

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
        return self.skipped * 2 * duplicates.HASHES


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
        return ranges(rows * duplicates.HASHES // rows_per_band(self.threshold)) if self.threshold else []

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
        link = self._near(runs) if step == "near" else lambda each: duplicates.equal(buckets(runs, each))

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
            return duplicates.similar(buckets(runs, wanted, without=again), values, threshold, since=self.since)

        return link

    def _signatures(self) -> Callable[[NDArray[np.int64]], Signatures]:
        @lru_cache(maxsize=OPEN_FILES)
        def opened(index: int) -> Signatures:
            part = self.parts[index]
            return np.memmap(part.signatures, np.uint16, "r", part.skipped_bytes, (part.rows, duplicates.HASHES))

        def values(rows: NDArray[np.int64]) -> Signatures:
            result = np.empty((len(rows), duplicates.HASHES), np.uint16)
            which = np.searchsorted(self.firsts, rows, "right") - 1
            for index in np.unique(which).tolist():
                chosen = np.flatnonzero(which == index)
                result[chosen] = opened(index)[rows[chosen] - self.firsts[index]]
            return result

        return values
