"""Which checkpoints are deleted, and which are never: the newest that lies there whole, those kept for good, one being read.

Standard library only, for the writer process does it. What a checkpoint is: files.py.

Which checkpoint a run goes on from: the newest that verifies and is of this run.

What a checkpoint is: files.py. Of another run, on purpose: origins.py. How the ranks agree on one, and which of
two tiers it comes from: training/resuming.py.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.config.continue_from import CONTINUES, differing
from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.files import (
    BLOCK,
    Manifest,
    age,
    checked_block,
    create_only,
    manifests,
    place_of,
    quarantine,
    quarantined,
    read_manifest,
    require_chained,
    verify,
)
from tasks.jobs.checkpoint.mirrored import bring, lying_here, terms


def identity(
    config: TrainingConfig, tokens: Mapping[str, Any], *, base: str = "", continues: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a run must share with a checkpoint to go on from it. How many ranks there are and how they divide is not in it.

    `base` is the version of its base model, where it has one: adapters are of no use beside other weights. `continues` is what it
    went on from, where that was another run (origins.py).
    """
    version = {**({"base": base} if base else {}), **({CONTINUES: dict(continues)} if continues else {})}
    return {"training": config.model_dump(mode="json"), "tokens": dict(tokens), **version}


def choose(root: Path, wanted: Mapping[str, Any], *, attempt: int = 0, whole: bool = False) -> Manifest | None:
    """The newest checkpoint whose every byte verifies; None when there never was one. What fails is quarantined.

    It is pinned for the attempt first, so that nobody deletes it. Where the folder is mirrored, only what lies here is verified,
    unless `whole` has the rest come. Raises IntegrityError when there are checkpoints and none is
    good, ValueError when the good one is of another run.
    """
    reasons: list[str] = []
    for item in _good(root, attempt, reasons, whole=whole):
        if differences := differing(item.identity, wanted):
            where = place_of(root, item.step, item.attempt)
            raise ValueError(
                f"cannot continue from {where}: {'; '.join(map(str, differences))}. Undo the change, start a new training in "
                "another job folder, or continue from it on purpose: headway retrain --continue-from"
            )
        return item
    if reasons or (root / "LATEST").exists():
        text = "; ".join(reasons) or "LATEST names one, but no manifest is left"
        raise IntegrityError(
            f"all checkpoints under {root} are bad: {text}",
            remedy=f"Restore one and delete its quarantined.json, or delete {root} to start from step 0.",
        )
    return None


def good_ones(root: Path, wanted: Mapping[str, Any]) -> dict[tuple[int, int], Manifest]:
    """Every checkpoint that verifies and is of this run, by step and attempt; what fails is quarantined."""
    results = list(_good(root, 0, []))
    return {(each.step, each.attempt): each for each in results if not differing(each.identity, wanted)}


def _good(root: Path, attempt: int, reasons: list[str], *, whole: bool = False) -> Iterator[Manifest]:
    for path in manifests(root):
        if reason := quarantined(path.parent):
            reasons.append(reason)
            continue
        try:
            if attempt:
                pin(path.parent, attempt)
            if whole and terms(root):
                bring(root, 0, [path.parent / entry["path"] for entry in read_manifest(path).files])
            yield verify(path)
        except IntegrityError as error:
            print(f"quarantined: {error}", file=sys.stderr, flush=True)
            quarantine(path.parent, str(error))
            reasons.append(str(error))


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
