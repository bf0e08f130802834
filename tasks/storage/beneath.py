"""Reading and writing below a folder that others may write to as well: no link on the way is followed by a write.

Each folder on the way is opened from the one above it, without following links (openat(2), O_NOFOLLOW), and what is written is
written by that open folder. A look at the path before it is used would not do: a link can appear in between.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tasks.common.errors import IntegrityError

CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened(top: Path | int, *names: str) -> Iterator[int]:
    """The open folder below another one, made where it is not there. A path `top` may be a link itself.

    Raises IntegrityError for a link, or a file, on the way.
    """
    if isinstance(top, Path):
        top.mkdir(parents=True, exist_ok=True)
    folder = os.open(top, _FOLDER) if isinstance(top, Path) else os.dup(top)
    try:
        for depth, name in enumerate(names, 1):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            below = _open_folder(folder, *names[:depth])
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def _open_folder(folder: int, *way: str) -> int:
    try:
        return os.open(way[-1], _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise IntegrityError(
            f"{'/'.join(way)} in the store is a link, which may lead out of it, or no folder",
            remedy="Find out who made it, and remove it.",
        ) from error


def read(path: Path) -> bytes:
    """Read a plain file. Raises IntegrityError for anything else in its place: whoever reads a FIFO waits for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise IntegrityError(f"{path} is no plain file", remedy="Find out who made it, and remove it.")
        return file.read()


def write(folder: int, name: str, data: bytes) -> None:
    """Write a file whole, over the one of that name."""
    os.replace(_temporary(folder, name, data), name, src_dir_fd=folder, dst_dir_fd=folder)


def create(folder: int, name: str, data: bytes) -> bool:
    """Write a file whole or not at all, and only if it does not exist: link(2) fails where one is."""
    temporary = _temporary(folder, name, data)
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary, dir_fd=folder)
    return True


def link_or_copy(source: Path, folder: int, name: str, *, link: bool) -> None:
    """Have a file under a new name, read-only: by a second name of the same file, or as a copy. It is on the disk then."""
    if link:
        os.link(source, name, dst_dir_fd=folder)
        made = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    else:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with open(made, "rb" if link else "wb") as file:
        if not link:
            with open(source, "rb") as read:
                shutil.copyfileobj(read, file, CHUNK)
            file.flush()
        os.fsync(made)
        os.fchmod(made, 0o444)


def _temporary(folder: int, name: str, data: bytes) -> str:
    made = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(made, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return made
