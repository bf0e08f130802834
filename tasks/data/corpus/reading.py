"""Reading a corpus: documents in batches of bounded size, each with its place; what is no document is told, not lost.

How JSON lines are taken apart: tasks/data/corpus/json_lines.py; Parquet: tasks/data/corpus/parquet.py. Nothing is judged here.
"""

from __future__ import annotations

import io
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from tasks.data.corpus.inputs import LINE_LIMIT, Piece, Unit, line_of
from tasks.data.corpus.json_lines import BLOCK_BYTES, KEPT, UNREADABLE, blocks, decode

# Files as streams of decoded bytes: plain, gzip and zstd, of one member or many; a cut one is told.
#
# The gzip module reads at two thirds of this speed, and python-zstandard's reader takes a cut frame for a whole one.


INPUT_BYTES = 8 << 10
"""Decompressed at once: 8 KiB of zstd become 256 MiB at the most, 8 KiB of gzip 8 MiB."""
BUFFER_BYTES = 1 << 20


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
    """The stream of decoded bytes, and the file that it comes from.

    Reading raises OSError for damaged data and EOFError for a file that ends before its compressed data does.
    """
    with open(path, "rb") as raw:
        if kind == "jsonl.gz":
            yield _reader(raw, lambda: zlib.decompressobj(wbits=31), zlib.error), raw
        elif kind == "jsonl.zst":
            import zstandard

            yield _reader(raw, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError), raw
        else:
            yield raw, raw


def _reader(raw: io.BufferedReader, member: Callable[[], Any], damage: type[Exception]) -> io.BufferedReader:
    return io.BufferedReader(cast(io.RawIOBase, _Decompressed(raw, member, damage)), BUFFER_BYTES)


class _Decompressed(io.RawIOBase):
    """What compressed members hold, one after the other."""

    def __init__(self, raw: io.BufferedReader, member: Callable[[], Any], damage: type[Exception]) -> None:
        self._raw, self._new, self._damage = raw, member, damage
        self._member = member()
        self._left = b""
        self._decoded = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decoded and self._advance():
            pass
        size = min(len(buffer), len(self._decoded))
        buffer[:size], self._decoded = self._decoded[:size], self._decoded[size:]
        return size

    def _advance(self) -> bool:
        """Decode some more; whether there was any input left."""
        data = self._left or self._raw.read(INPUT_BYTES)
        if not data:
            if not self._member.eof:
                raise EOFError("the file ends before its compressed data does")
            return False
        if self._member.eof:
            self._member = self._new()
        try:
            self._decoded = memoryview(self._member.decompress(data))
        except self._damage as error:
            raise OSError(str(error)) from error
        self._left = self._member.unused_data if self._member.eof else b""
        return True


class BadLine(NamedTuple):
    """What stands where a document should."""

    line: int
    """From 1 within the piece; of a Parquet file the row."""
    reason: str
    raw: bytes
    """The line itself, without its line feed; its first 4096 bytes."""


@dataclass(frozen=True)
class Batch:
    """Documents that are read at once, in the order of the file; all of them may be bad."""

    piece: Piece
    columns: dict[str, list[str]]
    """Texts by field, all of one length."""
    lines: list[int]
    """Where each document stands: from 1 within the piece."""
    bytes: int
    """Read from disk for it. What closes a compressed file, and what is passed over of a line that is too long, is in none."""
    bad: list[BadLine] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The texts of the first field."""
        return next(iter(self.columns.values()))


class Document(NamedTuple):
    """One text and where it stands."""

    text: str
    shard: str
    line: int


def read_unit(unit: Unit, fields: tuple[str, ...]) -> Iterator[Batch]:
    """The documents of a unit, with bad lines beside them. They count only once the unit has been read to its end.

    Raises ValueError when a file cannot be read on (cut, damaged, changed since it was found): shard and line are named.
    """
    for piece in unit.pieces:
        piece.shard.require_unchanged()
        try:
            yield from _READERS[piece.shard.kind](piece, fields)
        except ValueError:
            piece.shard.require_unchanged()
            raise
        piece.shard.require_unchanged()


def read_strictly(unit: Unit, fields: tuple[str, ...]) -> Iterator[Batch]:
    """The documents of a unit; raises ValueError at the first line that is none, naming shard and line."""
    for batch in read_unit(unit, fields):
        if batch.bad:
            batch.piece.shard.require_unchanged()
            first = batch.bad[0]
            raise ValueError(f"{batch.piece.shard.name}:{line_of(batch.piece, first.line)}: {first.reason}")
        yield batch


def documents(units: Iterable[Unit], text_field: str) -> Iterator[Document]:
    """Every document, one by one, with its line in the shard; as strict as read_strictly."""
    for unit in units:
        for batch in read_strictly(unit, (text_field,)):
            before = line_of(batch.piece, 0)
            for text, line in zip(batch.texts, batch.lines, strict=True):
                yield Document(text, batch.piece.shard.name, before + line)


def _read_lines(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    shard, number = piece.shard, 0
    left = piece.stop - piece.start if shard.kind == "jsonl" else None
    try:
        with opened(shard.path, shard.kind) as (file, raw):
            if piece.start:
                file.seek(piece.start)
            before = raw.tell()
            for block in blocks(_chunks(file.read1, left)):
                if number == piece.start == 0 and block.startswith(BOM_UTF8):
                    del block[: len(BOM_UTF8)]
                decoded = decode(block, fields, number + 1)
                block = bytearray()
                read, before = raw.tell() - before, raw.tell()
                number += len(decoded.lines) + len(decoded.bad)
                yield Batch(piece, decoded.columns, decoded.lines, read, [BadLine(*bad) for bad in decoded.bad])
    except UNREADABLE as error:
        place = f"{shard.name}, after line {line_of(piece, number)}"
        raise ValueError(f"{place}: cannot be read: {error}; give a sound file") from error


def _chunks(read: Callable[[int], bytes], left: int | None) -> Iterator[bytes]:
    """What is there at once, for `left` bytes or to the end."""
    while left != 0 and (data := read(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left))):
        left = None if left is None else left - len(data)
        yield data


def _read_rows(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    from tasks.data.corpus.parquet import read_rows

    for rows in read_rows(piece, fields):
        yield Batch(
            piece, rows.columns, rows.lines, rows.bytes, [BadLine(line, value, b"") for line, value in rows.bad]
        )


def _read_text(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    """A plain file is one document, whatever the field is called."""
    shard, data = piece.shard, b""
    try:
        if shard.size > LINE_LIMIT:
            raise ValueError(f"a document of more than {LINE_LIMIT >> 20} MiB; split it")
        data = shard.path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{shard.name}: cannot be read: {error}; give a sound file") from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}: {error.reason}; give it decoded, or leave it out"
        yield Batch(piece, {name: [] for name in fields}, [], shard.size, [BadLine(1, reason, data[:KEPT])])
    except ValueError as error:
        yield Batch(piece, {name: [] for name in fields}, [], shard.size, [BadLine(1, str(error), b"")])
    else:
        yield Batch(piece, {name: [text] for name in fields}, [1], shard.size)


_READERS = {
    "jsonl": _read_lines,
    "jsonl.gz": _read_lines,
    "jsonl.zst": _read_lines,
    "parquet": _read_rows,
    "text": _read_text,
}
