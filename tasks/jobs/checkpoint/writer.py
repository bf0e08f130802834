"""The process beside a rank that writes its checkpoints, so that training waits for a copy in memory and no longer.

It reads one JSON line a request and answers one line when the work is done. Rank 0's writer is also the coordinator: it waits for
all receipts and commits, and now and then reads the newest checkpoint again. What is written where: files.py. Standard library
only, to start fast.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.common.errors import IntegrityError
from tasks.common.process import die_with_parent, read_json, write_json
from tasks.jobs.checkpoint.files import (
    BLOCK,
    Manifest,
    age,
    commit,
    create_only,
    digest,
    manifests,
    newest_attempt,
    place_of,
    quarantine,
    quarantined,
    shard_name,
    sync,
    verify,
)
from tasks.jobs.checkpoint.mirrored import Limit, lag_limit, lying_here, neighbours, wait_until_durable
from tasks.jobs.checkpoint.retention import clean_failed, retain

# The newest checkpoint is read again in the background, so that a disk that forgets is noticed before it is needed.
#
# What was found is in `checkpoints/SCRUBBED`.


EVERY_SECONDS = 600.0


class Scrubber(threading.Thread):
    """Reads the newest checkpoint again, every so often, until the process ends."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root, self._over = root, threading.Event()

    def run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            try:
                scrub(self._root)
            except (OSError, ValueError) as error:
                print(f"the newest checkpoint could not be read again: {error}", file=sys.stderr, flush=True)


def scrub(root: Path) -> bool | None:
    """Verify the newest checkpoint, and quarantine it when it is bad; whether it is good, None when there is none."""
    newest = next((path for path in manifests(root) if not quarantined(path.parent)), None)
    if newest is None:
        return None
    try:
        verify(newest)
    except IntegrityError as error:
        if not newest.exists():
            return None  # retention deleted it meanwhile
        print(f"quarantined: {error}", file=sys.stderr, flush=True)
        quarantine(newest.parent, str(error))
        return _told(root, newest, good=False)
    return _told(root, newest, good=True)


def _told(root: Path, newest: Path, *, good: bool) -> bool:
    step, attempt = age(newest)
    write_json(root / "SCRUBBED", {"step": step, "attempt": attempt, "good": good, "time": time.time()})
    return good


POLL_SECONDS = 0.01
OWN = "own"
LOCAL_KEEP = 2
"""Checkpoints that are kept on the machine's own disk: the newest may be in the process of being written."""


