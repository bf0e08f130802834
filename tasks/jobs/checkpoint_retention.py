"""Which checkpoints are deleted, and which are never: the newest that verifies, those kept for good, one that is being read.

Standard library only, for the writer process does it. What a checkpoint is: checkpoint_files.py.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tasks.errors import IntegrityError
from tasks.jobs.checkpoint_files import age, create_only, manifests, quarantined, verify

PIN = "read-by-"


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
    return any(int(path.name.removeprefix(PIN)) > attempt for path in folder.glob(f"{PIN}*"))


def retain(root: Path, keep: int, *, every: int | None = None, attempt: int = 0) -> None:
    """Keep the newest `keep` checkpoints, and for good those of every so many steps; delete older ones.

    Only while one of the newest verifies byte by byte, and none that a newer attempt than `attempt` reads.
    """
    good = [path for path in manifests(root) if not quarantined(path.parent)]
    kept = good[:keep]
    old = [
        path for path in good[keep:] if not (every and age(path)[0] % every == 0) and not _pinned(path.parent, attempt)
    ]
    if old and any(_intact(path) for path in kept):
        for path in old:
            delete(path.parent)


def _intact(path: Path) -> bool:
    try:
        verify(path)
    except (IntegrityError, ValueError):
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
