"""Checkpoints on machines that share no folder: what ranks and their mirror (tasks/jobs/node/mirror.py) tell each other.

    JOB/mirror/terms.json      this folder is mirrored: ranks a machine, and how far the store may be behind
    JOB/mirror/want-K.json     rank K needs these files, which are in the store
    JOB/mirror/have-K.json     they are here now, or why they are not
    JOB/mirror/durable.json    the newest checkpoint of which every file is in the store

They lie on each machine's own disk and are never sent. A machine has the shards of its own ranks; others' are in the store, and
come when a rank asks for them. Standard library only, for the writer process.
"""

from __future__ import annotations

import errno
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError, Missing
from tasks.common.process import read_json, write_json

PLACE = "mirror"
POLL_SECONDS = 0.05
_LARGE = re.compile(r"checkpoints/step-\d+/attempt-\d+/(?:shard-|own/)", re.DOTALL)
_TELLS = re.compile(r"checkpoints/step-\d+/attempt-\d+/(?:receipt-|written-)")


def is_large(name: str) -> bool:
    """Whether a file of a job's folder holds a checkpoint's state: only who reads it gets it."""
    return _LARGE.match(name) is not None


def is_written_by_ranks(name: str) -> bool:
    """Whether it is such a file, or tells of some: all that a rank writes of a checkpoint before it is committed."""
    return is_large(name) or _TELLS.match(name) is not None


def terms(root: Path) -> dict[str, Any] | None:
    """Of JOB/checkpoints: `max_lag_seconds` and `ranks_per_node` where the job's folder is mirrored, else None."""
    output: dict[str, Any] | None = read_json(root.parent / PLACE / "terms.json")
    return output


def agree_to(job: Path, *, max_lag_seconds: float, ranks_per_node: int) -> None:
    """Say that a job's folder is mirrored; the mirror's."""
    (job / PLACE).mkdir(parents=True, exist_ok=True)
    write_json(job / PLACE / "terms.json", {"max_lag_seconds": max_lag_seconds, "ranks_per_node": ranks_per_node})


def neighbours(root: Path, rank: int, world_size: int) -> list[int]:
    """The ranks whose files lie in the same folder as this one's: all, or those of its machine."""
    if (output := terms(root)) is None:
        return list(range(world_size))
    each = int(output["ranks_per_node"])
    first = rank // each * each
    return list(range(first, min(first + each, world_size)))


def lying_here(folder: Path, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a checkpoint's files, by its folder, those that must lie here: where it is mirrored, those that do."""
    if terms(folder.parents[1]) is None:
        return list(entries)
    return [entry for entry in entries if (folder / entry["path"]).is_file()]


def bring(root: Path, rank: int, paths: Sequence[Path]) -> None:
    """Have files come from the store, unless they lie here. Raises IntegrityError for one that is not as it was sent, Missing."""
    place, token = root.parent / PLACE, uuid.uuid4().hex
    names = [path.relative_to(root.parent).as_posix() for path in paths if not path.is_file()]
    if not names:
        return
    write_json(place / f"want-{rank}.json", {"token": token, "names": names})
    while (answer := read_json(place / f"have-{rank}.json") or {}).get("token") != token:
        time.sleep(POLL_SECONDS)
    if answer["error"]:
        raise (IntegrityError if answer["integrity"] else Missing)(answer["error"], remedy=answer["remedy"])


def say_durable(job: Path, step: int, attempt: int) -> None:
    """Say which checkpoint is the newest that is whole in the store; the mirror's."""
    write_json(job / PLACE / "durable.json", {"step": step, "attempt": attempt})


def wait_until_durable(root: Path, step: int, attempt: int, *, seconds: float) -> None:
    """Until a committed checkpoint is whole in the store. Raises OSError when that takes longer."""
    until = time.monotonic() + seconds
    while not _is_durable(root, (step, attempt)):
        if time.monotonic() > until:
            raise OSError(
                errno.ETIMEDOUT, f"step {step} is not in the store after {seconds:g} s: it is on this machine alone"
            )
        time.sleep(POLL_SECONDS)


def _is_durable(root: Path, place: tuple[int, int]) -> bool:
    newest = read_json(root.parent / PLACE / "durable.json")
    return newest is not None and (newest["step"], newest["attempt"]) >= place
