"""The process beside a rank that writes its checkpoints, so that training waits for a copy in memory and no longer.

It reads one JSON line a request and answers one line when the work is done. Rank 0's writer is also the coordinator:
it waits for all receipts and commits. What is written where: checkpoint_files.py. Standard library only, to start fast.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.jobs.checkpoint_files import (
    Manifest,
    commit,
    create_only,
    digest,
    newest_attempt,
    place_of,
    retain,
    sync,
)
from tasks.process import die_with_parent, read_json, write_json

CHUNK = 4 << 20
POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Writing:
    """What stays the same over all checkpoints of an attempt; the rank hands it over as one JSON argument."""

    root: str
    rank: int
    world_size: int
    attempt: int
    keep: int
    """Newest checkpoints that are kept."""
    buffer: int
    """Inherited descriptor of the memory that holds the shard, a whole safetensors file."""
    size: int
    """Bytes of the shard."""
    log: str
    """A file that a committed checkpoint must not be ahead of; it is brought to the disk before the commit."""
    identity: dict[str, Any]

    def save(self, step: int, consumed_samples: int) -> None:
        """Write this rank's shard and its receipt; on rank 0, then wait for all others and commit."""
        folder = place_of(Path(self.root), step, self.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        entry = self._write_shard(folder / f"shard-{self.rank}.safetensors")
        create_only(folder / f"receipt-{self.rank}.json", entry)
        if self.rank == 0:
            self._commit(folder, step, consumed_samples)

    def _write_shard(self, path: Path) -> dict[str, Any]:
        sha256 = hashlib.sha256()
        with mmap.mmap(self.buffer, self.size, access=mmap.ACCESS_READ) as memory, open(path, "xb") as file:
            for start in range(0, self.size, CHUNK):
                piece = memory[start : start + CHUNK]
                sha256.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return {"path": path.name, "size": self.size, "sha256": sha256.hexdigest()}

    def _commit(self, folder: Path, step: int, consumed_samples: int) -> None:
        """Write the manifest, then LATEST, then delete what is old.

        The wait has no limit: when a rank or its writer dies, the launcher ends all ranks, and they their writers.
        """
        files = [_receipt(folder / f"receipt-{rank}.json") for rank in range(self.world_size)]
        for entry in files:
            if (folder / entry["path"]).stat().st_size != entry["size"]:
                raise OSError(errno.EIO, f"{entry['path']} of step {step} is not as long as its receipt says")
        if newest_attempt(Path(self.root)) > self.attempt:
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
        )
        commit(Path(self.root), manifest)
        write_json(Path(self.root) / "LATEST", {"step": step, "attempt": self.attempt})
        retain(Path(self.root), self.keep)


def _receipt(path: Path) -> dict[str, Any]:
    while (entry := read_json(path)) is None:
        time.sleep(POLL_SECONDS)
    return dict(entry)


def serve(writing: Writing, requests: Iterable[str]) -> None:
    """Answer each request `{step, consumed_samples}` with `{step, errno, error}`; errno 0 is success."""
    for line in requests:
        request = json.loads(line)
        answer = {"step": request["step"], "errno": 0, "error": ""}
        try:
            writing.save(**request)
        except OSError as error:
            answer.update(errno=error.errno or errno.EIO, error=str(error))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    die_with_parent()
    serve(Writing(**json.loads(sys.argv[1])), sys.stdin)
