"""Reading a corpus: documents in batches of bounded size, each with its place; what is no document is told, not lost.

How JSON lines are taken apart: tasks/data/corpus/json_lines.py; Parquet: tasks/data/corpus/parquet.py. Nothing is judged here.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tasks.data.corpus.inputs import LINE_LIMIT, Piece, Unit, line_of
from tasks.data.corpus.json_lines import BLOCK_BYTES, KEPT, UNREADABLE, blocks, decode
from tasks.data.corpus.opening import opened


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
