"""One submission while it waits and runs: what is forwarded, what is said, when it hangs, when it is over.

How a job is submitted, and what follows a failure, is supervisor.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.errors import Cancelled, JobFailed, Missing
from tasks.compute import metrics
from tasks.compute.clock import CLOCK, Clock
from tasks.compute.hang import HangWatch
from tasks.compute.job import Backend, Job, JobState
from tasks.compute.marks import read_mark
from tasks.compute.polling import Poller, Watched
from tasks.compute.supervisor_lock import note
from tasks.compute.watching import Event, Kind, Watch

LEAST_SECONDS, MOST_SECONDS = 0.1, 1.0
"""Between two looks at the files of a job that runs: a tenth of the time between two looks at its scheduler, within these."""
STARTING_SECONDS, QUEUED_SECONDS = 5.0, 8.0
"""Between two questions whether a job that does not run yet was cancelled; a new state wakes up at once."""


@dataclass
class Forwarding:
    """How much of a folder was handed on, over all submissions that one supervisor sees."""

    offset: int = 0
    said: Any = None


@dataclass
class Attendance:
    """A supervisor's eyes on one submission."""

    job: Job
    folder: Path
    backend: Backend
    poller: Poller
    watched: Watched
    watch: Watch
    forwarding: Forwarding
    clock: Clock = CLOCK
    _told: tuple[str, str] = ("", "")
    _silent: float = 0.0
    _lost_at: int = 0
    _hang: HangWatch = field(init=False)

    def __post_init__(self) -> None:
        self._hang = HangWatch(self.job, self.folder, poll_seconds=self.backend.poll_seconds, clock=self.clock.now)

    def first_answer(self) -> JobState:
        """The state that the scheduler says first, however long it takes: until then nothing may be submitted."""
        while self.watched.state.state == "unknown" or self._lost_once():
            self._look_at_silence()
            self._pause()
        return self.watched.state

    def until_over(self) -> tuple[JobState, str]:
        """The last state; and when the job hung and was ended for it, what stood still."""
        hung, ended = "", False
        while True:
            state = self.watched.state
            records = self._forward() if state.state != "queued" else []  # a thousand that wait cost no look at files
            self._tell(state)
            self._look_at_silence()
            if state.over and not self._lost_once():
                self._forward()
                return with_result(state, self.folder), hung
            if not hung:
                hung = self._hang.look(state, records)
                if hung:
                    self.say("hung", f"The job of {self.job.name} hangs: {hung}. It is ended.")
            if hung and not ended:
                ended = self.cancel()
            self._pause()

    def cancel(self) -> bool:
        """Have the backend end the job; False when it gives no answer now, or refuses."""
        try:
            self.backend.cancel(self.watched.handle, self.folder)
        except (Missing, JobFailed):
            return False
        return True

    def say(self, kind: Kind, text: str) -> None:
        self.watch.event(Event(kind, text, self.job.submission))

    def _pause(self) -> None:
        state = self.watched.state.state
        look = min(max(self.backend.poll_seconds / 10, LEAST_SECONDS), MOST_SECONDS)
        waiting = QUEUED_SECONDS if state == "queued" else min(self.backend.poll_seconds, STARTING_SECONDS)
        self.poller.wait(self.watched, look if state in ("running", "lost") else max(look, waiting))
        if self.watch.cancelled():
            raise Cancelled(f"the flow run was cancelled; the job in {self.folder} was stopped")

    def _forward(self) -> list[dict[str, Any]]:
        """Hand on the whole records that came since, and progress when it changed."""
        records, self.forwarding.offset = metrics.since(self.folder / "metrics.jsonl", self.forwarding.offset)
        if records:
            self.watch.metrics(records)
        progress = read_mark(self.folder / "progress.json")
        if progress and progress != self.forwarding.said:
            self.forwarding.said = progress
            self.watch.progress(progress)
        return records

    def _tell(self, state: JobState) -> None:
        if state.state not in ("queued", "starting", "running") or (state.state, state.reason) == self._told:
            return
        self._told = (state.state, state.reason)
        note(self.folder, flow_run=self.watch.flow_run, state=state)
        why = f": {state.reason}" if state.reason else ""
        self.say(state.state, f"The job of {self.job.name} is {state.state}{why} ({self.job.submission_id}).")

    def _look_at_silence(self) -> None:
        """Say once a period that there is no answer, and once that there is one again."""
        period, now = self.job.watch.silent_minutes * 60, self.clock.now()
        silent = self.watched.silent_seconds()
        if silent > period and now - self._silent > period:
            self._silent = now
            why = f" ({self.watched.state.reason})" if self.watched.state.reason else ""
            self.say(
                "silent",
                f"No answer from the scheduler for {silent / 60:.1f} minutes{why}. The job of {self.job.name} "
                f"({self.job.submission_id}) is not given up and not submitted again; waiting for an answer.",
            )
        elif self._silent and silent < period:
            self._silent = 0.0
            self.say("answers", "The scheduler answers again.")

    def _lost_once(self) -> bool:
        """A job is lost when two answers in a row say so: between a queue and its history there may be a gap."""
        if self.watched.state.state != "lost":
            self._lost_at = 0
            return False
        self._lost_at = self._lost_at or self.watched.answers
        return self.watched.answers <= self._lost_at


def with_result(state: JobState, folder: Path) -> JobState:
    """A parent that died after the result was written still leaves a result."""
    if state.state == "lost" and (folder / "result.json").exists():
        return JobState(state="ended", code=0, reason="ended")
    return state
