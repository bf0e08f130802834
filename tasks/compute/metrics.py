"""What a job wrote into metrics.jsonl, read from outside while it writes: whole lines only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL_BYTES = 65_536


def since(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The records of whole lines after an offset in bytes, and the new offset.

    A file that became shorter than the offset is read on from its new end: its records were there already.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [], 0
    if size <= offset:
        return [], size
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    return list(_records(whole)), offset + len(whole)


def newest_step(folder: Path) -> int:
    """The highest step among the newest records of a job; -1 while it has written none."""
    return max((int(record["step"]) for record in newest_records(folder) if is_step(record)), default=-1)


def newest_records(folder: Path) -> list[dict[str, Any]]:
    """The records in the last 64 KiB of the file."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(begin)
            data = file.read()
    except FileNotFoundError:
        return []
    first = data.find(b"\n") + 1 if begin else 0
    return list(_records(data[first : data.rfind(b"\n") + 1]))


def is_step(record: dict[str, Any]) -> bool:
    """Whether a record tells of a step of training."""
    return isinstance(record.get("step"), int)


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """What a machine's crash tore is left out."""
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
