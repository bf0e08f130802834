"""The index of a corpus: what later corpora are compared with, without its text. An artifact of a verdict that passed.

`documents.bin`: one DOCUMENT each, in the order of the corpus. `signatures.bin`: the MinHash signature of each, in that order
(tasks/data/corpus/duplicates.py). `index.json`: how many, the names of shards, and how signatures were made. It takes about 290
bytes a document, and is read in pieces; each is a part of its own when duplicates are looked for
(tasks/data/corpus/duplicates.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus import duplicates
from tasks.data.corpus.duplicates import PIECE, Part, write_runs

DOCUMENTS, SIGNATURES, ABOUT = "documents.bin", "signatures.bin", "index.json"
DOCUMENT = np.dtype([("shard", "<i4"), ("line", "<i8"), ("shingled", "?"), ("high", "<u8"), ("low", "<u8")])
MADE = {"form": 1, "hashes": duplicates.HASHES, "shingle": duplicates.SHINGLE, "seed": duplicates.SEED}
"""How signatures are made: only those that are made alike can be compared."""


@dataclass(frozen=True)
class Index:
    """An index in a folder."""

    name: str
    folder: Path
    documents: int
    shards: tuple[str, ...]

    def pieces(self) -> list[Piece]:
        """Its documents in order, divided into units of work."""
        starts = range(0, self.documents, PIECE)
        return [Piece(self, number, start, min(PIECE, self.documents - start)) for number, start in enumerate(starts)]

    @cached_property
    def _rows(self) -> NDArray[Any]:
        return np.memmap(self.folder / DOCUMENTS, DOCUMENT, "r")

    def place_of(self, document: int) -> str:
        """`NAME: SHARD:LINE` of a document."""
        row = self._rows[document]
        return f"{self.name}: {self.shards[row['shard']]}:{row['line']}"


@dataclass(frozen=True)
class Piece:
    """Neighbouring documents of an index."""

    index: Index
    number: int
    start: int
    documents: int

    def part(self, folder: Path) -> Part:
        """Where its runs lie below a job's parts; the folder is there when they are done."""
        place = folder / f"index-{self.index.name}-{self.number:06d}"
        return Part(place, self.documents, self.index.folder / SIGNATURES, self.start)


def open_index(name: str, folder: Path) -> Index:
    """An index that was published. Raises ValueError when its signatures cannot be compared with ours."""
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    made = {key: about.get(key) for key in MADE}
    sizes = (DOCUMENTS, DOCUMENT.itemsize), (SIGNATURES, 2 * duplicates.HASHES)
    if made != MADE or any((folder / file).stat().st_size != size * about["documents"] for file, size in sizes):
        raise ValueError(
            f"index {name} was made in another way, {made}, than this release compares, {MADE}: validate its dataset again "
            "with validation.index, or take it out of validation.against"
        )
    return Index(name, folder, about["documents"], tuple(about["shards"]))


def write_part(piece: Piece, folder: Path, threshold: float | None) -> None:
    """Write the runs of a piece, unless they are there."""
    part = piece.part(folder)
    if part.folder.exists():
        return
    temporary = part.folder.with_name(f".{part.folder.name}.{os.urandom(4).hex()}")
    temporary.mkdir(parents=True)
    source, start, count = piece.index.folder, piece.start, piece.documents
    rows = np.fromfile(source / DOCUMENTS, DOCUMENT, count, offset=start * DOCUMENT.itemsize)
    values = None
    if threshold:
        values = np.memmap(source / SIGNATURES, np.uint16, "r", part.skipped_bytes, (count, duplicates.HASHES))
    write_runs(temporary, rows["high"], rows["low"], values, rows["shingled"], threshold or 0.0)
    os.replace(temporary, part.folder)


def write(folder: Path, chunks: Iterable[NDArray[Any]], signatures: Sequence[Path]) -> None:
    """Write the documents of a whole corpus, in its order: `chunks` have DOCUMENT's columns, `signatures` are files."""
    folder.mkdir()
    with open(folder / DOCUMENTS, "wb") as file:
        for rows in chunks:
            documents = np.zeros(len(rows), DOCUMENT)
            for name in DOCUMENT.names or ():
                documents[name] = rows[name]
            documents.tofile(file)
    with open(folder / SIGNATURES, "wb") as together:
        for path in signatures:
            with open(path, "rb") as file:
                shutil.copyfileobj(file, together, 1 << 20)


def publishable(whole: Path, target: Path, *, gone: NDArray[np.bool_], shards: Sequence[str]) -> int:
    """Write the index without the documents that are set aside; returns how many are left."""
    target.mkdir()
    sources = ((DOCUMENTS, DOCUMENT), (SIGNATURES, np.dtype((np.void, 2 * duplicates.HASHES))))
    for name, kind in sources:
        with open(whole / name, "rb") as source, open(target / name, "wb") as file:
            for start in range(0, len(gone), PIECE):
                stays = ~gone[start : start + PIECE]
                np.fromfile(source, kind, len(stays))[stays].tofile(file)
    documents = int((~gone).sum())
    about = {**MADE, "documents": documents, "shards": list(shards)}
    (target / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return documents
