"""Which checkpoint a run goes on from: the newest that verifies and is of this run.

What a checkpoint is: files.py. Of another run, on purpose: origins.py. How the ranks agree on one, and which of
two tiers it comes from: training/checkpoints.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.config.continue_from import CONTINUES, differing
from tasks.config.training import TrainingConfig
from tasks.jobs.checkpoint.files import Manifest, manifests, place_of, quarantine, quarantined, read_manifest, verify
from tasks.jobs.checkpoint.mirrored import bring, terms
from tasks.jobs.checkpoint.retention import pin


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
