"""Moves files: in blocks, several at once, in bounded memory, hashed while they pass. What they are named later is versions.py's.

Each block carries the MD5 of its bytes, which the service holds against what arrived; the sha256 of what was read goes into the
manifest, and what is read back is held against it. A block's id is made of its content, so an upload that was cut off goes on.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.storage.blob import BlobBlock, BlobClient

from tasks.common.errors import Missing
from tasks.storage.blob import faults
from tasks.storage.blob.client import BLOCK, Container, Written, in_order, in_parallel, md5, until_whole
from tasks.storage.blob.faults import SLOW_READ_SECONDS
from tasks.storage.manifest import FileEntry, Problem

A = TypeVar("A")
R = TypeVar("R")
Marks = Callable[[str], dict[str, str]]
STREAMS = 6
"""Blocks or ranges of one file that move at once."""
MOST_BLOCKS = 50_000
CONTESTED_TRIES = 5
_DISCARDED = ("InvalidBlockList", "InvalidBlockId", "InvalidBlobOrBlock")


class Uploaded(NamedTuple):
    """A file as it was read, and what the service took."""

    size: int
    sha256: str
    written: Written


def upload(container: Container, name: str, path: Path, marks: Marks = lambda _: {}) -> Uploaded:
    """Upload a file over what lies under a name. Raises Missing, and OSError for a file that cannot be read.

    `marks` makes further metadata of the file's sha256.
    """
    if path.stat().st_size <= BLOCK:
        return _upload_whole(container, name, path.read_bytes(), marks)
    for _ in range(CONTESTED_TRIES):
        done = container.ask(lambda: _upload_blocks(container.blob(name), path, marks), name)
        if done:
            return done
    raise Missing(
        f"{container.uri}/{name}: others write the same file all the time", remedy="Publish again when they end."
    )


def _upload_whole(container: Container, name: str, data: bytes, marks: Marks) -> Uploaded:
    sha256 = hashlib.sha256(data).hexdigest()
    metadata = {"sha256": sha256, **marks(sha256)}
    blob, headers = container.blob(name), {"Content-MD5": base64.b64encode(md5(data)).decode()}

    def send() -> Written:
        done = blob.upload_blob(
            io.BytesIO(data), length=len(data), overwrite=True, metadata=metadata, headers=dict(headers)
        )
        return Written(str(done["etag"]), done.get("version_id"))

    return Uploaded(len(data), sha256, container.ask(lambda: until_whole(send), name))


def _upload_blocks(blob: BlobClient, path: Path, marks: Marks) -> Uploaded | None:
    """None when another writer's commit threw our blocks away."""
    sha256, size, ids = hashlib.sha256(), 0, list[str]()
    # Blocks that an upload before this one left, by id.
    try:
        _, waiting = blob.get_block_list("uncommitted")
    except ResourceNotFoundError as error:
        if faults.code_of(error) == "ContainerNotFound":
            raise
        staged = {}
    else:
        staged = {str(block.id): int(block.size) for block in waiting}

    def send(block: bytes) -> str:
        digest = md5(block)
        key = f"{digest.hex()}{len(block):08x}"
        if staged.get(key) != len(block):
            headers = {"Content-MD5": base64.b64encode(digest).decode()}
            until_whole(
                lambda: blob.stage_block(key, io.BytesIO(block), length=len(block), headers=dict(headers))  # type: ignore[arg-type]
            )
        return key

    def blocks() -> Iterator[bytes]:
        nonlocal size
        with open(path, "rb", buffering=0) as file:
            # The same for the same size, so that an upload that goes on cuts the file as the one before did.
            length = BLOCK * max(1, -(-path.stat().st_size // (BLOCK * MOST_BLOCKS)))
            while block := file.read(length):
                sha256.update(block)
                size += len(block)
                yield block

    try:
        ids = list(in_order(send, blocks(), workers=STREAMS, ahead=STREAMS))
        done = blob.commit_block_list(
            [BlobBlock(key) for key in ids],
            metadata={"sha256": sha256.hexdigest(), **marks(sha256.hexdigest())},
            read_timeout=SLOW_READ_SECONDS,
        )
    except HttpResponseError as error:
        if faults.code_of(error) in _DISCARDED:
            return None
        raise
    return Uploaded(size, sha256.hexdigest(), Written(str(done["etag"]), str(done["version_id"] or "") or None))


def check_stored(
    container: Container, name: str, file: FileEntry, version: str, write: Callable[[bytes], object] | None = None
) -> Problem | None:
    """Read a stored file once, in several ranges at a time, and say how it differs from its entry, if it does."""
    blob, sha256, stored = container.blob(name, version), hashlib.sha256(), file.size

    def get(start: int) -> tuple[bytes, int]:
        stream = blob.download_blob(
            offset=start, length=min(BLOCK, file.size - start), max_concurrency=1, decompress=False
        )
        return stream.readall(), int(str(stream.properties.content_range).rpartition("/")[2])

    if not file.size:
        existing = container.head(name, version)
        if existing is None or existing.size:
            return _other_size(file, existing.size if existing else None)
    with container.told(name):
        try:
            starts = range(0, file.size, BLOCK)
            pieces = map(get, starts) if len(starts) == 1 else in_order(get, starts, workers=STREAMS, ahead=STREAMS)
            for piece, total in pieces:
                stored = total
                sha256.update(piece)
                if write:
                    write(piece)
        except ResourceNotFoundError as error:
            if faults.code_of(error) == "ContainerNotFound":
                raise
            return _other_size(file, None)
    if stored != file.size:
        return _other_size(file, stored)
    if sha256.hexdigest() != file.sha256:
        return Problem(path=file.path, problem="sha256", expected=file.sha256, actual=sha256.hexdigest())
    return None


def _other_size(file: FileEntry, stored: int | None) -> Problem:
    if stored is None:
        return Problem(path=file.path, problem="missing", expected=file.size)
    return Problem(path=file.path, problem="size", expected=file.size, actual=stored)


def over_files(work: Callable[[A], R], items: list[A], *, size_of: Callable[[A], int]) -> list[R]:
    """Results in the order of the items: small files many at once, large ones one after the other, each in parallel itself."""
    small = [item for item in items if size_of(item) <= BLOCK]
    done = iter(in_parallel(work, small))
    return [next(done) if size_of(item) <= BLOCK else work(item) for item in items]
