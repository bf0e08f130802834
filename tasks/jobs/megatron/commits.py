"""Megatron's checkpoints in our protocol: what it wrote is moved, hashed by all ranks, receipted, committed by one manifest.

    megatron/attempt-A/save/iter_0000010                        Megatron writes here, and then its tracker file
    checkpoints/step-10/attempt-A/own/iter_0000010/...          moved here when the tracker says that it is whole
    checkpoints/step-10/attempt-A/receipt-K.json                rank K hashed its share of the files, and what came out
    checkpoints/step-10/attempt-A/manifest.json                 all of them: the checkpoint exists
    megatron/attempt-B/load/iter_0000010/...                    links to the files of a verified manifest, and no others

Receipts, fence, manifest, LATEST and retention are those of every checkpoint (tasks/jobs/checkpoint/writer.py). No writer process
is needed: this is another process than the one that trains. Megatron's files may hold pickles: they are hashed first, and read by
Megatron alone.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

from tasks.jobs.checkpoint.files import Manifest, create_only, place_of
from tasks.jobs.checkpoint.writer import OWN, Writing

TRACKER = "latest_checkpointed_iteration.txt"
SAVED = re.compile(r"(?:iter_|global_step)0*(\d+)")
"""Folders of Megatron-LM and of Megatron-DeepSpeed; the number is the step."""
DEEPSPEED_TRACKER = "latest"
POLL_SECONDS = 0.1
LEAVE_SECONDS = 30.0
"""How long a rank whose process failed stays for its part of what was written whole: others may be gone too."""
OVER = "committed"
"""Beside the folder that Megatron writes: rank 0 has nothing left to commit in this attempt."""


class Saves:
    """One rank's part of committing an attempt's checkpoints. State: which are done."""

    def __init__(self, save: Path, writing: Writing, *, global_batch: int) -> None:
        """`save` is Megatron's folder of this attempt; `writing` says whose the checkpoints are and where they go."""
        self._save, self._writing, self._global_batch = save, writing, global_batch
        self._root, self._done = Path(writing.root), set[Path]()

    def look(self) -> None:
        """Do what there is to do now; all ranks call it again and again. Raises OSError when something cannot be written."""
        if self._writing.rank == 0:
            # Move what is whole: all ranks have written it before Megatron says so in its tracker.
            folders = self._save.iterdir() if self._save.exists() else ()
            for folder in sorted((one for one in folders if SAVED.fullmatch(one.name)), key=_step):
                if _step(folder) <= _tracked(self._save):
                    part = place_of(self._root, _step(folder), self._writing.attempt) / f"{OWN}.part"
                    part.mkdir(parents=True)
                    os.rename(folder, part / folder.name)
                    os.rename(part, part.with_name(OWN))
        for place in self._taken():
            step = int(place.parent.name.removeprefix("step-"))
            self._writing.save(step, step * self._global_batch)
            self._done.add(place)

    def pending(self, *, well: bool) -> bool:
        """Whether this rank is still needed; `well`: its process ended well, so rank 0's will, and says what was the last."""
        if well and self._writing.rank:
            return self._left() or not (self._save.parent / OVER).exists()
        return self._left()

    def close(self) -> None:
        """Rank 0 has committed all that there was."""
        if self._writing.rank == 0:
            create_only(self._save.parent / OVER, {})

    def _left(self) -> bool:
        """Whether this rank has not done its part of something that Megatron wrote whole."""
        # by the tracker, which stays: nothing is missed while a folder is moved, or seen late by another machine
        done = max((int(place.parent.name.removeprefix("step-")) for place in self._done), default=-1)
        return _tracked(self._save) > done or bool(self._taken())

    def _taken(self) -> list[Path]:
        places = [path.parent for path in self._root.glob(f"step-*/attempt-{self._writing.attempt}/{OWN}")]
        return sorted(place for place in places if place not in self._done)


def _step(folder: Path) -> int:
    match = SAVED.fullmatch(folder.name)
    assert match
    return int(match[1])


def _tracked(save: Path) -> int:
    """The newest step that Megatron says is whole; -1 for none."""
    try:
        text = (save / TRACKER).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return -1
    return int(text) if text.isdigit() else -1


def link_verified(root: Path, result: Manifest, load: Path) -> None:
    """Make the folder that Megatron loads from: links to the files that the manifest names, so a file too many is not seen."""
    place = place_of(root, result.step, result.attempt)
    for entry in result.files:
        link = load / Path(entry["path"]).relative_to(OWN)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place.absolute() / entry["path"])
    (load / TRACKER).write_text(str(result.step), encoding="ascii")
    for folder in load.glob("global_step*"):
        (load / DEEPSPEED_TRACKER).write_text(folder.name, encoding="ascii")


class Committing(threading.Thread):
    """Looks after an attempt's checkpoints beside the child, so that hashing holds nothing up."""

    def __init__(self, saves: Saves) -> None:
        super().__init__(daemon=True)
        self._saves, self._over = saves, threading.Event()
        self._failed: OSError | None = None
        self._well = True

    def run(self) -> None:
        """Until `finish`, then until nothing is left."""
        try:
            while not self._over.wait(POLL_SECONDS):
                self._saves.look()
            until = time.monotonic() + LEAVE_SECONDS
            while self._saves.pending(well=self._well) and (self._well or time.monotonic() < until):
                self._saves.look()
                time.sleep(POLL_SECONDS)
            self._saves.close()
        except OSError as error:  # told in the main thread
            self._failed = error

    def check(self) -> None:
        """Raises what went wrong."""
        if self._failed:
            raise self._failed
        if not self.is_alive() and not self._over.is_set():
            raise RuntimeError("nobody commits checkpoints any more: see this rank's log")

    def finish(self, *, well: bool) -> None:
        """Megatron is over, `well` or not: commit what it wrote whole, and wait for it. Raises what went wrong."""
        self._well = well
        self._over.set()
        self.join()
        self.check()
