"""Servers of this machine that are starting: for how long, and the wait until they answer.

A server listens once it has loaded its program and opened its database, which takes minutes on a machine that is slow or busy.
While its process lives it is waited for; one that ended, or that listens and does not answer, is an error.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.errors import Missing

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
