"""Megatron's checkpoints in our protocol: what it wrote is moved, hashed by all ranks, receipted, committed by one manifest.

    megatron/attempt-A/save/iter_0000010                        Megatron writes here, and then its tracker file
    checkpoints/step-10/attempt-A/own/iter_0000010/...          moved here when the tracker says that it is whole
    checkpoints/step-10/attempt-A/receipt-K.json                rank K hashed its share of the files, and what came out
    checkpoints/step-10/attempt-A/manifest.json                 all of them: the checkpoint exists
    megatron/attempt-B/load/iter_0000010/...                    links to the files of a verified manifest, and no others

Rank K hashes every file whose number, in the order of names, leaves K when it is divided by the number of ranks. Fence, LATEST,
retention and quarantine are those of every checkpoint (checkpoint_files.py). Megatron's own files may hold pickles: they are
hashed first, and read by Megatron alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.jobs.checkpoint_files import (
    Manifest,
    commit,
    create_only,
    digest,
    manifests,
    newest_attempt,
    place_of,
    retain,
    sync,
)
from tasks.process import read_json, write_json

OWN = "own"
TRACKER = "latest_checkpointed_iteration.txt"
SAVED = re.compile(r"(?:iter_|global_step)0*(\d+)")
"""Folders of Megatron-LM and of Megatron-DeepSpeed; the number is the step."""
DEEPSPEED_TRACKER = "latest"
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Saves:
    """Where an attempt's checkpoints come from and go to; the same on all ranks but for `rank`."""

    root: Path
    """Of all checkpoints of the job."""
    save: Path
    """Megatron's folder of this attempt."""
    rank: int
    world_size: int
    attempt: int
    keep: int
    global_batch: int
    log: Path
    """A file that a committed checkpoint must not be ahead of."""
    identity: Mapping[str, Any]

    def look(self) -> None:
        """Do what there is to do now; all ranks call it again and again. Raises OSError when something cannot be written."""
        if self.rank == 0:
            self._take_over()
        for place in self._taken():
            if not (place / f"receipt-{self.rank}.json").exists():
                create_only(place / f"receipt-{self.rank}.json", {"files": list(self._share(place))})
            if self.rank == 0 and not (place / "manifest.json").exists():
                self._commit(place)

    def pending(self) -> bool:
        """Whether something that Megatron wrote whole is not committed yet."""
        waiting = any(_step(path) <= _tracked(self.save) for path in _saved(self.save))
        return waiting or any(not (place / "manifest.json").exists() for place in self._taken())

    def _take_over(self) -> None:
        """Move what is whole: all ranks have written it before Megatron says so in its tracker."""
        for folder in sorted(_saved(self.save), key=_step):
            if _step(folder) <= _tracked(self.save):
                place = place_of(self.root, _step(folder), self.attempt)
                (place / f"{OWN}.part").mkdir(parents=True)
                os.rename(folder, place / f"{OWN}.part" / folder.name)
                os.rename(place / f"{OWN}.part", place / OWN)

    def _taken(self) -> list[Path]:
        return sorted(path.parent for path in self.root.glob(f"step-*/attempt-{self.attempt}/{OWN}"))

    def _share(self, place: Path) -> Iterator[dict[str, Any]]:
        for path in _files(place)[self.rank :: self.world_size]:
            sync(path)
            with open(path, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            yield {"path": str(path.relative_to(place)), "size": path.stat().st_size, "sha256": sha256}

    def _commit(self, place: Path) -> None:
        """Once all receipts are there: the manifest, then LATEST, then what is old is deleted."""
        receipts = [read_json(place / f"receipt-{rank}.json") for rank in range(self.world_size)]
        if any(receipt is None for receipt in receipts):
            return
        files = sorted((entry for receipt in receipts if receipt for entry in receipt["files"]), key=_path)
        if [entry["path"] for entry in files] != [str(path.relative_to(place)) for path in _files(place)]:
            raise OSError(errno.EIO, f"the receipts in {place} do not name the files that are there")
        if newest_attempt(self.root) > self.attempt:
            raise OSError(errno.ESTALE, f"a newer attempt than {self.attempt} has taken this job over")
        if self.log.exists():
            sync(self.log)
        step = int(place.parent.name.removeprefix("step-"))
        said = dict(self.identity)
        position = {"step": step, "attempt": self.attempt, "consumed_samples": step * self.global_batch}
        commit(self.root, Manifest(**position, identity=said, identity_digest=digest(said), files=files))
        write_json(self.root / "LATEST", {"step": step, "attempt": self.attempt})
        retain(self.root, self.keep)


def _path(entry: Mapping[str, Any]) -> str:
    return str(entry["path"])


def _files(place: Path) -> list[Path]:
    """Megatron's files of a checkpoint, in the order of their names."""
    return sorted((path for path in (place / OWN).rglob("*") if path.is_file()), key=lambda p: str(p.relative_to(place)))


def _saved(save: Path) -> list[Path]:
    return [path for path in save.iterdir() if SAVED.fullmatch(path.name)] if save.exists() else []


def _step(folder: Path) -> int:
    found = SAVED.fullmatch(folder.name)
    assert found
    return int(found[1])


def _tracked(save: Path) -> int:
    """The newest step that Megatron says is whole; -1 for none."""
    try:
        said = (save / TRACKER).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return -1
    return int(said) if said.isdigit() else -1


def committed(root: Path, step: int) -> bool:
    """Whether there is a checkpoint of this step."""
    return any(path.parent.parent.name == f"step-{step:08d}" for path in manifests(root))


def link_verified(root: Path, found: Manifest, load: Path) -> None:
    """Make the folder that Megatron loads from: links to the files that the manifest names, so a file too many is not seen."""
    place = place_of(root, found.step, found.attempt)
    for entry in found.files:
        link = load / Path(entry["path"]).relative_to(OWN)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place.absolute() / entry["path"])
    (load / TRACKER).write_text(str(found.step), encoding="ascii")
    for folder in load.glob("global_step*"):
        (load / DEEPSPEED_TRACKER).write_text(folder.name, encoding="ascii")


class Committing(threading.Thread):
    """Looks after an attempt's checkpoints beside the child, so that hashing holds nothing up."""

    def __init__(self, saves: Saves) -> None:
        super().__init__(daemon=True)
        self._saves, self._over = saves, threading.Event()
        self._failed: Exception | None = None

    def run(self) -> None:
        """Until `finish`, then until nothing is left."""
        try:
            while not self._over.wait(POLL_SECONDS) or self._saves.pending():
                self._saves.look()
        except Exception as error:  # told in the main thread
            self._failed = error

    def check(self) -> None:
        """Raises what went wrong."""
        if self._failed:
            raise self._failed

    def finish(self) -> None:
        """Megatron is over: commit what it wrote whole, and wait for it. Raises what went wrong."""
        self._over.set()
        self.join()
        self.check()
