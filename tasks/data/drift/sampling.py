"""Which documents of a corpus are looked at, and what is counted of all of them: one pass, flat memory.

A document's key is a seeded hash of its content, and those with the lowest keys are looked at: whoever orders or divides the
files in another way looks at the same ones. A copy of an earlier document has a key of its own, of content and place, so that
a document that is there a thousand times is a thousand documents. What is measured of them: tasks/data/drift/features.py.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus import measures
from tasks.data.corpus.inputs import Shard, Unit, cut
from tasks.data.corpus.measures import CLASSES, Texts, content_hashes
from tasks.data.corpus.pool import on_processes
from tasks.data.corpus.reading import Batch, read_unit
from tasks.data.corpus.tokens import STEP, Hashes, mixed

HEAD = 4096
"""Characters at the beginning of a document that are looked at; its length is of the whole."""
UNIT = 8 << 20
EVERY = slice(None)
POLL_SECONDS = 0.1
CHUNK = 1 << 20
"""Hashes that are in memory at once: 8 MB."""
CANDIDATE = np.dtype(
    [("first", "<u8"), ("copy", "<u8"), ("hash", "<u8"), ("place", "<i8"), ("length", "<i8"), ("start", "<i8"), ("stop", "<i8")]
)  # fmt: skip
"""`first` and `copy`: the key of the first document of its content, and of a later one; `place` within the unit, from 0; `start`
and `stop`: where its head lies in the file of heads."""


@dataclass(frozen=True)
class Drawn:
    """The documents that are looked at, in the order of their keys, and totals of all."""

    documents: int
    bytes: int
    """Of the text, in UTF-8."""
    unreadable: int
    """Lines that are no document."""
    classes: NDArray[np.int64]
    """Characters of all documents by class (tasks/data/corpus/measures.py)."""
    heads: list[str]
    lengths: NDArray[np.int64]
    """Characters of each document that is looked at, the whole of it."""
    hashes: Hashes
    earlier: NDArray[np.int64]
    """How many documents of the same content stand before each in the corpus."""


@dataclass
class _Lowest:
    """What one process knows of the lowest keys so far: no document above `limit` can be among the lowest of the corpus."""

    most: int
    upper: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))
    firsts: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))

    def add(self, upper: Hashes, firsts: Hashes) -> np.uint64:
        """`upper`: no document's key is higher; `firsts`: keys of distinct contents. Returns the limit."""
        self.upper = np.sort(np.concatenate((self.upper, upper)))[: self.most]
        self.firsts = np.unique(np.concatenate((self.firsts, firsts)))[: self.most]
        known = [keys[-1] for keys in (self.upper, self.firsts) if len(keys) == self.most]
        return np.uint64(min(known, default=np.uint64(2**64 - 1)))


def draw(
    corpora: Sequence[Sequence[Shard]],
    folder: Path,
    *,
    text_field: str,
    most: int,
    seed: int,
    workers: int,
    report: Callable[[int], None] = lambda read: None,
    share: slice = EVERY,
) -> list[Drawn]:
    """Read corpora to their ends and draw `most` documents of each; `report` hears the bytes that were read.

    With a `share` only those units are read: the call comes back once others, who share the folder, have read the rest.
    Raises ValueError when a file cannot be read on. In `folder` lie 8 bytes a document, and the heads of candidates.
    """
    units = read_units(
        corpora, folder, text_field=text_field, most=most, seed=seed, workers=workers, report=report, share=share
    )
    parts = [[_part(folder, side, unit) for of, unit in units if of == side] for side in range(len(corpora))]
    for part in (part for each in parts for part in each):
        while not _whole(part):
            time.sleep(POLL_SECONDS)
    return [_gather(each, most) for each in parts]


