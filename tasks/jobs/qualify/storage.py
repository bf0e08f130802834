"""How fast a machine writes and reads files: to its scratch, and to the store at the size of the checkpoint to come.

One rank a machine, all machines at the same time, as when a training run saves: what all of them share shows here. The store is
where a checkpoint comes to lie: the job's folder, of which a store in a folder is made (by links); for machines without a shared
folder the container that the mirror of the folder is told of.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tasks.common.errors import HeadwayError
from tasks.jobs.node.runtime import Rank
from tasks.jobs.qualify.bench import Bench, Together, parameters
from tasks.planning.checkpointing import OWN_ENGINE_BYTES, resumable_bytes
from tasks.qualification.measured import Probe
from tasks.storage.blob.client import open_container
from tasks.storage.blob.transfer import STREAMS, check_stored, upload
from tasks.storage.manifest import FileEntry
from tasks.storage.settings import StoreConfig

# Large files bypass the page cache (O_DIRECT), so that the disk is measured and not the memory before it. Where a
# file system refuses that, written bytes are synced, and pages are dropped before they are read (posix_fadvise). A
# large file is unlinked as soon as it is open, so that nothing of it stays, however this process ends.


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
            with open(paths[-1], "xb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
                _drop_pages(file.fileno())
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


def _drop_pages(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


# Machines that share no folder have a store (HEADWAY_STORE, tasks/jobs/node/mirror.py): one blob is written, read and
# removed.


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


GIGA = 1e9
MOST_OF_FREE = 0.1
"""Share of the disk's free space that is written."""
MOST_SCRATCH = 16 * 2**30
LEAST_STORE, MOST_STORE = 64 * 2**20, 4 * 2**30
"""What is written to the store: the size of the checkpoint, but enough to measure a rate, and not more than this."""
SCRATCH_STREAMS = 8
"""Files at the same time; several disks under one file system are busy only with several."""
STORE_STREAMS = 1
"""A rank writes its part of a checkpoint as one file (tasks/jobs/checkpoint/writer.py)."""
SMALL_FILES = 1000
STORE_PATIENCE = 5
"""Times `benchmark.seconds` that the store may take; it is often far away."""


def measure(bench: Bench) -> None:
    """Note the rates of scratch and store, and how long the checkpoint to come takes; local rank 0 of each machine does."""
    together = Together(bench, "storage")
    scratch = Path(os.environ.get("HEADWAY_SCRATCH") or bench.rank.folder)
    seconds = bench.config.seconds
    for checks, work in (
        (("scratch_write", "scratch_read"), partial(_scratch, scratch, seconds)),
        (("scratch_files_written", "scratch_files_read"), partial(_small, scratch, seconds)),
        (("store_write", "store_read", "checkpoint_seconds"), partial(_store, bench, seconds * STORE_PATIENCE)),
    ):
        together.meet(checks[0])
        if bench.local_rank == 0:
            bench.note(*_tried(together, checks, work))


def _tried(together: Together, checks: Sequence[str], work: Callable[[], Iterable[Probe]]) -> list[Probe]:
    if together.left <= 0:
        return [Probe(check=check, status="timed out", said=together.late) for check in checks]
    try:
        return list(work())
    except (OSError, HeadwayError) as error:
        output = (
            error.message if isinstance(error, HeadwayError) else f"{error.strerror or error}: {error.filename or ''}"
        )
        return [Probe(check=check, status="failed", said=output.rstrip(": ")) for check in checks]


def _scratch(folder: Path, seconds: float) -> list[Probe]:
    wanted = min(MOST_SCRATCH, _room(folder))
    moved = large_files(folder, bytes=wanted, seconds=seconds, streams=SCRATCH_STREAMS)
    text = f"{moved.bytes >> 20} MiB in {SCRATCH_STREAMS} files in {folder}, {moved.how}"
    return _both("scratch", moved, text)


def _small(folder: Path, seconds: float) -> list[Probe]:
    count = min(SMALL_FILES, _room(folder) // SMALL)
    files = small_files(folder, count=count, seconds=seconds)
    text = f"{files.number} files of {SMALL >> 10} KiB in {folder}, one after another, each with fsync; pages dropped"
    rates = {"written": files.number / files.write_seconds, "read": files.number / files.read_seconds}
    return [
        Probe(check=f"scratch_files_{what}", measured=rate, unit="files/s", said=text) for what, rate in rates.items()
    ]


def _store(bench: Bench, seconds: float) -> list[Probe]:
    whole = resumable_bytes(parameters(bench))
    volume = max(LEAST_STORE, min(whole, MOST_STORE))
    if volume > _room(bench.rank.folder):
        free = shutil.disk_usage(bench.rank.folder).free
        text = f"{volume >> 20} MiB are more than {MOST_OF_FREE:.0%} of the {free >> 20} MiB that are free"
        return [
            Probe(check=c, status="skipped", said=text) for c in ("store_write", "store_read", "checkpoint_seconds")
        ]
    address = os.environ.get("HEADWAY_STORE", "")
    if address:
        moved = through(address, bench.rank, bytes=volume)
    else:
        moved = large_files(bench.rank.folder, bytes=volume, seconds=seconds, streams=STORE_STREAMS)
    text = f"{moved.bytes >> 20} MiB a machine, all machines at the same time, {moved.how}"
    return [*_both("store", moved, text), checkpoint(parameters(bench), moved)]


def checkpoint(parameters: int, moved: Moved) -> Probe:
    """One machine writes all of it, as this release's engine does, while the others write as well."""
    whole, rate = resumable_bytes(parameters), moved.write_rate
    text = (
        f"{whole / GIGA:.4g} GB ({OWN_ENGINE_BYTES} bytes of each of {parameters:,} parameters), "
        f"computed from {moved.bytes / GIGA:.4g} GB at {rate / GIGA:.4g} GB/s"
    )
    return Probe(check="checkpoint_seconds", measured=whole / rate, unit="s", said=text)


def _both(place: str, moved: Moved, text: str) -> list[Probe]:
    rates = {"write": moved.write_rate, "read": moved.read_rate}
    return [Probe(check=f"{place}_{way}", measured=r / GIGA, unit="GB/s", said=text) for way, r in rates.items()]


def _room(folder: Path) -> int:
    """Bytes that may be written there."""
    return int(shutil.disk_usage(folder).free * MOST_OF_FREE)
