"""One look at a scheduler for all jobs of a process: 1,000 supervisors cost one call of `states` a period.

Each supervisor reads what the last look found, and wakes up when its own job's state changed; so a scheduler that takes minutes
to answer holds nobody up who wants to cancel. What a state means for a job is supervisor.py and job_monitor.py.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tasks.common.errors import HeadwayError
from tasks.compute.job import Backend, JobState
from tasks.config.base import digest
from tasks.config.cluster import ClusterConfig

# The time that a supervisor goes by, and how it waits: handed in, so that hours of a job's life need none of a test's.


@dataclass(frozen=True)
class Clock:
    """The system's."""

    now: Callable[[], float] = time.monotonic
    """Seconds; only differences mean something."""
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()


# What a supervisor tells, and asks, while a job runs; and the events of a job that a person wants to hear of.


Kind = Literal[
    "waiting",
    "submitted",
    "adopted",
    "queued",
    "starting",
    "running",
    "hung",
    "retrying",
    "excluded",
    "silent",
    "answers",
    "left",
]
OUT_OF_THE_ORDINARY: tuple[Kind, ...] = ("adopted", "hung", "retrying", "excluded", "silent", "answers")


@dataclass(frozen=True)
class Event:
    """Something happened to a job."""

    kind: Kind
    """`waiting`: another process supervises it. `queued`, `starting`, `running`: as JobState. `hung`: it stands still and is
    ended. `retrying`: it failed, and is submitted again after a wait. `excluded`: machines are left out from now on. `silent`:
    the scheduler gives no answer; `answers`: it does again. `left`: the run was interrupted, and the job goes on without it."""
    text: str
    """A sentence."""
    submission: int


@dataclass(frozen=True)
class Watch:
    """Callbacks of whoever has a job supervised; all are called in the caller's own thread."""

    metrics: Callable[[list[dict[str, Any]]], None] = lambda records: None
    progress: Callable[[dict[str, Any]], None] = lambda progress: None
    event: Callable[[Event], None] = lambda event: None
    cancelled: Callable[[], bool] = lambda: False
    """Asked at every look; True cancels the job."""
    stop_on_interrupt: Callable[[], bool] = lambda: True
    """Asked when the orchestrator is interrupted (Ctrl-C, SIGTERM): whether the job stops too."""
    flow_run: str = ""
    """Prefect's identity of the flow run, for those who find the job later."""


NO_ANSWER = (HeadwayError, OSError, ValueError, subprocess.SubprocessError)
"""Errors of a look that mean no answer; `states` should say `unknown` itself."""


@dataclass
class Watched:
    """One job under a poller's eyes, as its supervisor reads it."""

    handle: dict[str, Any]
    folder: Path
    state: JobState = field(default_factory=lambda: JobState(state="unknown", reason="not asked yet"))
    answers: int = 0
    """Looks that gave an answer."""
    clock: Clock = CLOCK
    answered: float = field(init=False)
    """When the last answer came, by the clock; before the first one, when the job came here."""
    news: threading.Event = field(default_factory=threading.Event)
    """Set when the state changed."""

    def __post_init__(self) -> None:
        self.answered = self.clock.now()

    def silent_seconds(self) -> float:
        """Time without an answer."""
        return self.clock.now() - self.answered

    def take(self, state: JobState) -> None:
        """Take in what a look found."""
        changed = state != self.state
        self.state = state
        if state.state != "unknown":
            self.answered = self.clock.now()
            self.answers += 1
        if changed or state.over:
            self.news.set()


class Poller:
    """Asks one scheduler, every `poll_seconds` while there is a job, in a thread that ends with the last one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._jobs: list[Watched] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._broken: Exception | None = None

    @contextmanager
    def watching(self, handle: dict[str, Any], folder: Path) -> Iterator[Watched]:
        """Have a job looked at."""
        job = Watched(handle, folder)
        with self._lock:
            self._jobs.append(job)
            if self._thread is None:
                self._broken = None
                self._thread = threading.Thread(target=self._look_on, daemon=True, name="headway-poller")
                self._thread.start()
        try:
            yield job
        finally:
            with self._lock:
                self._jobs.remove(job)
                if not self._jobs:
                    self._wake.set()

    def renew(self, backend: Backend) -> None:
        """While there is no job, ask through a newer backend: what it stands on, a login or a connection, is fresh."""
        with self._lock:
            if not self._jobs:
                self._backend = backend

    def wait(self, job: Watched, timeout: float) -> None:
        """Return when the job's state changes, or after the timeout in seconds. Raises what broke the poller."""
        job.news.wait(timeout)
        job.news.clear()
        if self._broken:
            raise self._broken

    def _look_on(self) -> None:
        while True:
            with self._lock:
                jobs = list(self._jobs)
                if not jobs:
                    self._thread = None
                    return
            self._look(jobs)
            self._wake.wait(self._backend.poll_seconds)
            self._wake.clear()

    def _look(self, jobs: list[Watched]) -> None:
        try:
            states = self._backend.states([(job.handle, job.folder) for job in jobs])
        except NO_ANSWER as error:
            states = [JobState(state="unknown", reason=str(error)) for _ in jobs]
        except Exception as error:  # noqa: BLE001 - the thread's own main: the supervisors raise it
            self._broken = error
            states = [JobState(state="unknown", reason=str(error)) for _ in jobs]
        for job, state in zip(jobs, states, strict=True):
            job.take(state)


_pollers: dict[str, Poller] = {}
_pollers_lock = threading.Lock()


def poller_of(backend: Backend, cluster: ClusterConfig | None) -> Poller:
    """The poller of this process for a scheduler; without a cluster, one for this backend alone.

    Jobs of clusters that differ only in machines, images or limits are of the same scheduler.
    """
    if cluster is None:
        return Poller(backend)
    section = getattr(cluster, cluster.backend, None)
    settings = digest(section.model_dump(mode="json")) if section else ""
    key = f"{cluster.backend}-{settings}"
    with _pollers_lock:
        poller = _pollers.setdefault(key, Poller(backend))
    poller.renew(backend)
    return poller
