"""A checkpoint that verifies, and that starts die of nevertheless: after the second one it is quarantined.

A start died of it when it had chosen it, recorded no step, and a rank's error says that it broke by itself: not a user's mistake,
no memory, nor a neighbour that was gone. Kills and evictions leave no error, so they never count. The last good one stays in any
case: then the rule of starts without progress ends the job (tasks/common/process.py). Only rank 0 decides. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tasks.common.process import read_json
from tasks.jobs.checkpoint.files import create_only, manifests, quarantine, quarantined
from tasks.jobs.checkpoint.retention import PIN
from tasks.jobs.training.records import all_records

FAILED = "failed-"
STARTS = 2
"""Of which a checkpoint is given up."""
NEIGHBOURS = ("closed by peer", "connection reset", "connection refused", "timed out", "timeout")
"""What a rank says that another one has left alone; in lower case."""


def give_up_what_starts_die_of(job: Path, root: Path) -> None:
    """Look at the newest start before this one; quarantine what it went on from when it is the second to die of it."""
    result = _newest_pin(root)
    if not result:
        return
    folder, pin, attempt = result
    if any(record.get("attempt") == attempt for record in all_records(job / "metrics.jsonl")):
        return
    if output := _own_error(job, since=pin.stat().st_mtime):
        create_only(folder / f"{FAILED}{attempt}", {"message": output})
    failed = sorted(folder.glob(f"{FAILED}*"))
    others = [path for path in manifests(root) if path.parent != folder and not quarantined(path.parent)]
    if len(failed) >= STARTS and others:
        reason = f"{len(failed)} starts died of {folder} before their first step, the last one of: {output}"
        print(f"quarantined: {reason}", file=sys.stderr, flush=True)
        quarantine(folder, reason)


def _newest_pin(root: Path) -> tuple[Path, Path, int] | None:
    """The checkpoint that the newest start before this one went on from, its mark, and that start's attempt."""
    pins = [(int(path.name.removeprefix(PIN)), path) for path in root.glob(f"step-*/attempt-*/{PIN}*")]
    if not pins:
        return None
    attempt, pin = max(pins)
    return (pin.parent, pin, attempt) if (pin.parent / "manifest.json").exists() else None


def _own_error(job: Path, *, since: float) -> str:
    """What a rank broke of after a time; empty: of nothing of its own."""
    for path in sorted((job / "errors").glob("rank-*.json")):
        payload: dict[str, Any] = read_json(path) or {}
        message = f"{payload.get('type')}: {payload.get('message')}"
        alone = not any(words in message.lower() for words in NEIGHBOURS)
        if path.stat().st_mtime >= since and payload.get("class") == "infrastructure" and alone:
            return message
    return ""
