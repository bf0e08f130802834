"""Shards without some of their lines, and those lines by themselves: what a quarantine is made of.

A shard is streamed, whatever its size; the bytes of what stays are not touched. Which lines go is tasks/validate.py's.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tasks.data.corpus.inputs import LINE_LIMIT, kind_of
from tasks.data.corpus.reading import opened

PART_BYTES = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
ROWS_AT_ONCE = 1024

Lines = Collection[int]
"""Numbers of lines, or of Parquet's rows, from 1."""


def rewrite(folder: Path, target: Path, without: Mapping[str, Lines]) -> int:
    """Copy a dataset's folder; shards named in `without` lose these lines. Returns how many files were written.

    A shard that is left empty is left out. Compressed shards are compressed anew, the same for the same lines.
    """
    written = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name not in without:
            shutil.copyfile(path, place)
            written += 1
        elif _copy_without(path, place, frozenset(without[name])):
            written += 1
        else:
            place.unlink(missing_ok=True)
    return written


def set_aside(path: Path, lines: Lines) -> Iterator[tuple[int, Any]]:
    """These lines of a shard in order, each as its JSON value, or its Parquet row.

    None stands for what is no JSON, longer than LINE_LIMIT, or a plain file.
    """
    kind, wanted = kind_of(path, named=False), frozenset(lines)
    if kind == "parquet":
        import pyarrow.parquet as pq

        first = 1
        for batch in pq.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE):
            for number in range(first, first + batch.num_rows):
                if number in wanted:
                    row = batch.slice(number - first, 1).to_pylist()[0]
                    yield number, json.loads(json.dumps(row, default=str))
            first += batch.num_rows
    elif kind == "text":
        yield from ((line, None) for line in sorted(wanted))
    else:
        with opened(path, kind) as (file, _):
            yield from _lines_of(file, wanted)


def _copy_without(path: Path, place: Path, lines: frozenset[int]) -> bool:
    """Write what is left of a shard; whether anything is."""
    kind = kind_of(path, named=False)
    if kind == "text":
        return False
    if kind == "parquet":
        return _copy_rows(path, place, lines)
    kept = False
    with opened(path, kind) as (file, _), _compressed(place, kind) as out:
        for number, part in _parts(file):
            if number not in lines:
                out.write(part)
                kept = True
    return kept


def _parts(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Every line with its number; a long one comes in parts."""
    number = 1
    while part := file.readline(PART_BYTES):
        yield number, part
        number += part.endswith(b"\n")


def _lines_of(file: IO[bytes], lines: frozenset[int]) -> Iterator[tuple[int, Any]]:
    held, raw = 0, bytearray()
    for number, part in _parts(file):
        if number != held and held:
            yield held, _value(raw)
            held, raw = 0, bytearray()
        if number in lines:
            held = number
            raw += part if len(raw) <= LINE_LIMIT else b""
    if held:
        yield held, _value(raw)


def _value(raw: bytearray) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig")) if len(raw) <= LINE_LIMIT else None
    except (ValueError, RecursionError):
        return None


@contextmanager
def _compressed(place: Path, kind: str) -> Iterator[IO[bytes]]:
    """A file that is compressed while it is written, without time or name in it."""
    with open(place, "wb") as raw:
        if kind == "jsonl.gz":
            with gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0) as file:
                yield file  # type: ignore[misc]
        elif kind == "jsonl.zst":
            import zstandard

            with zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(raw, closefd=False) as file:
                yield file
        else:
            yield raw


def _copy_rows(path: Path, place: Path, lines: frozenset[int]) -> bool:
    """Row groups stay as they are, but for their rows; schema and compression stay."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pq.ParquetFile(path)
    codec = source.metadata.row_group(0).column(0).compression if source.num_row_groups else "SNAPPY"
    kept = 0
    with pq.ParquetWriter(place, source.schema_arrow, compression=codec) as writer:
        first = 1
        for group in range(source.num_row_groups):
            table = source.read_row_group(group)
            wanted = [number not in lines for number in range(first, first + table.num_rows)]
            first += table.num_rows
            if any(wanted):
                writer.write_table(table.filter(pa.array(wanted)))
                kept += sum(wanted)
    return kept > 0
