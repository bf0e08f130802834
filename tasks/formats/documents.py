"""A corpus: JSON lines in shards, plain or gzipped, read as a stream of documents and packed from files.

Reading knows shard and line, so that an error can name them. Nothing is judged here: tasks/validate.py does that.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

SHARD_BYTES = 32 << 20
JSON_LINES = (".jsonl", ".jsonl.gz")
UNREADABLE = (EOFError, zlib.error, UnicodeDecodeError, OSError)


class Document(NamedTuple):
    """One text and where it stands."""

    text: str
    shard: str
    line: int


class Packed(NamedTuple):
    """What packing made: counts, and the files that were left out with the reason."""

    documents: int
    bytes: int
    skipped: dict[str, str]


def shards(folder: Path) -> list[Path]:
    """The shards of a dataset in their order."""
    return sorted(path for path in folder.rglob("*") if path.name.endswith(JSON_LINES))


def read_documents(folder: Path, text_field: str) -> Iterator[Document]:
    """Every document of a dataset. Raises ValueError that names shard and line."""
    for shard in shards(folder):
        name = shard.relative_to(folder).as_posix()
        with _open(shard) as file:
            number = 0
            try:
                for number, line in enumerate(file, 1):
                    yield Document(_text(line, text_field, f"{name}:{number}"), name, number)
            except UNREADABLE as error:
                raise ValueError(
                    f"{name}, after line {number}: cannot be read: {error}; publish a sound file"
                ) from error


def _open(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")


def _text(line: str, text_field: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON line: {error}") from error
    text = value.get(text_field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(sorted(value)) if isinstance(value, dict) else f"no object but {type(value).__name__}"
        raise ValueError(
            f"{where}: no text in field {text_field!r} (there: {fields}); set validation.text_field and preprocessing.text_field"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: a lone surrogate at character {error.start} is no text; publish it decoded"
        ) from error
    return text


def pack(paths: list[Path], target: Path, *, include: str = "*", exclude: tuple[str, ...] = ()) -> Packed:
    """Make a dataset folder of files and trees: JSON lines are copied byte for byte, other text becomes `text` and `path`.

    Trees are walked in the order of their paths, so that the same tree is the same version. Files that are not UTF-8 text are
    left out and named. Raises ValueError when a path is not there, or when nothing is left.
    """
    target.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(target)
    skipped: dict[str, str] = {}
    copied = 0
    for root in paths:
        if not root.exists():
            raise ValueError(f"{root} does not exist; name files or folders to publish")
        for path in _files(root, include, exclude):
            if path.name.endswith(JSON_LINES):
                copied += _copy(path, target)
            elif reason := writer.add(path, _name(path, root)):
                skipped[str(path)] = reason
    writer.close()
    if not writer.documents and not copied:
        first = next(iter(skipped.items()), None)
        why = f": {len(skipped)} file(s) left out, the first {first[0]} ({first[1]})" if first else ""
        raise ValueError(f"no text found under {', '.join(map(str, paths))}{why}; name text files, JSONL or JSONL.gz")
    return Packed(writer.documents + copied, writer.bytes, skipped)


def _files(root: Path, include: str, exclude: tuple[str, ...]) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob(include)):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        left_out = any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in exclude)
        if path.is_file() and not path.is_symlink() and not hidden and not left_out:
            yield path


def _name(path: Path, root: Path) -> str:
    name = path.name if root.is_file() else path.relative_to(root).as_posix()
    return name.encode(errors="replace").decode()


def _copy(path: Path, target: Path) -> int:
    """Copy a JSON lines file under its own name, or a free one; returns its count of lines."""
    place, number = target / path.name, 1
    while place.exists():
        place, number = target / f"{number}-{path.name}", number + 1
    place.write_bytes(path.read_bytes())
    with _open(place) as file:
        try:
            return sum(1 for _ in file)
        except UNREADABLE as error:
            raise ValueError(f"{path} cannot be read: {error}; publish a sound file") from error


class _ShardWriter:
    """Collects small files in JSON line shards of at most 32 MiB."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.documents = self.bytes = self._shards = self._room = 0
        self._file: IO[str] | None = None

    def add(self, path: Path, name: str) -> str:
        """Append one file; returns why it was left out, or nothing."""
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            return "binary: NUL bytes"
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            return f"not UTF-8 at byte {error.start}"
        if not text.strip():
            return "empty"
        line = json.dumps({"path": name, "text": text}, ensure_ascii=False) + "\n"
        if self._file is None or self._room < len(data):
            self._next_shard()
        assert self._file is not None
        self._file.write(line)
        self._room -= len(data)
        self.documents, self.bytes = self.documents + 1, self.bytes + len(data)
        return ""

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _next_shard(self) -> None:
        self.close()
        while (path := self.target / f"shard-{self._shards:05d}.jsonl").exists():
            self._shards += 1
        self._file, self._room = open(path, "x", encoding="utf-8", newline="\n"), SHARD_BYTES  # noqa: SIM115
