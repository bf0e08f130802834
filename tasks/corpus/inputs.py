"""Which files a corpus is made of, and the units that it is read, resumed and shared out in.

A unit is the smallest piece of work that is done again after a kill. Reading one is tasks/corpus/reading.py.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text"]
ENDINGS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
}
UNIT_BYTES = 64 << 20
LINE_LIMIT = 256 << 20
"""Longest line of JSON, in bytes: reading one takes about four times as much memory."""


@dataclass(frozen=True)
class Shard:
    """One file of a corpus, as it was when it was found."""

    path: Path
    name: str
    """Relative to the folder that was named, with `/`: what errors and samples say."""
    kind: Kind
    size: int
    """Bytes on disk."""
    modified: int
    """Time of its last change, in ns since 1970."""

    def require_unchanged(self) -> None:
        """Raise ValueError when the file is no longer the one that was found."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise ValueError(f"{self.name} was deleted while it was being read; start again") from None
        if (status.st_size, status.st_mtime_ns) != (self.size, self.modified):
            raise ValueError(
                f"{self.name} was changed while it was being read: {self.size} bytes when it was found, "
                f"{status.st_size} now; start again when nobody writes to it"
            )


@dataclass(frozen=True)
class Piece:
    """Part of a shard: bytes `start` to `stop` of JSON lines, row groups of Parquet, or the whole file."""

    shard: Shard
    start: int
    stop: int
    bytes: int
    """On disk; of a Parquet file its share by row groups."""


@dataclass(frozen=True)
class Unit:
    """Neighbouring pieces that are read as one: about UNIT_BYTES on disk, many small files or part of a large one."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


def kind_of(path: Path, *, named: bool = True) -> Kind:
    """How a file is read, by its name; what is no known container is plain text.

    A `.json` file is JSON lines when somebody named it, and text when it was merely met in a folder.
    """
    name = path.name.lower()
    if not named and name.endswith(".json"):
        return "text"
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), "text")


def find_shards(patterns: Iterable[str | Path], *, text: bool = True) -> list[Shard]:
    """The files behind paths, folders and globs, in the order of the arguments and then of their names, each once.

    Without `text`, only JSON lines and Parquet of folders count. Hidden files of folders never do.
    Raises ValueError when a pattern stands for nothing.
    """
    found: dict[Path, Shard] = {}
    for pattern in patterns:
        before = len(found)
        for root in _roots(str(pattern)):
            for path in _files(root):
                shard = _shard(path, root)
                if text or root.is_file() or shard.kind != "text":
                    found.setdefault(path.resolve(), shard)
        if len(found) == before:
            raise ValueError(f"{pattern} stands for no file that is not named already; name JSONL, Parquet or text")
    return list(found.values())


def cut(shards: Iterable[Shard], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Divide shards into units: every file once, in order, the same for the same files."""
    units: list[Unit] = []
    gathered: list[Piece] = []
    for piece in (piece for shard in shards for piece in _pieces(shard, unit_bytes)):
        if gathered and sum(p.bytes for p in gathered) + piece.bytes > unit_bytes:
            units.append(Unit(len(units), tuple(gathered)))
            gathered = []
        gathered.append(piece)
    return [*units, Unit(len(units), tuple(gathered))] if gathered else units


def line_of(piece: Piece, line: int) -> int:
    """The line within its shard of a line counted from the piece's beginning, both from 1."""
    if piece.shard.kind != "jsonl" or piece.start == 0:
        return line
    with open(piece.shard.path, "rb") as file:
        return line + sum(block.count(b"\n") for block in _blocks(file, piece.start))


def _roots(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.exists():
        return [path]
    if found := sorted(glob.glob(pattern, recursive=True)):
        return [Path(name) for name in found]
    raise ValueError(f"{pattern} does not exist and matches nothing; name files, folders or a glob")


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(files) if not name.startswith("."))


def _shard(path: Path, root: Path) -> Shard:
    status = path.stat()
    name = path.name if root.is_file() else path.relative_to(root).as_posix()
    return Shard(path, name, kind_of(path, named=root.is_file()), status.st_size, status.st_mtime_ns)


def _pieces(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    if shard.kind == "parquet":
        yield from _row_groups(shard, unit_bytes)
    elif shard.kind != "jsonl" or shard.size <= unit_bytes:
        yield Piece(shard, 0, shard.size, shard.size)
    else:
        yield from _line_ranges(shard, unit_bytes)


def _row_groups(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    from tasks.corpus.parquet import row_groups

    count = row_groups(shard)
    step = max(1, count * unit_bytes // max(shard.size, 1))
    for first in range(0, count, step):
        stop = min(first + step, count)
        yield Piece(shard, first, stop, shard.size * (stop - first) // count)


def _line_ranges(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    """Pieces of about `unit_bytes` that begin after a line feed."""
    start = 0
    with open(shard.path, "rb") as file:
        while start < shard.size:
            stop = min(start + unit_bytes, shard.size)
            if stop < shard.size:
                file.seek(stop - 1)
                stop = _after_line(file)
            yield Piece(shard, start, stop, stop - start)
            start = stop


def _after_line(file: BinaryIO) -> int:
    """The position after the next line feed, or the end; the line itself may be of any length."""
    while part := file.readline(1 << 20):
        if part.endswith(b"\n"):
            break
    return file.tell()


def _blocks(file: BinaryIO, stop: int) -> Iterator[bytes]:
    while stop > 0 and (block := file.read(min(stop, 1 << 20))):
        stop -= len(block)
        yield block
