"""Which files a corpus is made of, and the units that it is read, resumed and shared out in.

A unit is the smallest piece of work that is done again after a kill. Reading one is tasks/data/corpus/reading.py.
"""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NoReturn

Kind = Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text"]
ENDINGS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson.gz": "jsonl.gz",
    ".json.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".ndjson.zst": "jsonl.zst",
    ".json.zst": "jsonl.zst",
    ".parquet": "parquet",
}
WHEN_NAMED: dict[str, Kind] = {".json": "jsonl", ".gz": "jsonl.gz", ".zst": "jsonl.zst"}
"""Endings that mean JSON lines of a file that somebody named; met in a folder they may be anything."""
UNIT_BYTES = 64 << 20
LINE_LIMIT = 256 << 20
"""Longest line of JSON, in bytes: reading one takes three times as much memory, six times with characters beyond U+FFFF."""


@dataclass(frozen=True)
class Shard:
    """One file of a corpus, as it was when it was found."""

    path: Path
    name: str
    """Relative to the folder that was named, with `/`, or the whole path where two would be called the same: what errors and
    samples say."""
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

    A `.json`, `.gz` or `.zst` file is JSON lines when somebody named it, and text when it was merely met in a folder.
    """
    name = path.name.lower()
    endings = {**ENDINGS, **WHEN_NAMED} if named else ENDINGS
    return next((kind for ending, kind in endings.items() if name.endswith(ending)), "text")


def find_shards(patterns: Iterable[str | Path], *, text: bool = True) -> list[Shard]:
    """The files behind paths, folders and globs, in the order of the arguments and then of their names, each once.

    Without `text`, only JSON lines and Parquet of folders count. Hidden files of folders, and what is no regular file, never do.
    Raises ValueError when a pattern stands for nothing, and when something behind it cannot be read.
    """
    result: dict[Path, Shard] = {}
    for pattern in patterns:
        met = {path.resolve(): shard for root in _roots(str(pattern)) for path, shard in _shards(root, text)}
        if not met:
            wanted = "JSON lines, Parquet or text" if text else "JSON lines or Parquet"
            raise ValueError(f"{pattern} holds nothing to read; name files or folders of {wanted}")
        result.update((path, shard) for path, shard in met.items() if path not in result)
    # Shards of one name, from several folders, are called by their whole paths.
    shards = list(result.values())
    count = Counter(shard.name for shard in shards)
    return [replace(s, name=_printable(s.path.as_posix())) if count[s.name] > 1 else s for s in shards]


def cut(shards: Iterable[Shard], unit_bytes: int = UNIT_BYTES) -> list[Unit]:
    """Divide shards into units: every file once, in order, the same for the same files."""
    units: list[Unit] = []
    gathered: list[Piece] = []
    held = 0
    for piece in (piece for shard in shards for piece in _pieces(shard, unit_bytes)):
        if gathered and held + piece.bytes > unit_bytes:
            units.append(Unit(len(units), tuple(gathered)))
            gathered, held = [], 0
        gathered.append(piece)
        held += piece.bytes
    return [*units, Unit(len(units), tuple(gathered))] if gathered else units


def line_of(piece: Piece, line: int) -> int:
    """The line within its shard of a line counted from the piece's beginning, both from 1; of a Parquet file the row.

    The first call for a piece reads the shard up to it; the answer is kept.
    """
    return line + _lines_before(piece.shard, piece.start) if piece.start else line


@lru_cache(maxsize=4096)
def _lines_before(shard: Shard, start: int) -> int:
    if shard.kind == "parquet":
        from tasks.data.corpus.parquet import rows_before

        return rows_before(shard, start)
    lines = 0
    with open(shard.path, "rb") as file:
        while start > 0 and (block := file.read(min(start, 1 << 20))):
            start -= len(block)
            lines += block.count(b"\n")
    return lines


def _roots(pattern: str) -> list[Path]:
    if not pattern:
        raise ValueError("an empty name stands for no file; name files, folders or a glob")
    path = Path(pattern)
    if path.exists():
        return [path]
    if results := sorted(glob.glob(pattern, recursive=True)):
        return [Path(name) for name in results]
    raise ValueError(f"{pattern} does not exist and matches nothing; name files, folders or a glob")


def _shards(root: Path, text: bool) -> Iterator[tuple[Path, Shard]]:
    named = not root.is_dir()
    for path in [root] if named else _files(root):
        try:
            status = path.stat()
        except OSError as error:
            _refuse(error)
        kind = kind_of(path, named=named)
        if stat.S_ISREG(status.st_mode) and (text or named or kind != "text"):
            name = _printable(path.name if named else path.relative_to(root).as_posix())
            yield path, Shard(path, name, kind, status.st_size, status.st_mtime_ns)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(files) if not name.startswith("."))


def _refuse(error: OSError) -> NoReturn:
    """A folder that cannot be listed, or a link to nothing, is not passed over: documents would be missing."""
    raise ValueError(f"{error.filename} cannot be read: {error.strerror}; fix it or leave it out") from error


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()


def _pieces(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    if shard.kind == "parquet":
        yield from _row_groups(shard, unit_bytes)
    elif shard.kind != "jsonl" or shard.size <= unit_bytes:
        yield Piece(shard, 0, shard.size, shard.size)
    else:
        yield from _line_ranges(shard, unit_bytes)


def _row_groups(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    from tasks.data.corpus.parquet import row_groups

    count = row_groups(shard)
    if not count:
        yield Piece(shard, 0, 0, shard.size)
        return
    step = max(1, count * unit_bytes // max(shard.size, 1))
    for first in range(0, count, step):
        stop = min(first + step, count)
        yield Piece(shard, first, stop, shard.size * stop // count - shard.size * first // count)


def _line_ranges(shard: Shard, unit_bytes: int) -> Iterator[Piece]:
    """Pieces of about `unit_bytes` that begin after a line feed. Raises ValueError when the file cannot be opened."""
    try:
        file = open(shard.path, "rb")  # noqa: SIM115
    except OSError as error:
        _refuse(error)
    with file:
        start = 0
        while start < shard.size:
            stop = min(start + unit_bytes, shard.size)
            if stop < shard.size:
                file.seek(stop - 1)
                # The position after the next line feed, or the end; the line itself may be of any length.
                while part := file.readline(1 << 20):
                    if part.endswith(b"\n"):
                        break
                stop = file.tell()
            yield Piece(shard, start, stop, stop - start)
            start = stop