def read_units(
    corpora: Sequence[Sequence[Shard]],
    folder: Path,
    *,
    text_field: str,
    most: int,
    seed: int,
    workers: int,
    report: Callable[[int], None] = lambda read: None,
    share: slice = EVERY,
) -> list[tuple[int, Unit]]:
    """Read a share of the units of all corpora, but not those that were read before; returns all units, each with its side."""
    units = [(side, unit) for side, shards in enumerate(corpora) for unit in cut(shards, UNIT)]
    lowest = [_Lowest(most) for _ in corpora]
    mine = units[share]
    left = [(side, unit) for side, unit in mine if not _whole(_part(folder, side, unit))]

    def do(item: tuple[int, Unit], report: Callable[[int], None]) -> None:
        side, unit = item
        part = _part(folder, side, unit)
        temporary = part.with_name(f".{part.name}")
        for old in (temporary, part):
            shutil.rmtree(old, ignore_errors=True)
        temporary.mkdir(parents=True)
        _read(unit, temporary, lowest[side], text_field=text_field, seed=seed, report=report)
        os.replace(temporary, part)

    already = sum(unit.bytes for _, unit in mine) - sum(unit.bytes for _, unit in left)
    on_processes(left, do, workers=workers, already=already, report=report)
    return units


def _whole(part: Path) -> bool:
    """Whether a part is there with all of its files: where machines share no folder, they come one by one."""
    try:
        files = json.loads((part / "totals.json").read_text(encoding="utf-8"))["files"]
        return all((part / name).stat().st_size == size for name, size in files.items())
    except FileNotFoundError:
        return False


def earlier_copies(hashes: Hashes) -> NDArray[np.int64]:
    """Of each document, how many of the same content stand before it."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    result = np.empty(len(hashes), np.int64)
    result[order] = np.arange(len(hashes)) - np.searchsorted(ranked, ranked, side="left")
    return result


def _part(folder: Path, side: int, unit: Unit) -> Path:
    return folder / f"{side}-{unit.index:06d}"


def _read(
    unit: Unit, part: Path, lowest: _Lowest, *, text_field: str, seed: int, report: Callable[[int], None]
) -> None:
    """Write a unit's hashes, candidates and totals."""
    documents = size = unreadable = 0
    classes = np.zeros(len(CLASSES), np.int64)
    seen: set[int] = set()
    with (
        open(part / "hashes", "wb") as hashes,
        open(part / "candidates", "wb") as rows,
        open(part / "heads", "wb") as heads,
    ):
        for batch in read_unit(unit, (text_field,)):
            unreadable += len(batch.bad)
            if batch.lines:
                texts = Texts.of(batch.texts)
                result = _candidates(texts, unit, documents, seen, seed=seed)
                distinct = result["first"][result["first"] != result["copy"]]
                limit = lowest.add(np.maximum(result["first"], result["copy"]), distinct)
                chosen = np.flatnonzero(np.minimum(result["first"], result["copy"]) <= limit)
                result["hash"].tofile(hashes)
                _write_heads(batch, result, chosen, heads)
                result[chosen].tofile(rows)
                documents, size = documents + len(result), size + int(texts.sizes.sum())
                classes += measures.classes(texts.histogram)
            report(batch.bytes)
    files = {path.name: path.stat().st_size for path in part.iterdir()}
    output = {
        "documents": documents,
        "bytes": size,
        "unreadable": unreadable,
        "classes": classes.tolist(),
        "files": files,
    }
    (part / "totals.json").write_text(json.dumps(output), encoding="utf-8")


def _candidates(texts: Texts, unit: Unit, before: int, seen: set[int], *, seed: int) -> NDArray[np.void]:
    """All documents of a batch as candidates. One whose content the unit has had already has only its key as a copy."""
    result = np.zeros(len(texts.texts), CANDIDATE)
    result["hash"] = content_hashes(texts)[:, 1]
    result["place"] = np.arange(before, before + len(result))
    result["length"] = texts.characters
    first, place = (
        keys(result["hash"], seed),
        result["place"].astype(np.uint64) + (np.uint64(unit.index + 1) << np.uint64(40)),
    )
    result["copy"] = mixed(first + place * np.uint64(STEP))
    again = np.fromiter((_met(value, seen) for value in result["hash"].tolist()), np.bool_, len(result))
    result["first"] = np.where(again, result["copy"], first)
    return result


