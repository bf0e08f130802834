"""Who supervises a job: a lock on its folder, and beside it `supervisor.json`, which says who and what was seen last.

One process supervises a job at a time; the lock is let go when that process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.common import process
from tasks.compute.job import JobState
from tasks.compute.submission import LOCK, SUPERVISOR


@contextmanager
def supervising(folder: Path, *, flow_run: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Be the one who supervises a folder's job; `waiting` is called while somebody else is, and may raise."""
    with process.locked(folder / LOCK, waiting=waiting):
        note(folder, flow_run=flow_run, state=JobState(state="unknown"))
        try:
            yield
        finally:
            (folder / SUPERVISOR).unlink(missing_ok=True)


def note(folder: Path, *, flow_run: str, state: JobState) -> None:
    """Write down who supervises, and the state that it saw last."""
    me = os.getpid()
    who = {
        "pid": me,
        "started": process.process_started(me),
        "boot_id": process.boot_id(),
        "host": socket.gethostname(),
    }
    seen = {"state": state.state, "reason": state.reason, "time": time.time()}
    process.write_json(folder / SUPERVISOR, {**who, "flow_run": flow_run, **seen})


@contextmanager
def unsupervised(folder: Path) -> Iterator[bool]:
    """Keep supervisors away for a moment; False, and nothing is held, when there is one."""
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_supervised(folder: Path) -> bool:
    """Whether a living process, on whatever machine that shares the folder, holds its lock."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
