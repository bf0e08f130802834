"""Files that a user gives to a suite: a dataset that the stage handed to the job, or a path; JSON lines, errors with the line.

What the records mean is the suites'.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tasks.artifacts import parse_ref
from tasks.jobs.evaluation.suites import Bench


class Line(NamedTuple):
    """One record of a file of JSON lines."""

    place: str
    """The file and the line, as errors say it."""
    record: dict[str, Any]


def place_of(bench: Bench, ref: str, *, setting: str) -> Path:
    """The folder of a dataset, or the path that is named. Raises ValueError for one that is not there."""
    if ref.startswith("/"):
        path = Path(ref)
        if not path.exists():
            raise ValueError(
                f"{setting} = {ref} is not on this machine: name a path that it sees, or publish a dataset"
            )
        return path
    _, name, _ = parse_ref(ref, kind="dataset")
    folder = bench.rank.inputs.get(f"files-{name}")
    if folder is None:
        raise ValueError(f"{setting} = {ref}, and the job was not given that dataset")
    return folder


def lines_of(place: Path, *, setting: str, fields: tuple[str, ...]) -> Iterator[Line]:
    """The records of a file, or of all `*.jsonl` of a folder in the order of their names; each has the fields, as text.

    Raises ValueError, with file and line, for what is no JSON object or lacks a field, and where there is no record at all.
    """
    empty = True
    for file in files_of(place):
        with open(file, "rb") as read:
            for number, raw in enumerate(read, start=1):
                if raw.strip():
                    empty = False
                    where = f"{file.name}, line {number}"
                    yield Line(where, _record(raw, fields, where=f"{setting}: {where}"))
    if empty:
        raise ValueError(f"{setting}: {place.name} has no records; give JSON lines with {' and '.join(fields)}")


def files_of(place: Path) -> list[Path]:
    """The files of JSON lines that `place` stands for."""
    return sorted(place.glob("*.jsonl")) if place.is_dir() else [place]


def digest_of(files: Iterable[Path]) -> str:
    """The sha256, in hexadecimal digits, of the names and contents of files, in their order.

    A suite gives it as `sha256` of its details: what is under an absolute path may change between two models.
    """
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as read:
            whole.update(f"{file.name}\0{hashlib.file_digest(read, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def _record(raw: bytes, fields: tuple[str, ...], *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: no JSON in UTF-8 ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__} where an object with {' and '.join(fields)} should be")
    for field in fields:
        if not isinstance(record.get(field), str) or not record[field].strip():
            raise ValueError(f"{where}: `{field}` must be text, and is {record.get(field)!r:.60}")
    return record
