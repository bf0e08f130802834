"""A corpus without the documents that were marked, and those documents by themselves: what a quarantine is made of.

The marks are written down first, a file a shard (`write_marks`), so that several processes or machines can divide the shards
among themselves (`Division`; tasks/jobs/divide.py). A shard is streamed once, whatever its size, and the bytes of what
stays are not touched. Which documents are marked is tasks/data/judging.py's to say.
"""

from __future__ import annotations

import gzip
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from heapq import merge
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Protocol

from tasks.common.process import read_json, write_json
from tasks.data.corpus.inputs import LINE_LIMIT, kind_of
from tasks.data.corpus.reading import opened

PART_BYTES = 1 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 3
SHARDS = "shards.json"
"""Of a folder of marks: `[[NAME, LINES], ...]`, the shards that have marks, in the order of the corpus."""


@dataclass(frozen=True)
class Marked:
    """One line that goes to the quarantine."""

    shard: int
    line: int
    rules: tuple[str, ...]
    detail: str
    raw: str | None = None
    """What stands there, where it is no document; its first bytes."""


class Sink(Protocol):
    def write(self, data: bytes, /) -> object: ...


def write_marks(folder: Path, names: list[str], *marked: Iterator[Marked]) -> int:
    """Write down which lines of which shards go, and why; returns how many lines.

    `marked` are streams in the order of shards and lines. The folder appears whole; one that is there already is left as it is.
    """
    making = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
    making.mkdir(parents=True)
    shards: list[tuple[str, int]] = []
    for shard, group in groupby(merge(*marked, key=lambda one: (one.shard, one.line)), key=lambda one: one.shard):
        count = 0
        with open(making / _numbered(len(shards)), "w", encoding="utf-8") as file:
            for one in group:
                file.write(json.dumps([one.line, one.rules, one.detail, one.raw]) + "\n")
                count += 1
        shards.append((names[shard], count))
    write_json(making / SHARDS, shards)
    if folder.exists():
        shutil.rmtree(making)
    else:
        os.replace(making, folder)
    return sum(count for _, count in shards)


def _numbered(number: int) -> str:
    return f"{number:06d}.jsonl"


@dataclass(frozen=True)
class Division:
    """The work of dividing a corpus, file by file; what is done stays done, whoever did it."""

    corpus: Path
    marks: Path
    parts: Path
    """Where the lines of each shard that went lie until `finish`; on the same file system as `left`."""
    left: Path | None
    """Where the corpus without them is written; None: it is not."""

    @cached_property
    def marked(self) -> dict[str, tuple[int, int]]:
        """The shards that have marks: their number, and how many lines."""
        shards = json.loads((self.marks / SHARDS).read_text(encoding="utf-8"))
        return {name: (number, count) for number, (name, count) in enumerate(shards)}

    @cached_property
    def files(self) -> list[str]:
        """The files that there is something to do about."""
        if self.left is None:
            return list(self.marked)
        paths = (path.relative_to(self.corpus) for path in self.corpus.rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in paths)

    def size(self, name: str) -> int:
        return (self.corpus / name).stat().st_size

    def done(self, name: str) -> bool:
        if name in self.marked:
            return self._receipt(name).exists()
        copy = self.left / name if self.left else None
        return copy is None or (copy.exists() and copy.stat().st_size == self.size(name))

    def do(self, name: str) -> None:
        """Divide one file; it is copied where none of its lines goes. A shard that is left empty is left out."""
        if self.done(name):
            return
        self.parts.mkdir(parents=True, exist_ok=True)
        making = self.parts / f".left-{secrets.token_hex(8)}"
        if name not in self.marked:
            shutil.copyfile(self.corpus / name, making)
            self._keep(making, name)
            return
        number, _ = self.marked[name]
        rules: Counter[str] = Counter()
        with open(self.marks / _numbered(number), encoding="utf-8") as file:
            marks = {line: (names, detail, raw) for line, names, detail, raw in map(json.loads, file)}
        with open(self.parts / _numbered(number), "w", encoding="utf-8") as aside:
            for line, value in divide_shard(self.corpus / name, marks.keys(), making if self.left else None):
                names, detail, raw = marks[line]
                rules.update(names)
                payload = {"shard": name, "line": line, "rules": names, "detail": detail}
                aside.write(json.dumps({**payload, "raw": raw if value is None else value}) + "\n")
        if self.left and making.exists():
            self._keep(making, name)
        write_json(self._receipt(name), dict(rules))

    def finish(self, target: Path) -> dict[str, Any]:
        """Put `quarantine.jsonl` and `quarantine.json` (counts by rule and shard) together; every file must be done.

        Returns the second. The folder appears whole.
        """
        making = self.parts / "aside"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        rules: Counter[str] = Counter()
        with open(making / "quarantine.jsonl", "wb") as file:
            for name, (number, _) in self.marked.items():
                rules.update(read_json(self._receipt(name)))
                with open(self.parts / _numbered(number), "rb") as part:
                    shutil.copyfileobj(part, file, PART_BYTES)
        shards = {name: count for name, (_, count) in self.marked.items()}
        counted = {"documents": sum(shards.values()), "rules": dict(rules), "shards": shards}
        (making / "quarantine.json").write_text(json.dumps(counted, indent=1))
        os.replace(making, target)
        return counted

    def _receipt(self, name: str) -> Path:
        return self.parts / f"{_numbered(self.marked[name][0])}.json"

    def _keep(self, making: Path, name: str) -> None:
        assert self.left
        place = self.left / name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(making, place)


