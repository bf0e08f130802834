"""A scheduler that does what a test tells it: a small backend of its own, for what no real one does on command.

It keeps the protocol of tasks/compute/job.py: it knows jobs by their names, answers for many at once, and forgets nothing unless
told to. `plays[N - 1]` says what becomes of submission N: called at each look with the job, its folder and the look's number.
"""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tasks.common.errors import Missing
from tasks.common.process import write_json
from tasks.compute.job import Job, JobState, Rendered, write_folder

Play = Callable[[Job, Path, int], JobState]
RUNNING = JobState(state="running")


def done(job: Job, folder: Path, look: int) -> JobState:
    """A submission that ends well at the second look."""
    if look < 2:
        return RUNNING
    write_json(folder / "result.json", {"submission": job.submission})
    return JobState(state="ended", code=0, reason="ended")


def fails(failure: str | None = None, *, nodes: tuple[str, ...] = (), code: int = 1, step: int | None = None) -> Play:
    """A submission that fails at the second look, after one more step when one is given."""

    def play(job: Job, folder: Path, look: int) -> JobState:
        if look < 2:
            return RUNNING
        if step is not None:
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "time": 1.0}) + "\n")
        return JobState(state="ended", code=code, reason="FAILED", failure=failure, failed_nodes=nodes)

    return play


class ScriptedBackend:
    """State: what was submitted, what was cancelled, and whether the scheduler answers."""

    poll_seconds = 0.05

    def __init__(self, *plays: Play) -> None:
        self.plays = plays
        self.away = False
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.calls: list[int] = []
        """For each call of `states`: how many jobs it was for."""
        self._looks: dict[str, int] = {}
        self._lock = threading.Lock()

    def render(self, job: Job, folder: Path) -> Rendered:
        return Rendered(backend="scripted", command=(job.submission_id,))

    def submit(self, job: Job, folder: Path) -> dict[str, Any]:
        self._answer()
        return self.take(job, folder)

    def take(self, job: Job, folder: Path) -> dict[str, Any]:
        """What a scheduler does with a job, whether or not its answer gets through."""
        with self._lock:
            assert job.submission_id not in [known.submission_id for known in self.jobs], "submitted twice"
            write_folder(job, folder)
            self.jobs.append(job)
        return {"id": job.submission_id}

    def find(self, job: Job, folder: Path) -> dict[str, Any] | None:
        self._answer()
        known = any(known.submission_id == job.submission_id for known in self.jobs)
        return {"id": job.submission_id} if known else None

    def states(self, jobs: Sequence[tuple[dict[str, Any], Path]]) -> list[JobState]:
        self.calls.append(len(jobs))
        return [JobState(state="unknown", reason="no route") if self.away else self._state(*job) for job in jobs]

    def cancel(self, handle: dict[str, Any], folder: Path) -> None:
        self._answer()
        self.cancelled.append(handle["id"])

    def _state(self, handle: dict[str, Any], folder: Path) -> JobState:
        name = handle["id"]
        job = next(job for job in self.jobs if job.submission_id == name)
        self._looks[name] = self._looks.get(name, 0) + 1
        if name in self.cancelled:
            return JobState(state="ended", code=1, reason="cancelled")
        return self.plays[min(job.submission, len(self.plays)) - 1](job, folder, self._looks[name])

    def _answer(self) -> None:
        if self.away:
            raise Missing("the scheduler does not answer")
