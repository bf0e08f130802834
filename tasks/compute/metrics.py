"""What a job wrote into metrics.jsonl, read from outside while it writes: whole lines only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TAIL_BYTES = 65_536
FIGURES = 3
"""Leading figures of the steps that are shown: of 12,345 every hundredth."""
POINT_SECONDS = 10.0


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


class Thinning:
    """Which records of a long job are worth a point in MLflow. State: when the last one was, and what the one before said.

    All of the first thousand steps, of the first ten thousand every tenth, and so on; one in ten seconds however many there are;
    and whatever says something that the record before did not, such as a measurement on held-out text.
    """

    def __init__(self) -> None:
        self._shown, self._before = 0.0, frozenset[str]()

    def of(self, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are, in their order."""
        return [record for record in records if not is_step(record) or self._take(record)]

    def _take(self, record: dict[str, Any]) -> bool:
        every = 10 ** max(0, len(str(record["step"])) - FIGURES)
        now, payload = float(record.get("time") or 0.0), frozenset(record)
        new, self._before = payload - self._before, payload
        if record["step"] % every and now - self._shown < POINT_SECONDS and not new:
            return False
        self._shown = now
        return True


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    """What a machine's crash tore is left out."""
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
