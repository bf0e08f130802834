"""Which checkpoints are deleted, and which are never: the newest that lies there whole, those kept for good, one being read.

Standard library only, for the writer process does it. What a checkpoint is: files.py.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.jobs.checkpoint.files import (
    BLOCK,
    age,
    checked_block,
    create_only,
    manifests,
    quarantined,
    read_manifest,
    require_chained,
)
from tasks.jobs.checkpoint.mirrored import lying_here

PIN = "read-by-"
KEPT_FOR = "kept-for-"
"""Mark of a checkpoint that another job is about to take over (origins.py): no attempt of this one deletes it."""
KEPT_SECONDS = 7 * 86400
"""For so long, since it was set: whoever asked for the checkpoint may never come."""
SAMPLED = 16
"""Blocks of a checkpoint that are read before older ones are deleted: 64 MiB."""


def clean(root: Path, attempt: int) -> None:
    """Delete what attempts before `attempt` began to write and did not commit."""
    for folder in root.glob("step-*/attempt-*"):
        if int(folder.name.removeprefix("attempt-")) < attempt and not (folder / "manifest.json").exists():
            delete(folder)


def clean_failed(root: Path, attempt: int, *, before: int) -> None:
    """Delete what this attempt began to write before a step and could not commit, for example on a full disk."""
    for folder in root.glob(f"step-*/attempt-{attempt}"):
        if age(folder / "manifest.json")[0] < before and not (folder / "manifest.json").exists():
            delete(folder)


def pin(folder: Path, attempt: int) -> None:
    """Say that an attempt goes on from a checkpoint: writers of older attempts, which may still run, do not delete it.

    It needs no end: this attempt's own writer deletes nothing before its first commit, which needs all ranks to have read.
    """
    create_only(folder / f"{PIN}{attempt}", {"attempt": attempt})


def _pinned(folder: Path, attempt: int) -> bool:
    newer = (int(path.name.removeprefix(PIN)) > attempt for path in folder.glob(f"{PIN}*"))
    return any(newer) or any(map(_counts, folder.glob(f"{KEPT_FOR}*")))


def _counts(mark: Path) -> bool:
    """Whether a mark is not too old, nor gone meanwhile."""
    try:
        return time.time() - mark.stat().st_mtime < KEPT_SECONDS
    except FileNotFoundError:
        return False


def retain(root: Path, keep: int, *, every: int | None = None, attempt: int = 0) -> None:
    """Keep the newest `keep` checkpoints, and for good those of every so many steps; delete older ones.

    Only while one of the newest lies there as it was written, and none that a newer attempt than `attempt` reads. Not every byte
    is read for that: at 100 GB it would take minutes after each commit. What the newest holds was hashed when it was written, the
    scrub reads all of it every few minutes (writer.py), and whoever goes on from it reads all of it, too.
    """
    good = [path for path in manifests(root) if not quarantined(path.parent)]
    kept = good[:keep]
    old = [
        path for path in good[keep:] if not (every and age(path)[0] % every == 0) and not _pinned(path.parent, attempt)
    ]
    if old and any(_lies_there(path) for path in kept):
        for path in old:
            delete(path.parent)


def _lies_there(path: Path) -> bool:
    """Whether a checkpoint's manifest and the length of every file are right, and a block here and there has its hash."""
    try:
        manifest = read_manifest(path)
        require_chained(path.parents[2], manifest, path)
        files = lying_here(path.parent, manifest.files)
        sizes = [(path.parent / entry["path"]).stat().st_size for entry in files]
        if sizes != [entry["size"] for entry in files]:
            return False
        blocks = [(entry, number) for entry in files for number in range(len(entry.get("blocks", ())))]
        for entry, number in random.Random(str(path)).sample(blocks, min(SAMPLED, len(blocks))):
            with open(path.parent / entry["path"], "rb") as file:
                file.seek(number * BLOCK)
                checked_block(file.read(BLOCK), entry, number, path.parent / entry["path"])
    except (IntegrityError, ValueError, OSError):
        return False
    return True


def delete(folder: Path) -> None:
    """Delete one attempt's folder, its manifest first. A failure is said in the log and stops nothing."""
    try:
        (folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    except OSError as error:
        print(f"could not delete {folder}: {error}", file=sys.stderr, flush=True)