@dataclass(frozen=True)
class Writing:
    """What stays the same over all checkpoints of an attempt; the rank hands it over as one JSON argument."""

    root: str
    rank: int
    world_size: int
    attempt: int
    keep: int
    """Newest checkpoints that are kept."""
    log: str
    """A file that a committed checkpoint must not be ahead of; it is brought to the disk before the commit."""
    identity: dict[str, Any]
    keep_every: int | None = None
    """Checkpoints of every so many steps are kept for good; None: none."""
    local: str = ""
    """This rank's folder on the machine's own disk, for the tier that is saved more often; empty: there is none."""
    buffer: int = -1
    """Inherited descriptor of the memory that holds the shard, a whole safetensors file; -1: this rank has no shard."""
    size: int = 0
    """Bytes of the shard."""
    own: bool = False
    """Whether files that another engine wrote, under `own/`, are part of it; each rank hashes its share of them."""

    def save(self, step: int, consumed_samples: int, *, local: bool = False) -> None:
        """Write this rank's files and its receipt; on rank 0, then wait for all others and commit.

        On the machine's own disk each rank's checkpoint is one of its own: no other rank may see that disk.
        """
        if local:
            alone = replace(self, root=self.local, rank=0, world_size=1, keep=LOCAL_KEEP, keep_every=None)
            alone.save(step, consumed_samples)
            return
        folder, limit = place_of(Path(self.root), step, self.attempt), lag_limit(Path(self.root))
        folder.mkdir(parents=True, exist_ok=True)
        create_only(folder / f"receipt-{self.rank}.json", {"files": [*self._shard(folder), *self._others(folder)]})
        if self.rank == 0:
            # Write the manifest, then LATEST, then delete what is old. On a shared folder the wait has no limit: when a
            # rank or its writer dies, the launcher ends all ranks, and they their writers; when a rank fails to write,
            # the ranks say so to each other and this writer is ended (training/checkpoints.py). Others' receipts come through
            # a store where the folder is mirrored, and a store may be slow.
            receipts = [_wait_for(folder / f"receipt-{rank}.json", limit) for rank in range(self.world_size)]
            files = [entry for receipt in receipts for entry in receipt["files"]]
            for entry in lying_here(folder, files):
                if (folder / entry["path"]).stat().st_size != entry["size"]:
                    raise OSError(errno.EIO, f"{entry['path']} of step {step} is not as long as its receipt says")
            root = Path(self.root)
            if newest_attempt(root) > self.attempt:
                raise OSError(errno.ESTALE, f"a newer attempt than {self.attempt} has taken this job over")
            if Path(self.log).exists():
                sync(Path(self.log))
            manifest = Manifest(
                step=step,
                attempt=self.attempt,
                consumed_samples=consumed_samples,
                identity=self.identity,
                identity_digest=digest(self.identity),
                files=files,
                world_size=self.world_size,
            )
            commit(root, manifest)
            write_json(root / "LATEST", {"step": step, "attempt": self.attempt})
            if limit:  # before older ones are deleted, there and here
                wait_until_durable(root, step, self.attempt, limit)
            clean_failed(root, self.attempt, before=step)
            retain(root, self.keep, every=self.keep_every, attempt=self.attempt)

    def _shard(self, folder: Path) -> Iterator[dict[str, Any]]:
        if self.buffer < 0:
            return
        path = folder / shard_name(self.rank)
        try:
            blocks = []
            with open(path, "xb") as file, mmap.mmap(self.buffer, self.size, access=mmap.ACCESS_READ) as memory:
                for start in range(0, self.size, BLOCK):
                    block = memory[start : start + BLOCK]
                    file.write(block)
                    blocks.append(hashlib.sha256(block).hexdigest())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno != errno.EEXIST:
                path.unlink(missing_ok=True)  # its room is needed, on a disk that is full
            raise
        yield {"path": path.name, "size": self.size, "blocks": blocks}

    def _others(self, folder: Path) -> Iterator[dict[str, Any]]:
        """This rank's share of the files that an engine wrote here: once all ranks that write here said that theirs are whole."""
        if not self.own:
            return
        create_only(folder / f"written-{self.rank}.json", {})
        ranks = neighbours(Path(self.root), self.rank, self.world_size)
        for rank in ranks:
            _wait_for(folder / f"written-{rank}.json")
        files = sorted(str(path.relative_to(folder)) for path in (folder / OWN).rglob("*") if path.is_file())
        for name in files[ranks.index(self.rank) :: len(ranks)]:
            sync(folder / name)
            with open(folder / name, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            yield {"path": name, "size": (folder / name).stat().st_size, "sha256": sha256}


def _wait_for(path: Path, limit: Limit | None = None) -> dict[str, Any]:
    while (result := read_json(path)) is None:
        if limit:
            limit.require(path.name)
        time.sleep(POLL_SECONDS)
    return dict(result)


def serve(writing: Writing, requests: Iterable[str]) -> None:
    """Answer each request `{step, consumed_samples, local}` with `{step, errno, error, seconds}`; errno 0 is success."""
    for line in requests:
        request = json.loads(line)
        answer, began = {"step": request["step"], "errno": 0, "error": ""}, time.monotonic()
        try:
            writing.save(**request)
        except OSError as error:
            answer.update(errno=error.errno or errno.EIO, error=str(error))
        print(json.dumps({**answer, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))  # a rank may be gone before its writer has begun
    own = Writing(**json.loads(sys.argv[1]))
    if own.rank == 0:
        Scrubber(Path(own.root)).start()
    serve(own, sys.stdin)
