"""Files and trees as the folder of a dataset: containers of documents are copied, other text becomes JSON lines.

Public datasets are often one array in a `.json` file, which nothing else reads: it is rewritten once, an element at a time.

What is in them is not judged here: tasks/data/judging.py does that. Reading them is tasks/data/corpus/reading.py.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tasks.data.corpus.inputs import LINE_LIMIT, cut, find_shards, kind_of
from tasks.data.corpus.reading import opened, read_unit

SHARD_BYTES = 32 << 20
FIRST_LINES = 20
"""Lines, or rows, of each JSON lines or Parquet file that are looked at before it is copied."""


class Packed(NamedTuple):
    """What packing made: counts, and the files that were left out with the reason."""

    documents: int
    bytes: int
    skipped: dict[str, str]
    sources: dict[str, list[str]]
    """Of each shard, the absolute paths that it was made of: the file that was copied, or the roots of the text files."""


def pack(
    paths: list[Path],
    target: Path,
    *,
    include: str = "*",
    exclude: tuple[str, ...] = (),
    text_field: str = "",
    ours: Collection[Path] = (),
) -> Packed:
    """Make a dataset folder of files and trees: JSON lines are copied byte for byte, other text becomes `text` and `path`.

    Trees are walked in the order of their paths, so that the same tree is the same version. Files that are not UTF-8 text are
    left out and named. Raises ValueError when a path does not exist, when nothing is left, and, with a `text_field`, when one of
    the first lines of a file is no JSON object that has text in that field. Of the roots in `ours`, which nobody else writes to,
    and on the same disk, containers get a second name instead of a copy.
    """
    target.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(target)
    skipped: dict[str, str] = {}
    sources: dict[str, list[str]] = {}
    copied = 0
    for root in paths:
        if not root.exists():
            raise ValueError(f"{root} does not exist; name files or folders to publish")
        for path in _files(root, include, exclude):
            if kind_of(path, named=False) != "text":
                place, number = target / path.name, 1
                while place.exists():
                    place, number = target / f"{number}-{path.name}", number + 1
                if text_field:
                    _require_documents(path, text_field)
                (os.link if root in ours else shutil.copyfile)(path, place)
                sources[place.name] = [str(path.resolve())]
                copied += _count(place, path)
            elif reason := writer.add(path, _name(path, root)):
                skipped[str(path)] = reason
            else:
                writer.note(sources, root)
    writer.close()
    if not writer.documents and not copied:
        first = next(iter(skipped.items()), None)
        why = f": {len(skipped)} file(s) left out, the first {first[0]} ({first[1]})" if first else ""
        raise ValueError(f"no text found under {', '.join(map(str, paths))}{why}; name text files, JSONL or Parquet")
    return Packed(writer.documents + copied, writer.bytes, skipped, sources)


def _require_documents(path: Path, text_field: str) -> None:
    """Raise ValueError that names file, line and remedy, when one of a file's FIRST_LINES is no document."""
    try:
        batch = next(read_unit(cut(find_shards([path]))[0], (text_field,)), None)
        first = batch.bad[0] if batch and batch.bad else None
        problem = f"line {first.line}: {first.reason}" if first and first.line <= FIRST_LINES else ""
    except ValueError as error:
        problem = str(error)
    if problem:
        raise ValueError(
            f"{path}, {problem}. Nothing was published. Correct the file; where its text is in another field, name that with "
            "--text-field NAME (conversations: messages), and as validation.text_field and "
            "preprocessing.text_field in the configuration; --text-field '' publishes the files unread"
        )


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


def _count(place: Path, path: Path) -> int:
    """Lines, or rows, of a copied file. Raises ValueError when it cannot be read."""
    try:
        if kind_of(place) == "parquet":
            import pyarrow.parquet as pq

            return int(pq.read_metadata(place).num_rows)
        with opened(place, kind_of(place)) as (file, _):
            count, last = 0, b"\n"
            while block := file.read(1 << 20):
                count, last = count + block.count(b"\n"), block[-1:]
            return count + (last != b"\n")
    except (EOFError, OSError, ValueError) as error:
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
            self.close()
            while (shard := self.target / f"shard-{self._shards:05d}.jsonl").exists():
                self._shards += 1
            self._file, self._room = open(shard, "x", encoding="utf-8", newline="\n"), SHARD_BYTES  # noqa: SIM115
        assert self._file is not None
        self._file.write(line)
        self._room -= len(data)
        self.documents, self.bytes = self.documents + 1, self.bytes + len(data)
        return ""

    def note(self, sources: dict[str, list[str]], root: Path) -> None:
        """Say that the shard that was written last holds text from below a root; of a folder, with `/` at its end."""
        assert self._file is not None
        place = root.resolve()
        known = sources.setdefault(Path(self._file.name).name, [])
        name = f"{place}/" if place.is_dir() else str(place)
        if name not in known:
            known.append(name)

    def close(self) -> None:
        if self._file:
            self._file.close()


BLOCK = 1 << 20
_SPACE = " \t\r\n"


def to_lines(path: Path) -> Path:
    """Rename or rewrite a `.json` file so that it ends in `.jsonl`, in its folder; memory grows with its longest element.

    An array becomes one line an element; anything else is taken for JSON lines, and stays byte for byte. Raises ValueError for
    an array that is cut off or no JSON.
    """
    target = path.with_name(f"{path.name}l")
    if target.exists():
        target = path.with_name(f"{path.name}.jsonl")
    with open(path, encoding="utf-8-sig") as file:
        first = file.read(BLOCK).lstrip(_SPACE)[:1]
        if first != "[":
            path.rename(target)
            return target
        file.seek(0)
        with open(target, "w", encoding="utf-8", newline="\n") as lines:
            for element in elements(file, path):
                lines.write(json.dumps(element, ensure_ascii=False) + "\n")
    path.unlink()
    return target


def elements(file: IO[str], path: Path) -> Iterator[Any]:
    """Each element of a JSON array, in order. `path` is for messages."""
    decoder, held, number, wanted = json.JSONDecoder(), "", 0, BLOCK
    held = file.read(BLOCK).lstrip("\ufeff" + _SPACE).removeprefix("[").lstrip(_SPACE)
    while True:
        try:
            if held.startswith("]"):
                return
            value, end = decoder.raw_decode(held)
            after = held[end:].lstrip(_SPACE)
            if not after.startswith((",", "]")):  # a number may go on, and more may come
                raise json.JSONDecodeError("no comma", held, end)
        except json.JSONDecodeError as error:
            more = file.read(wanted)
            if not more or len(held) > LINE_LIMIT:
                raise ValueError(
                    f"{path.name}: element {number + 1} of the array is cut off, or is no JSON ({error.msg}). Nothing was "
                    "published"
                ) from None
            held, wanted = (held + more).lstrip(_SPACE), 2 * wanted
            continue
        yield value
        number, wanted = number + 1, BLOCK
        held = after.removeprefix(",").lstrip(_SPACE) if after.startswith(",") else after
