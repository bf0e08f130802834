"""What can be known to be wrong before a part of the platform starts: ports, locked databases, a full disk, a newer home."""

from __future__ import annotations

import shutil
import socket
import sqlite3
from pathlib import Path

from tasks.common import process
from tasks.common.errors import Missing

LAYOUT = 1
"""Number of the form in which state lies under home; raised when an older Headway could not read it."""
NEEDED_GB = 0.5
LOCK_SECONDS = 5.0


def choose_port(wanted: int | None, last: int | None) -> int:
    """The wanted port, which must be free; else the one of last time when it is free; else any free one on loopback."""
    if wanted is not None and not is_free(wanted):
        raise ValueError(
            f"port {wanted} is taken by another program; choose another one, or leave it out for a free one"
        )
    if wanted is not None:
        return wanted
    return last if last and is_free(last) else free_port()


def require_same_port(wanted: int | None, running: int, what: str) -> None:
    """Raise ValueError when a server that runs is asked for with another port."""
    if wanted not in (None, running):
        raise ValueError(
            f"{what} runs on port {running}, which port {wanted} cannot change: leave the option out, or stop the platform first "
            "(headway down) and start it again with it"
        )


def is_free(port: int) -> bool:
    """Whether nobody listens on a port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def not_locked(database: Path) -> None:
    """Raise Missing when another program holds a SQLite database locked."""
    if not database.exists():
        return
    connection = sqlite3.connect(database, timeout=LOCK_SECONDS, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise Missing(
            f"the database {database} cannot be written: {error}",
            remedy="Stop the program that holds it (`fuser` names it), or free space on its disk; then run the command again.",
        ) from error
    finally:
        connection.close()


def enough_room(home: Path) -> None:
    """Raise Missing when the disk under home is nearly full: servers that cannot write lose what they are told."""
    existing = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    if free < NEEDED_GB:
        raise Missing(
            f"the disk that holds {home} has {free:.2f} GB left; the platform needs {NEEDED_GB} GB to start",
            remedy="Free space on it, or set HEADWAY_HOME to a folder on a larger one.",
        )


def no_file(home: Path) -> None:
    """Raise ValueError when a home is something else than a folder."""
    if home.exists() and not home.is_dir():
        raise ValueError(f"HEADWAY_HOME is {home}, which is a file: name a folder; it is made when it does not exist")


def not_newer(home: Path) -> None:
    """Raise ValueError when a newer Headway wrote this home."""
    result = (process.read_json(home / "layout.json") if home.is_dir() else None) or {}
    if result.get("layout", 0) > LAYOUT:
        raise ValueError(
            f"{home} was written by a newer Headway (layout {result['layout']}, by {result.get('headway')}); this one reads "
            f"layouts up to {LAYOUT}. Install the newer Headway, or set HEADWAY_HOME to another folder; nothing was changed"
        )


def write_layout(home: Path, version: str) -> None:
    """Note in which form state lies here."""
    if (process.read_json(home / "layout.json") or {}).get("layout") != LAYOUT:
        process.write_json(home / "layout.json", {"layout": LAYOUT, "headway": version})
