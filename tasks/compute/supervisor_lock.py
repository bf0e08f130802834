"""Who supervises a job: a lock on its folder, and beside it `supervisor.json`, which says who and what was seen last.

One process supervises a job at a time; the lock is let go when that process dies, however it dies. Where several hosts work in
one store, each with a home of its own, the supervisor holds the store's claim to the job as well (tasks/common/claims.py).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common import process
from tasks.common.claims import ALONE, Claim, Claims, claimed
from tasks.compute.job import JobState, Journal
from tasks.compute.submission import LOCK, SUPERVISOR


@contextmanager
def supervising(
    folder: Path, token: str, *, flow_run: str, claims: Claims | None, waiting: Callable[[], None]
) -> Iterator[Claim]:
    """Be the one who supervises a folder's job; `waiting` is called while somebody else is, and may raise."""
    with (
        process.locked(folder / LOCK, waiting=waiting),
        claimed(claims, claim_of(token), waiting=waiting, sleep=time.sleep) as claim,
    ):
        note(folder, flow_run=flow_run, state=JobState(state="unknown"))
        try:
            yield claim
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


def claim_of(token: str) -> str:
    """Name of the claim to a job."""
    return f"jobs/{token}"


class Fenced:
    """A job's journal, in which is written only while the job is ours."""

    def __init__(self, journal: Journal, claim: Claim) -> None:
        self._journal, self._claim = journal, claim
        self.get, self.list = journal.get, journal.list
        self.claims = journal.claims

    def put(self, key: str, value: dict[str, Any]) -> bool:
        """Create-only, as the journal's own. Raises Superseded."""
        self._claim.require()
        return self._journal.put(key, value)


@contextmanager
def unsupervised(folder: Path, token: str, claims: Claims | None) -> Iterator[bool]:
    """Keep supervisors away for a moment; False, and nothing is held, when there is one, on whatever host."""
    with open(folder / LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        claim = claims.take(claim_of(token)) if claims else ALONE
        if claim is None:
            yield False
            return
        try:
            yield True
        finally:
            claim.give_back()


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
