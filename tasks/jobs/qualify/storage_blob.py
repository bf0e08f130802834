"""The store of machines that share no folder: one blob written, read and removed again.

Which store that is says the mirror of the job's folder (HEADWAY_STORE, tasks/jobs/node/mirror.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from tasks.jobs.node.runtime import Rank
from tasks.jobs.qualify.disk import BLOCK, Moved
from tasks.storage.blob.client import open_container
from tasks.storage.blob.transfer import STREAMS, check_stored, upload
from tasks.storage.manifest import FileEntry
from tasks.storage.settings import StoreConfig


def through(text: str, rank: Rank, *, bytes: int) -> Moved:
    """Upload so many random bytes in parallel blocks, as checkpoints are, and read them back. Raises OSError, HeadwayError."""
    container = open_container(StoreConfig.model_validate_json(text))
    name = f"qualification/{rank.folder.name}/{rank.rank}.bin"
    with tempfile.NamedTemporaryFile(dir=rank.folder, prefix="headway-storage-") as file:
        for _ in range(-(-bytes // BLOCK)):
            file.write(os.urandom(BLOCK))
        file.flush()
        began = time.perf_counter()
        done = upload(container, name, Path(file.name))
        write_seconds = time.perf_counter() - began
    try:
        began = time.perf_counter()
        check_stored(container, name, FileEntry(path=name, size=done.size, sha256=done.sha256), "")
        read_seconds = time.perf_counter() - began
    finally:
        container.remove(name)
        if done.written.version:
            container.remove(name, done.written.version)
    return Moved(
        done.size,
        done.size / write_seconds,
        done.size / read_seconds,
        f"as a blob in {STREAMS} blocks at a time, hashed",
    )
