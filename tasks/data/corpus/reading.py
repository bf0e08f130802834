"""Reading a corpus: documents in batches of bounded size, each with its place; what is no document is told, not lost.

Parquet is read by tasks/data/corpus/parquet.py. Nothing is judged here.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from io import SEEK_END, BufferedReader
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, cast

from tasks.config.data import CONVERSATIONS
from tasks.data.corpus import conversations
from tasks.data.corpus.conversations import CONVERSATION
from tasks.data.corpus.inputs import LINE_LIMIT, Piece, Unit, line_of

if sys.version_info >= (3, 14):
    import compression.zstd

    zstd = compression.zstd
else:
    import backports.zstd

    zstd = backports.zstd

# JSON lines: a stream of bytes as blocks of whole lines, and a block as texts, with what is no document beside them.
#
# A line is read by msgspec, and where that refuses by the standard library, which then names the mistake: the same line
# is read the same way whatever its neighbours are.


BLOCK_BYTES = 8 << 20
KEPT = 4096
"""Bytes of a bad line that are kept."""
UNREADABLE = (EOFError, OSError, zlib.error, zstd.ZstdError)
_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True)
class Decoded:
    """The documents of a block."""

    columns: dict[str, list[str]]
    lines: list[int]
    bad: list[tuple[int, str, bytes]] = field(default_factory=list)
    """Line, what is wrong with it, its first KEPT bytes."""


def blocks(chunks: Iterable[bytes]) -> Iterator[bytearray]:
    """Whole lines, about BLOCK_BYTES at once; of a line over LINE_LIMIT only a beginning that is still over it.

    What came whole before a damage is given before the damage is raised. No block is held here while the caller has it, so
    that a line of 256 MiB is in memory once.
    """
    ready: list[bytearray] = []
    rest, searched, skipping = bytearray(), 0, False
    try:
        for data in chunks:
            if skipping:
                _, feed, data = data.partition(b"\n")
                skipping = not feed
            rest += data
            if len(rest) < BLOCK_BYTES:
                continue
            if end := rest.rfind(b"\n", searched) + 1:
                ready, rest = [rest], _taken_off(rest, end)
                yield ready.pop()
            searched = len(rest)
            if searched > LINE_LIMIT:
                ready, rest, searched, skipping = [rest], bytearray(), 0, True
                yield ready.pop()
    except UNREADABLE:
        if end := rest.rfind(b"\n") + 1:
            yield rest[:end]
        raise
    if rest:
        yield rest


def _taken_off(block: bytearray, end: int) -> bytearray:
    """Shorten a block to `end`; returns what stood behind."""
    rest = block[end:]
    del block[end:]
    return rest


def decode(block: bytearray, fields: tuple[str, ...], first: int) -> Decoded:
    """A block of lines, of which the first has number `first`: at once when all is well, else line by line."""
    import msgspec

    count = block.count(b"\n") + (not block.endswith(b"\n"))
    try:
        # Whether every line begins with `{` and ends with `}`: then no value spans two lines, and `count` values are
        # one each. msgspec passes over blank lines and takes two values of one line, which would put documents on
        # wrong lines.
        plain = len(block) <= LINE_LIMIT and not are_conversations(fields)
        if plain and block.startswith(b"{") and block.endswith((b"}", b"}\n")) and block.count(b"}\n{") == count - 1:
            # Raise UnicodeDecodeError for what is not UTF-8: msgspec does not look into the fields that it leaves
            # out.
            if not block.isascii():
                decoder = getincrementaldecoder("utf-8")()
                for start in range(0, len(block), BLOCK_BYTES):
                    decoder.decode(block[start : start + BLOCK_BYTES], start + BLOCK_BYTES >= len(block))
            rows = _decoder(fields).decode_lines(block)
            if len(rows) == count:
                columns = {name: list(map(attrgetter(f"f{i}"), rows)) for i, name in enumerate(fields)}
                return Decoded(columns, list(range(first, first + count)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    result = Decoded({name: [] for name in columns_of(fields)}, [])
    for number, line in enumerate(_lines(block), first):
        try:
            texts = _texts(line, fields)
        except ValueError as error:
            result.bad.append((number, str(error), bytes(line[:KEPT])))
            continue
        result.lines.append(number)
        for name, text in zip(result.columns, texts, strict=True):
            result.columns[name].append(text)
    return result


def are_conversations(fields: tuple[str, ...]) -> bool:
    """Whether records are read as conversations: by the name of their field."""
    return fields == (CONVERSATIONS,)


def columns_of(fields: tuple[str, ...]) -> tuple[str, ...]:
    """The columns of a batch: one a field, and beside the text of conversations they themselves."""
    return (*fields, CONVERSATION) if are_conversations(fields) else fields


@lru_cache(maxsize=8)
def _decoder(fields: tuple[str, ...]) -> Any:
    import msgspec

    names = [f"f{index}" for index in range(len(fields))]
    row = msgspec.defstruct("Row", [(name, str) for name in names], rename=dict(zip(names, fields, strict=True)))
    return msgspec.json.Decoder(row)


def _lines(block: bytearray) -> Iterator[memoryview]:
    """The lines of a block without their line feeds; nothing is copied."""
    view, start = memoryview(block), 0
    while start < len(block):
        end = block.find(b"\n", start)
        end = len(block) if end < 0 else end
        yield view[start:end]
        start = end + 1


def _texts(line: memoryview, fields: tuple[str, ...]) -> list[str]:
    """The fields of one line; raises ValueError saying what is wrong with it."""
    import msgspec

    if len(line) > LINE_LIMIT:
        raise ValueError(f"a line of more than {LINE_LIMIT >> 20} MiB; split the document")
    try:
        text = str(line, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line: {error.reason}; give it decoded") from error
    if are_conversations(fields):
        try:
            record = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            record = _value(text)
        return list(conversations.read(record))
    try:
        row = _decoder(fields).decode(text)
        return [getattr(row, f"f{index}") for index in range(len(fields))]
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _value(text)
        return [text_of(value, name) for name in fields]


def _value(line: str) -> Any:
    """A line as the standard library reads it: it takes NaN, which JSON has not, and says what is wrong."""
    if not line.strip():
        raise ValueError("not a JSON line: it is blank; leave it out")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        place = (
            f"character {error.pos + 1} of {len(line)}"
            if error.pos < len(line)
            else f"its end, after {len(line)} characters"
        )
        text = f"{error.msg.removesuffix(' at')} at {place}"
    except (ValueError, RecursionError) as error:
        text = str(error)
    raise ValueError(f"not a JSON line: {text}; write one whole object a line")


def text_of(value: Any, name: str) -> str:
    """A field of an object as text; raises ValueError saying what is there instead."""
    text = value.get(name) if isinstance(value, dict) else None
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"a lone surrogate at character {error.start} is no text; give it decoded") from error
        return text
    if not isinstance(value, dict):
        hint = f"there: no object but {_name_of(value)}"
    elif name in value:
        hint = f"it is {_name_of(text)}"
    else:
        names = ", ".join(sorted(value))
        hint = f"there: {names[:200]}{' ...' if len(names) > 200 else ''}" if names else "the object is empty"
    raise ValueError(f"no text in field {name!r} ({hint}); name the field that holds the text")


def _name_of(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)


# Files as streams of decoded bytes: plain, gzip and zstd, of one member or many; a cut one is told.


@contextmanager
def opened(path: Path, kind: str) -> Iterator[tuple[BufferedReader, BufferedReader]]:
    """The stream of decoded bytes, and the file that it comes from.

    Reading raises OSError for damaged data and EOFError for a file that ends before its compressed data does.
    """
    with open(path, "rb") as raw:
        if kind not in ("jsonl.gz", "jsonl.zst"):
            yield raw, raw
            return
        try:
            if not raw.peek(1):  # the gzip module takes a file of no bytes for a whole one
                raise EOFError
            if kind == "jsonl.gz" and _padded(raw):
                raise OSError("its last bytes are zeros, and no compressed data: it was never written to its end")
            with gzip.GzipFile(fileobj=raw) if kind == "jsonl.gz" else zstd.ZstdFile(raw) as file:
                yield cast(BufferedReader, file), raw
        except EOFError as error:
            raise EOFError("the file ends before its compressed data does") from error
        except (zlib.error, zstd.ZstdError) as error:
            raise OSError(str(error)) from error


def _padded(raw: BufferedReader) -> bool:
    """Whether a gzip file ends with zeros, which the gzip module passes over, so that what is missing would not be missed.

    A member ends with its checksum and length, 8 bytes, and before those of an empty one stand 03 00: never 16 zeros.
    """
    if raw.seek(0, SEEK_END) < 16:
        padded = False
    else:
        raw.seek(-16, SEEK_END)
        padded = not any(raw.read(16))
    raw.seek(0)
    return padded


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
    """Texts by field, all of one length. Of conversations, they themselves are the column CONVERSATION."""
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
        if are_conversations(fields):
            raise ValueError("a plain file is no conversation; give JSON lines or Parquet, or leave it out")
        if shard.size > LINE_LIMIT:
            raise ValueError(f"a document of more than {LINE_LIMIT >> 20} MiB; split it")
        data = shard.path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{shard.name}: cannot be read: {error}; give a sound file") from error
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}: {error.reason}; give it decoded, or leave it out"
        yield Batch(piece, {name: [] for name in columns_of(fields)}, [], shard.size, [BadLine(1, reason, data[:KEPT])])
    except ValueError as error:
        yield Batch(piece, {name: [] for name in columns_of(fields)}, [], shard.size, [BadLine(1, str(error), b"")])
    else:
        yield Batch(piece, {name: [text] for name in fields}, [1], shard.size)


_READERS = {
    "jsonl": _read_lines,
    "jsonl.gz": _read_lines,
    "jsonl.zst": _read_lines,
    "parquet": _read_rows,
    "text": _read_text,
}
