"""Parquet files as documents: row groups, and texts in batches of bounded size. pyarrow lives here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tasks.config.data import CONVERSATIONS
from tasks.data.corpus import conversations
from tasks.data.corpus.inputs import Piece, Shard
from tasks.data.corpus.reading import are_conversations, columns_of, text_of

BATCH_BYTES = 8 << 20
BATCH_ROWS = 256
"""Decoded at once: row groups are not even, and one of short rows may end in long ones."""
READ_BYTES = 1 << 20
"""Read at once of a column: without it, and with pre_buffer, pyarrow reads a row group's whole column."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a file."""

    columns: dict[str, list[str]]
    lines: list[int]
    """From 1 within the piece."""
    bytes: int
    """On disk, as the piece's share of rows."""
    bad: list[tuple[int, str]] = field(default_factory=list)


def row_groups(shard: Shard) -> int:
    """How many row groups a file has. Raises ValueError when it is no Parquet file."""
    return int(_open(shard).num_row_groups)


def rows_before(shard: Shard, group: int) -> int:
    """How many rows stand before a row group."""
    metadata = _open(shard).metadata
    return sum(metadata.row_group(index).num_rows for index in range(group))


def read_rows(piece: Piece, fields: tuple[str, ...]) -> Iterator[Rows]:
    """The rows of a piece, about BATCH_BYTES of text at once.

    Raises ValueError that names the shard when it cannot be read or has not all fields.
    """
    import pyarrow as pa

    file = _open(piece.shard)
    shard = piece.shard
    existing = file.schema_arrow.names
    wanted = fields
    if are_conversations(fields):
        wanted = tuple(name for name in (*conversations.FORMS, *conversations.BESIDE) if existing.count(name) == 1)
    for name in fields if not set(wanted) & set(conversations.FORMS) else wanted:
        if existing.count(name) != 1:
            text = (
                f"no column {name!r} (there: {', '.join(existing)[:200]})"
                if name not in existing
                else f"two columns {name!r}"
            )
            raise ValueError(f"{shard.name}: {text}; name the column that holds the text")
    groups = list(range(piece.start, piece.stop))
    total = max(sum(file.metadata.row_group(group).num_rows for group in groups), 1)
    row, done = 0, 0
    try:
        for values in _gathered(file.iter_batches(BATCH_ROWS, groups, columns=list(wanted), use_threads=False), wanted):
            if are_conversations(fields):
                columns, lines, bad = _conversations(values, wanted, row + 1)
            else:
                columns, lines, bad = _sorted_out(values, fields, row + 1)
            row += len(lines) + len(bad)
            read = piece.bytes * row // total - done
            done += read
            yield Rows(columns, lines, read, bad)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{piece.shard.name}, after row {row}: cannot be read: {error}; give a sound file") from error


def _gathered(batches: Iterator[Any], fields: tuple[str, ...]) -> Iterator[list[list[Any]]]:
    """The values of each field, BATCH_BYTES at once."""
    held: list[list[Any]] = [[] for _ in fields]
    size = 0
    for batch in batches:
        size += batch.nbytes
        for values, name in zip(held, fields, strict=True):
            values += _values(batch.column(name))
        if size >= BATCH_BYTES:
            yield held
            held, size = [[] for _ in fields], 0
    if held[0]:
        yield held


def _values(column: Any) -> list[Any]:
    """A column as Python values; text that is not UTF-8 stays bytes."""
    import pyarrow as pa

    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        wide = pa.types.is_large_string(column.type)
        return list(column.cast(pa.large_binary() if wide else pa.binary()).to_pylist())


def _sorted_out(
    values: list[list[Any]], fields: tuple[str, ...], first: int
) -> tuple[dict[str, list[str]], list[int], list[tuple[int, str]]]:
    """Rows that are documents, and those that are none with the reason."""
    if all(type(value) is str for column in values for value in column):
        return dict(zip(fields, values, strict=True)), list(range(first, first + len(values[0]))), []
    columns: dict[str, list[str]] = {name: [] for name in fields}
    lines: list[int] = []
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(zip(*values, strict=True), first):
        try:
            texts = [_text(value, name) for name, value in zip(fields, row, strict=True)]
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        lines.append(number)
        for name, text in zip(fields, texts, strict=True):
            columns[name].append(text)
    return columns, lines, bad


def _conversations(
    values: list[list[Any]], names: tuple[str, ...], first: int
) -> tuple[dict[str, list[str]], list[int], list[tuple[int, str]]]:
    """Rows that are conversations, and those that are none with the reason."""
    columns: dict[str, list[str]] = {name: [] for name in columns_of((CONVERSATIONS,))}
    lines: list[int] = []
    bad: list[tuple[int, str]] = []
    for number, row in enumerate(zip(*values, strict=True), first):
        try:
            texts = conversations.read(dict(zip(names, row, strict=True)))
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        lines.append(number)
        for column, text in zip(columns.values(), texts, strict=True):
            column.append(text)
    return columns, lines, bad


def _text(value: Any, name: str) -> str:
    """A value as text; columns of bytes are text too, as older writers leave them."""
    if not isinstance(value, bytes):
        return text_of({name: value}, name)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the text: {error.reason}; give it decoded") from error


def _open(shard: Shard) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(shard.path, buffer_size=READ_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{shard.name}: is no Parquet file: {error}; give a sound file") from error
