"""Parquet files as documents: row groups, and texts in batches of bounded size. pyarrow lives here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.corpus.inputs import Piece, Shard

BATCH_BYTES = 8 << 20


def row_groups(shard: Shard) -> int:
    """How many row groups a file has. Raises ValueError when it is no Parquet file."""
    return int(_open(shard).num_row_groups)


def read_rows(piece: Piece, fields: tuple[str, ...]) -> Iterator[list[list[Any]]]:
    """The values of each field, batch by batch: one list a field, all of one length.

    Raises ValueError that names the shard when it cannot be read or has not all fields.
    """
    import pyarrow as pa

    file = _open(piece.shard)
    there = file.schema_arrow.names
    if missing := [field for field in fields if field not in there]:
        raise ValueError(
            f"{piece.shard.name}: no column {missing[0]!r} (there: {', '.join(there)}); name the column that holds the text"
        )
    groups = list(range(piece.start, piece.stop))
    rows = sum(file.metadata.row_group(group).num_rows for group in groups)
    weight = sum(file.metadata.row_group(group).total_byte_size for group in groups)
    size = max(1, min(65_536, rows * BATCH_BYTES // max(weight, 1)))
    try:
        for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=list(fields), use_threads=False):
            yield [batch.column(field).to_pylist() for field in fields]
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{piece.shard.name}: cannot be read: {error}; give a sound file") from error


def _open(shard: Shard) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(shard.path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{shard.name}: is no Parquet file: {error}; give a sound file") from error
