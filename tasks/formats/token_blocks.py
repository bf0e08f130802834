"""Files of tokens that are read in parts: digests of their blocks, and what of an artifact was left in the store.

`PREFIX.blocks` beside `PREFIX.bin` has the digests, so that a part of the file is verified by itself; `remote.json` beside the
files that were brought describes those that were not (tasks/storage/blob/ranges.py).

The digests are the first 16 bytes of the SHA-256 of each 16 KiB, one after the other: 0.1 % of the tokens. The file of digests is
a file of the artifact, so its own SHA-256 is in the manifest. See docs/training.md, "Data".
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.common.errors import IntegrityError
from tasks.common.process import read_json

BLOCK = 16 << 10
"""Bytes of a block; the last one of a file may have fewer."""
DIGEST = 16
"""Bytes of a digest."""
READ_BYTES = 8 << 20
REMOTE = "remote.json"


class Remote(NamedTuple):
    """A file that was left in the store."""

    size: int
    blob: str
    version: str
    remedy: str
    """For a file that is damaged there."""


def remote_files(folder: Path) -> dict[str, Remote]:
    """What of the artifact in this folder was left in the store, by path; nothing for a folder that is whole."""
    files = (read_json(folder / REMOTE) or {"files": {}})["files"]
    return {path: Remote(**each) for path, each in files.items()}


def write_blocks(prefix: Path) -> None:
    """Write `PREFIX.blocks` of what lies in `PREFIX.bin`."""
    with open(f"{prefix}.bin", "rb") as file, open(f"{prefix}.blocks", "wb") as out:
        while data := file.read(READ_BYTES):
            out.write(b"".join(digests(data)))


def digests(data: bytes) -> list[bytes]:
    """Of each block of bytes that begin at the beginning of a block."""
    view = memoryview(data)
    return [hashlib.sha256(view[at : at + BLOCK]).digest()[:DIGEST] for at in range(0, len(data), BLOCK)]


class Blocks:
    """The digests of one file of tokens, mapped into memory."""

    def __init__(self, prefix: Path, size: int) -> None:
        """`size` is that of `PREFIX.bin`, in bytes. Raises IntegrityError when there are not as many digests as blocks."""
        self._path, count = Path(f"{prefix}.blocks"), -(-size // BLOCK)
        if self._path.stat().st_size != count * DIGEST:
            raise IntegrityError(
                f"{self._path} has {self._path.stat().st_size} bytes; {size} bytes of tokens have {count} blocks of {BLOCK}, "
                f"whose digests need {count * DIGEST}"
            )
        self._known = np.memmap(self._path, np.uint8, "r", shape=(count, DIGEST)) if count else np.empty((0, DIGEST))

    def damaged(self, first: int, data: bytes) -> list[int]:
        """Of the blocks that `data` holds, the first of which has this number: those that are not what they were when written."""
        known = self._known[first : first + -(-len(data) // BLOCK)]
        return [
            first + at
            for at, (one, given) in enumerate(zip(known, digests(data), strict=True))
            if one.tobytes() != given
        ]