def divide_shard(path: Path, lines: Collection[int], left: Path | None) -> Iterator[tuple[int, Any]]:
    """Yield these lines of a shard (of Parquet its rows), from 1 and in order, each as its JSON value; `left` gets all others.

    None stands for what is no JSON, longer than LINE_LIMIT, or a plain file. `left` is complete when this has come to its
    end, and is not there when no line stays. A compressed shard is compressed anew, the same for the same lines.
    """
    kind, wanted = kind_of(path, named=False), frozenset(lines)
    if kind == "text":
        yield from ((line, None) for line in sorted(wanted))
    elif kind == "parquet":
        yield from _divide_rows(path, wanted, left)
    else:
        with opened(path, kind) as (file, _):
            if left is None:
                yield from _divide_lines(file, wanted, None)
                return
            with _compressed(left, kind) as out:
                counting = _Counting(out)
                yield from _divide_lines(file, wanted, counting)
        if not counting.bytes:
            left.unlink()


class _Counting:
    def __init__(self, out: Sink) -> None:
        self.out, self.bytes = out, 0

    def write(self, data: bytes, /) -> None:
        self.bytes += len(data)
        self.out.write(data)


def _divide_lines(file: IO[bytes], lines: frozenset[int], out: Sink | None) -> Iterator[tuple[int, Any]]:
    held, raw, number = 0, bytearray(), 1
    while part := file.readline(PART_BYTES):  # a long line comes in parts
        if number in lines:
            held = number
            raw += part if len(raw) <= LINE_LIMIT else b""
        elif out:
            out.write(part)
        if part.endswith(b"\n"):
            number += 1
            if held:
                yield held, _value(raw)
                held, raw = 0, bytearray()
    if held:
        yield held, _value(raw)


def _value(raw: bytearray) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig")) if len(raw) <= LINE_LIMIT else None
    except (ValueError, RecursionError):
        return None


def _divide_rows(path: Path, rows: frozenset[int], left: Path | None) -> Iterator[tuple[int, Any]]:
    """Row groups stay as they are, but for their rows; schema and compression stay."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = pq.ParquetFile(path)
    codec = source.metadata.row_group(0).column(0).compression if source.num_row_groups else "SNAPPY"
    writer = pq.ParquetWriter(left, source.schema_arrow, compression=codec) if left else None
    kept, first = 0, 1
    try:
        for group in range(source.num_row_groups):
            table = source.read_row_group(group)
            stays = [number not in rows for number in range(first, first + table.num_rows)]
            for place, staying in enumerate(stays):
                if not staying:
                    row = table.slice(place, 1).to_pylist()[0]
                    yield first + place, json.loads(json.dumps(row, default=str))
            if writer and any(stays):
                writer.write_table(table.filter(pa.array(stays)))
            kept, first = kept + sum(stays), first + table.num_rows
    finally:
        if writer:
            writer.close()
    if left and not kept:
        left.unlink()


@contextmanager
def _compressed(place: Path, kind: str) -> Iterator[Sink]:
    """A file that is compressed while it is written, without time or name in it."""
    with open(place, "wb") as raw:
        if kind == "jsonl.gz":
            with gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=raw, mtime=0) as file:
                yield file
        elif kind == "jsonl.zst":
            from tasks.data.corpus.reading import zstd

            with zstd.ZstdFile(raw, "wb", level=ZSTD_LEVEL) as file:
                yield file
        else:
            yield raw
