"""Reading a corpus: documents in batches of bounded size, each with its place; what is no document is told, not lost.

A line is read as JSON says: by msgspec, and where that refuses by the standard library, which then names the mistake. Nothing
is judged here.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from tasks.corpus.inputs import LINE_LIMIT, Piece, Unit, line_of

BATCH_BYTES = 8 << 20
UNREADABLE = (EOFError, zlib.error, OSError)


class BadLine(NamedTuple):
    """What stands where a document should."""

    line: int
    """From 1 within the piece; of a Parquet file the row."""
    reason: str
    raw: bytes
    """The line itself, without its line feed; its first KEPT bytes."""


KEPT = 4096


@dataclass(frozen=True)
class Batch:
    """Documents that are read at once, in the order of the file."""

    piece: Piece
    columns: dict[str, list[str]]
    """Texts by field, all of one length."""
    lines: list[int]
    """Where each document stands: from 1 within the piece."""
    bytes: int
    """Read from disk for it."""
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
    """The documents of a unit, with bad lines beside them.

    Raises ValueError when a file cannot be read on (cut, damaged, changed since it was found): shard and line are named.
    """
    for piece in unit.pieces:
        piece.shard.require_unchanged()
        yield from _READERS[piece.shard.kind](piece, fields)
        piece.shard.require_unchanged()


def read_strictly(unit: Unit, fields: tuple[str, ...]) -> Iterator[Batch]:
    """The documents of a unit; raises ValueError at the first line that is none, naming shard and line."""
    for batch in read_unit(unit, fields):
        if batch.bad:
            first = batch.bad[0]
            place = f"{batch.piece.shard.name}:{line_of(batch.piece, first.line)}"
            raise ValueError(f"{place}: {first.reason}")
        yield batch


def documents(units: Iterable[Unit], text_field: str) -> Iterator[Document]:
    """Every document, one by one; as strict as read_strictly."""
    for unit in units:
        for batch in read_strictly(unit, (text_field,)):
            for text, line in zip(batch.texts, batch.lines, strict=True):
                yield Document(text, batch.piece.shard.name, line)


def _read_lines(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    number = 0
    try:
        with _opened(piece.shard.path, piece.shard.kind) as (file, raw):
            file.seek(piece.start) if piece.start else None
            left = piece.stop - piece.start if piece.shard.kind == "jsonl" else None
            before = raw.tell()
            for block in _blocks(file, left):
                batch = _decode(piece, block, fields, number + 1, raw.tell() - before)
                before, number = raw.tell(), number + len(batch.lines) + len(batch.bad)
                yield batch
    except UNREADABLE as error:
        place = line_of(piece, number) if piece.shard.kind == "jsonl" else number
        raise ValueError(
            f"{piece.shard.name}, after line {place}: cannot be read: {error}; give a sound file"
        ) from error


@contextmanager
def _opened(path: Path, kind: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The stream of decoded bytes, and the file that it comes from."""
    with open(path, "rb", buffering=0 if kind == "jsonl" else 1 << 20) as raw:
        if kind == "jsonl.gz":
            with gzip.open(raw, "rb") as file:
                yield file, raw  # type: ignore[misc]
        elif kind == "jsonl.zst":
            with _zstandard(raw) as file:
                yield file, raw
        else:
            yield raw, raw


@contextmanager
def _zstandard(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False) as file:
            yield file
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error


def _blocks(file: IO[bytes], left: int | None) -> Iterator[bytes | bytearray]:
    """Whole lines, about BATCH_BYTES at once; a line over LINE_LIMIT comes alone, cut to LINE_LIMIT + 1 bytes."""
    rest = bytearray()
    skipping = False
    while data := file.read(BATCH_BYTES if left is None else min(BATCH_BYTES, left)):
        left = None if left is None else left - len(data)
        if skipping:
            end = data.find(b"\n")
            if end < 0:
                continue
            data, skipping = data[end + 1 :], False
        end = data.rfind(b"\n") + 1
        if end:
            rest += data[:end]
            yield rest
            rest = bytearray(data[end:])
        else:
            rest += data
        if len(rest) > LINE_LIMIT:
            yield rest[: LINE_LIMIT + 1]
            rest, skipping = bytearray(), True
    if rest:
        yield rest


