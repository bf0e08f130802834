"""Starts of servers of this machine: what can be known to be wrong before, and the wait until they answer.

What is looked at before: ports, locked databases, a full disk, a home of a newer Headway.

A server listens once it has loaded its program and opened its database, which takes minutes on a machine that is slow or busy.
While its process lives it is waited for; one that ended, or that listens and does not answer, is an error.
"""

from __future__ import annotations

import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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


START_SECONDS = 1800.0
"""The longest wait for a server whose process lives and does not listen yet."""
SILENT_SECONDS = 300.0
"""The longest wait for one that listens and does not answer."""
SAY_SECONDS = 5.0
"""How often somebody who waits is told."""
END_OF_LOG = 1000
"""Characters of a log that an error quotes."""
Say = Callable[[str], None]


def starting(server: Mapping[str, Any]) -> float | None:
    """For how many seconds a server that runs has been starting; None once it listens at its port."""
    try:
        socket.create_connection(("127.0.0.1", server["port"]), timeout=1.0).close()
    except OSError:
        attempt = Path(server["folder"]) / "attempts.json"  # written at each start of its program
        return max(time.time() - (attempt.stat().st_mtime if attempt.exists() else server["since"]), 0.0)
    return None


def wait_until_it_answers(
    name: str,
    server: Mapping[str, Any],
    answers: Callable[[], bool],
    say: Say = lambda text: None,
    *,
    start_seconds: float = START_SECONDS,
    silent_seconds: float = SILENT_SECONDS,
) -> None:
    """Return when a server of this machine answers; `say` is told every few seconds for how long it has been starting.

    Raises Missing with what its log ends with when its process ended, and when the wait has lasted too long.
    """
    folder = Path(server["folder"])
    began = last = time.monotonic()
    silent = 0.0
    while not answers():
        now = time.monotonic()
        if not process.alive(process.read_json(folder / "handle.json")):
            raise Missing(
                f"{name} at {server['url']} ended before it answered{end_of_log(folder / 'server.log')}",
                remedy="Run the same command again. If it ends again, `headway doctor` reports what is missing.",
            )
        age = starting(server)
        silent = (silent or now) if age is None else 0.0
        if age is not None and now - began > start_seconds:
            raise Missing(
                f"{name} at {server['url']} is still starting, after {age:.0f} s{end_of_log(folder / 'server.log')}",
                remedy="Run the same command again: it waits further. `headway down` stops the server.",
            )
        if age is None and now - silent > silent_seconds:
            raise Missing(
                f"{name} listens at {server['url']} and does not answer{end_of_log(folder / 'server.log')}",
                remedy="Stop it with `headway down`, and run the same command again.",
            )
        if now - last >= SAY_SECONDS:
            last = now
            say(f"{name} is still starting" + (f", for {age:.0f} s so far" if age is not None else ": it listens now"))
        time.sleep(0.1)


def end_of_log(log: Path) -> str:
    """The end of a log as the end of a sentence; of an empty one, nothing: nobody is sent to look at it."""
    text = log.read_text(errors="replace")[-END_OF_LOG:].strip() if log.exists() else ""
    return f"; the end of {log}:\n{text}" if text else ""
