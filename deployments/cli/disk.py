"""Errors of this machine's disk and rights, which are no bug of ours: what is wrong, where, and what to do. Read by output.py."""

from __future__ import annotations

import errno
import os
import pwd
import sqlite3
from contextlib import suppress
from pathlib import Path

from tasks.common.home import home

ANOTHER = "or set HEADWAY_HOME to a folder of yours; the same command goes on."
FULL = "Free room on the disk, or set HEADWAY_HOME to a folder on a larger one; the same command goes on."
READ_ONLY = f"The disk is mounted for reading only: mount it for writing, {ANOTHER}"
REMEDIES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: READ_ONLY,
    errno.ENOTDIR: f"There is a file where a folder should be: move it away, {ANOTHER}",
    errno.EEXIST: f"There is a file where a folder should be: move it away, {ANOTHER}",
    errno.EISDIR: f"There is a folder where a file should be: move it away, {ANOTHER}",
}
DATABASE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_READONLY: f"A database of the home may not be written: look whose it is, {ANOTHER}",
    sqlite3.SQLITE_CANTOPEN: f"A database of the home may not be opened or made: look whose it is, {ANOTHER}",
}


def of_the_disk(error: BaseException) -> tuple[str, str] | None:
    """What is wrong with the disk, or with the rights on it, and the remedy; None for any other error."""
    if isinstance(error, sqlite3.OperationalError):
        remedy = DATABASE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        return (f"{home()}: {error}", remedy) if remedy else None
    if not isinstance(error, OSError):
        inner = getattr(error, "orig", None)  # SQLAlchemy's
        return of_the_disk(inner) if isinstance(inner, sqlite3.Error) else None
    if not isinstance(error.filename, str | bytes):  # of a process, or of an address; a full disk names none
        return (str(error), FULL) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    path = Path(os.fsdecode(error.filename))
    said = f"{path}: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return _closed(path, said)
    return (said, REMEDIES[error.errno]) if error.errno in REMEDIES else None


def _closed(path: Path, said: str) -> tuple[str, str]:
    """What is said of a path that is not ours to use: whose it is, as far as we may look."""
    place, owner = _seen(path.absolute())
    me = _name(os.geteuid())
    if owner != me:
        remedy = f"Work as {owner}, have it given to you (chown -R {me} {place}), {ANOTHER}"
        return f"{said}; {place} belongs to {owner}, and you are {me}", remedy
    return said, f"Look at the rights on it (ls -ld {place}), {ANOTHER}"


def _seen(path: Path) -> tuple[Path, str]:
    """The last part of a path that may be looked at, and its owner."""
    for each in (path, *path.parents):
        with suppress(OSError):
            return each, _name(each.stat().st_uid)
    return path, "somebody"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