def _decode(piece: Piece, block: bytes | bytearray, fields: tuple[str, ...], first: int, consumed: int) -> Batch:
    """A block of lines as documents: quickly when all is well, else line by line."""
    import msgspec

    count = block.count(b"\n") + (not block.endswith(b"\n"))
    try:
        if len(block) > LINE_LIMIT and count == 1:
            raise ValueError("a line over the limit")
        str(block, "utf-8")
        found = _decoder(fields).decode_lines(block)
        if len(found) == count:
            columns = {name: [getattr(row, f"f{i}") for row in found] for i, name in enumerate(fields)}
            return Batch(piece, columns, list(range(first, first + count)), consumed)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return _decode_slowly(piece, bytes(block), fields, first, consumed)


@lru_cache(maxsize=8)
def _decoder(fields: tuple[str, ...]) -> Any:
    import msgspec

    names = [f"f{index}" for index in range(len(fields))]
    row = msgspec.defstruct("Row", [(name, str) for name in names], rename=dict(zip(names, fields, strict=True)))
    return msgspec.json.Decoder(row)


def _decode_slowly(piece: Piece, block: bytes, fields: tuple[str, ...], first: int, consumed: int) -> Batch:
    columns: dict[str, list[str]] = {name: [] for name in fields}
    lines, bad = [], []
    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
        try:
            texts = _texts(line, fields)
        except ValueError as error:
            bad.append(BadLine(number, str(error), line[:KEPT]))
            continue
        lines.append(number)
        for name, text in zip(fields, texts, strict=True):
            columns[name].append(text)
    return Batch(piece, columns, lines, consumed, bad)


def _texts(line: bytes, fields: tuple[str, ...]) -> list[str]:
    """The fields of one line; raises ValueError saying what is wrong with it."""
    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of more than {LINE_LIMIT >> 20} MiB; split the document")
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {error.reason}; give it decoded") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON line: {error}") from error
    return [_text(value, name) for name in fields]


def _text(value: Any, name: str) -> str:
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str):
        there = ", ".join(sorted(value)) if isinstance(value, dict) else f"no object but {type(value).__name__}"
        held = f"holds {type(text).__name__}, there" if text is not None else "there"
        raise ValueError(f"no text in field {name!r} ({held}: {there}); name the field that holds the text")
    return _encodable(text)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a lone surrogate at character {error.start} is no text; give it decoded") from error
    return text


def _read_rows(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    from tasks.corpus.parquet import read_rows

    number = 1
    for values in read_rows(piece, fields):
        columns: dict[str, list[str]] = {name: [] for name in fields}
        lines: list[int] = []
        bad: list[BadLine] = []
        for row in zip(*values, strict=True):
            try:
                texts = [_text({name: value}, name) for name, value in zip(fields, row, strict=True)]
            except ValueError as error:
                bad.append(BadLine(number, str(error), b""))
            else:
                lines.append(number)
                for name, text in zip(fields, texts, strict=True):
                    columns[name].append(text)
            number += 1
        yield Batch(piece, columns, lines, sum(len(text) for text in columns[fields[0]]), bad)


def _read_text(piece: Piece, fields: tuple[str, ...]) -> Iterator[Batch]:
    """A plain file is one document, whatever the field is called."""
    shard = piece.shard
    if shard.size > LINE_LIMIT:
        reason = f"a document of more than {LINE_LIMIT >> 20} MiB; split it"
        yield Batch(piece, {name: [] for name in fields}, [], shard.size, [BadLine(1, reason, b"")])
        return
    try:
        data = shard.path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise ValueError(f"{shard.name}: cannot be read: {error}; give a sound file") from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}: {error.reason}; give it decoded"
        yield Batch(piece, {name: [] for name in fields}, [], shard.size, [BadLine(1, reason, data[:KEPT])])
        return
    yield Batch(piece, {name: [text] for name in fields}, [1], shard.size)


_READERS = {
    "jsonl": _read_lines,
    "jsonl.gz": _read_lines,
    "jsonl.zst": _read_lines,
    "parquet": _read_rows,
    "text": _read_text,
}
