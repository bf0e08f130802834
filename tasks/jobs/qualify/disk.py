"""Writing and reading files so that the disk is measured and not the memory before it.

Large files go around the page cache (O_DIRECT); where a file system refuses that, they are brought to the disk as they are
written, and the pages are dropped before they are read (posix_fadvise). A large file has no name from the moment it is made,
so that nothing of it is left, however this process dies. What is measured, where, and how much, is storage.py's.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BLOCK = 8 << 20
SYNC_EVERY = 8
"""Blocks between two syncs where pages are cached, so that the time says what the disk does and few pages wait."""
SMALL = 16 << 10
"""Bytes of a small file."""
DIRECT = getattr(os, "O_DIRECT", 0)
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


class Moved(NamedTuple):
    """What went to a disk and came back."""

    bytes: int
    write_rate: float
    """Bytes a second, as the next."""
    read_rate: float
    how: str


class Files(NamedTuple):
    """Small files that were written, each brought to the disk, and read again."""

    number: int
    write_seconds: float
    read_seconds: float


def large_files(folder: Path, *, bytes: int, seconds: float, streams: int) -> Moved:
    """Write and read so many bytes, or fewer when the time of either is over, in so many files at the same time.

    The time of writing ends when all is on the disk (fsync). Raises OSError.
    """
    blocks = max(1, -(-bytes // BLOCK // streams))
    with _opened(folder, streams) as (files, direct), ThreadPoolExecutor(streams) as pool:
        source = mmap.mmap(-1, BLOCK)
        source.write(os.urandom(BLOCK))
        began = time.perf_counter()
        written = list(pool.map(lambda file: _write(file, source, blocks, began + seconds, direct), files))
        write_seconds = time.perf_counter() - began
        if not direct:
            for file in files:
                _drop_pages(file)
        began = time.perf_counter()
        read = list(pool.map(lambda file, most: _read(file, most, began + seconds), files, written))
        read_seconds = time.perf_counter() - began
    how = "around the page cache (O_DIRECT)" if direct else "page cache synced and dropped (fsync, posix_fadvise)"
    return Moved(sum(written) * BLOCK, sum(written) * BLOCK / write_seconds, sum(read) * BLOCK / read_seconds, how)


def small_files(folder: Path, *, count: int, seconds: float) -> Files:
    """Write small files one after another, each with fsync, then read them; fewer when the time is over. Raises OSError.

    Their folder is gone in the end. Pages are dropped before reading; what the kernel knows of names is not.
    """
    with tempfile.TemporaryDirectory(prefix="headway-storage-", dir=folder) as place:
        data, began, paths = os.urandom(SMALL), time.perf_counter(), list[Path]()
        while len(paths) < count and (time.perf_counter() - began < seconds or not paths):
            paths.append(Path(place) / f"{len(paths)}.bin")
            _write_small(paths[-1], data)
        write_seconds = time.perf_counter() - began
        began = time.perf_counter()
        for path in paths:
            path.read_bytes()
        return Files(len(paths), write_seconds, time.perf_counter() - began)


@contextmanager
def _opened(folder: Path, streams: int) -> Iterator[tuple[Sequence[int], bool]]:
    """Files without names, and whether they go around the page cache."""
    files: list[int] = []
    try:
        direct = bool(DIRECT) and _takes_direct(folder)
        for _ in range(streams):
            files.append(_nameless(folder, DIRECT if direct else 0))
        yield files, direct
    finally:
        for file in files:
            os.close(file)


def _takes_direct(folder: Path) -> bool:
    """Whether the file system does; some refuse to open, some to write."""
    try:
        file = _nameless(folder, DIRECT)
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
    try:
        os.pwrite(file, mmap.mmap(-1, mmap.PAGESIZE), 0)
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
    finally:
        os.close(file)
    return True


def _nameless(folder: Path, flags: int) -> int:
    made, name = tempfile.mkstemp(prefix="headway-storage-", dir=folder)
    os.close(made)
    try:
        return os.open(name, os.O_RDWR | flags)
    finally:
        os.unlink(name)


def _write(file: int, source: mmap.mmap, blocks: int, until: float, direct: bool) -> int:
    """Blocks that are on the disk."""
    done = 0
    while done < blocks and (time.perf_counter() < until or not done):
        offset = done * BLOCK
        written = 0
        with memoryview(source) as view:
            while written < BLOCK:
                written += os.pwrite(file, view[written:], offset + written)
        done += 1
        if not direct and done % SYNC_EVERY == 0:
            os.fsync(file)
    os.fsync(file)
    return done


def _read(file: int, blocks: int, until: float) -> int:
    """Blocks that were read."""
    target, done = mmap.mmap(-1, BLOCK), 0
    while done < blocks and (time.perf_counter() < until or not done):
        read = 0
        with memoryview(target) as view:
            while read < BLOCK and (got := os.preadv(file, [view[read:]], done * BLOCK + read)):
                read += got
        done += 1
    return done


def _write_small(path: Path, data: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
        _drop_pages(file.fileno())


def _drop_pages(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
