"""The record of steps, `metrics.jsonl`, as training itself reads it. Who else reads it: tasks/compute/logs.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def mend(log: Path) -> None:
    """Cut off a last line that a crash of the machine left torn, so that the next one starts a line of its own."""
    if log.exists():
        os.truncate(log, log.read_bytes().rfind(b"\n") + 1)


def all_records(log: Path) -> list[dict[str, Any]]:
    """Every record, of all attempts, in the order in which they were written."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def last_of_each(every: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last attempt's record of every step: steps between a checkpoint and a kill were done, and recorded, more than once."""
    records: dict[int, dict[str, Any]] = {}
    for record in every:
        before = records.get(record["step"])
        if before is None or before["attempt"] <= record["attempt"]:
            records[record["step"]] = record
    return [records[step] for step in sorted(records)]


def last_records(log: Path) -> list[dict[str, Any]]:
    """`last_of_each` of a log."""
    return last_of_each(all_records(log))