def keys(hashes: Hashes, seed: int) -> Hashes:
    """The keys of the first documents of some contents."""
    return mixed(hashes ^ mixed(np.array([seed + 1], np.uint64)))


def _met(value: int, seen: set[int]) -> bool:
    if value in seen:
        return True
    seen.add(value)
    return False


def _write_heads(batch: Batch, result: NDArray[np.void], chosen: NDArray[np.intp], file: IO[bytes]) -> None:
    texts = batch.texts
    for row in chosen.tolist():
        data = texts[row][:HEAD].encode()
        result["start"][row] = file.tell()
        file.write(data)
        result["stop"][row] = result["start"][row] + len(data)


def _gather(parts: Sequence[Path], most: int) -> Drawn:
    """The lowest keys of all parts; which candidates are copies of earlier documents, the hashes of all say."""
    totals = [json.loads((part / "totals.json").read_text(encoding="utf-8")) for part in parts]
    begins = np.cumsum([0, *(each["documents"] for each in totals)])
    read = [np.fromfile(part / "candidates", CANDIDATE) for part in parts]
    rows = np.concatenate([np.zeros(0, CANDIDATE), *read])
    of = np.repeat(np.arange(len(parts)), [len(each) for each in read])
    places = rows["place"] + begins[of]
    earlier = _earlier(parts, rows["hash"], places)
    final = np.where(earlier > 0, rows["copy"], rows["first"])
    chosen = np.lexsort((places, final))[:most]
    return Drawn(
        documents=int(begins[-1]),
        bytes=sum(each["bytes"] for each in totals),
        unreadable=sum(each["unreadable"] for each in totals),
        classes=np.sum([each["classes"] for each in totals], axis=0, dtype=np.int64) + np.zeros(len(CLASSES), np.int64),
        heads=_heads(parts, rows[chosen], of[chosen]),
        lengths=rows["length"][chosen],
        hashes=rows["hash"][chosen],
        earlier=earlier[chosen],
    )


def _earlier(parts: Sequence[Path], hashes: Hashes, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many documents of the same content stand before each place, from the hashes of all documents, read in chunks."""
    order = np.lexsort((places, hashes))
    hashes_, places_ = hashes[order], places[order]
    distinct = np.unique(hashes_)
    count = np.zeros(len(hashes_), np.int64)
    begin = 0
    for part in parts:
        with open(part / "hashes", "rb") as file:
            while len(chunk := np.fromfile(file, np.uint64, CHUNK)):
                _count(chunk, begin, distinct, hashes_, places_, count)
                begin += len(chunk)
    result = np.empty_like(count)
    result[order] = count
    return result


def _count(
    chunk: Hashes, begin: int, distinct: Hashes, hashes: Hashes, places: NDArray[np.int64], count: NDArray[np.int64]
) -> None:
    """Add to `count` the documents of a chunk that stand before candidates of the same content."""
    if not len(distinct):
        return
    at = np.minimum(np.searchsorted(distinct, chunk), len(distinct) - 1)
    met = np.flatnonzero(distinct[at] == chunk)
    group = at[met]
    order = np.argsort(group, kind="stable")
    group, met = group[order], met[order] + begin
    width = int(max(places.max(), met.max(initial=0))) + 1
    combined = group * width + met
    wanted = np.searchsorted(distinct, hashes)
    low = np.searchsorted(combined, wanted * width)
    count += np.searchsorted(combined, wanted * width + places) - low


def _heads(parts: Sequence[Path], rows: NDArray[np.void], of: NDArray[np.int64]) -> list[str]:
    heads = [""] * len(rows)
    for number in np.unique(of).tolist():
        with open(parts[number] / "heads", "rb") as file:
            for row in np.flatnonzero(of == number).tolist():
                file.seek(int(rows["start"][row]))
                heads[row] = file.read(int(rows["stop"][row] - rows["start"][row])).decode()
    return heads
