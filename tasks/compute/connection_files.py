"""Files on machines reached through SSH: write, and bring a folder there or here by what changed.

The connection is connection.py. A folder's file is moved when size or time of change (in nanoseconds) differ; one of APPENDED
grows at its end, and only the new end is moved to here. Nothing is deleted on either side, no reader sees half a file, and
names that begin with a dot stay where they are. A name of theirs that would lead out of our folder is refused.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import asyncssh

from tasks.common.errors import Missing
from tasks.common.file_names import require_inside
from tasks.compute.connection import ROOM, Connection, Ran

APPENDED = (".jsonl", ".log")
"""Files that are only ever written at their end."""
FILE_SECONDS, SLOWEST = 60.0, 100_000
"""Time limit of one file: seconds, and bytes a second of the slowest link that counts as one."""
PART = ".headway-part"


@dataclass(frozen=True)
class _Listed:
    size: int
    changed: int
    """Nanoseconds since 1970."""


def write(connection: Connection, path: str, data: bytes) -> None:
    """Write a remote file whole, with the folders above it; readable by its owner only."""

    async def work() -> None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            await sftp.makedirs(PurePosixPath(path).parent, exist_ok=True)
            async with sftp.open(path + PART, "wb", asyncssh.SFTPAttrs(permissions=0o600)) as file:
                await file.write(data)
            await sftp.posix_rename(path + PART, path)

    connection.wait(connection.limited(work(), seconds=_limit(len(data)), what=f"writing {path}"))


def push(connection: Connection, folder: Path, remote: str, *, skip: Sequence[str] = ()) -> list[str]:
    """Bring a local folder's changed files to a remote folder; returns their names. `skip` are names at its top."""
    existing = _remote_files(connection, remote)
    moved = [name for name, stat in _local_files(folder).items() if existing.get(name) != stat and not _in(name, skip)]
    for name in moved:
        connection.wait(_put(connection, folder / name, f"{remote}/{name}"))
    return moved


def pull(connection: Connection, remote: str, folder: Path, *, skip: Sequence[str] = ()) -> list[str]:
    """Bring a remote folder's changed files to a local folder; returns their names. `skip` are names at its top.

    Raises IntegrityError for a name that leads out of the folder; then nothing was brought.
    """
    local, theirs = _local_files(folder), _remote_files(connection, remote)
    moved = [name for name, stat in theirs.items() if local.get(name) != stat and not _in(name, skip)]
    require_inside(moved, where=f"{remote} on {connection.address}")
    for name in moved:
        connection.wait(_get(connection, f"{remote}/{name}", folder / name, theirs[name]))
    return moved


def _local_files(folder: Path) -> dict[str, _Listed]:
    result = {}
    for path in sorted(p for p in folder.rglob("*") if not _passing(p.name)):
        try:
            if path.is_file() and not path.is_symlink():
                mine = path.stat()
                result[path.relative_to(folder).as_posix()] = _Listed(mine.st_size, mine.st_mtime_ns)
        except FileNotFoundError:  # it went away between the two looks
            continue
    return result


def _remote_files(connection: Connection, remote: str) -> dict[str, _Listed]:
    """One command lists them all; SFTP as OpenSSH speaks it knows times of change in whole seconds only.

    Between the fields stands what no name can hold: a name with a line break in it would be read as several.
    """
    where = shlex.quote(remote)
    output = connection.run(f"test ! -d {where} || find {where} -type f -printf '%P\\0%s\\0%T@\\0'")
    if output.code and not output.stdout:
        raise _refused(connection, f"listing {remote}", output)
    fields = output.stdout.split("\0")[:-1]
    stats = zip(fields[0::3], fields[1::3], fields[2::3], strict=True)
    return {name: _Listed(int(size), _nanoseconds(time)) for name, size, time in stats if not _passing(name)}


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    return int(seconds) * 1_000_000_000 + int(fraction[:9].ljust(9, "0"))


async def _put(connection: Connection, path: Path, remote: str) -> None:
    mine = path.stat()

    async def work() -> None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            await sftp.makedirs(PurePosixPath(remote).parent, exist_ok=True)
            await sftp.put(str(path), remote + PART, preserve=True)

    await connection.limited(work(), seconds=_limit(mine.st_size), what=f"writing {remote}")
    seconds, nanoseconds = divmod(mine.st_mtime_ns, 1_000_000_000)
    part, to = shlex.quote(remote + PART), shlex.quote(remote)
    output = await connection.ran(f"touch -d @{seconds}.{nanoseconds:09d} -- {part} && mv -f -- {part} {to}")
    if output.code:
        raise _refused(connection, f"writing {remote}", output)


async def _get(connection: Connection, remote: str, path: Path, stat: _Listed) -> None:
    """The whole file under a temporary name, or the new end of one that grew, up to the size that was listed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grown = path.suffix in APPENDED and path.is_file() and path.stat().st_size < stat.size
    offset = path.stat().st_size if grown else 0
    target = path if grown else path.with_name(path.name + PART)

    async def work() -> bytes | None:
        async with (await connection.opened()).start_sftp_client() as sftp:
            try:
                if grown:
                    async with sftp.open(remote, "rb") as source:
                        return _bytes(await source.read(stat.size - offset, offset))
                await sftp.get(remote, str(target))
            except asyncssh.SFTPNoSuchFile:  # replaced or deleted since it was listed: the next look has it
                return None
        return b""

    data = await connection.limited(work(), seconds=_limit(stat.size - offset), what=f"reading {remote}")
    if data is None:
        return
    if grown:
        with open(target, "ab") as file:
            file.write(data)
    os.utime(target, ns=(stat.changed, stat.changed))
    os.replace(target, path)


def _passing(name: str) -> bool:
    """Whether a file is on its way to its real name: ours, or one of tasks/common/process.py's."""
    return name.endswith(PART) or name.rpartition("/")[2].startswith(".")


def _limit(size: int) -> float:
    return FILE_SECONDS + size / SLOWEST


def _in(name: str, tops: Sequence[str]) -> bool:
    return name.split("/", 1)[0] in tops


def _bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


def _refused(connection: Connection, what: str, output: Ran) -> Missing:
    return Missing(f"{what} on {connection.address} failed: {output.stderr.strip() or output.code}", remedy=ROOM)
