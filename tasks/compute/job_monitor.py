"""One submission while it waits and runs: what is forwarded, what is said, when it hangs, when it is over.

How a job is submitted, and what follows a failure, is supervisor.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.common.claims import ALONE, Claim
from tasks.common.errors import Cancelled, JobFailed, Missing, Superseded
from tasks.compute import logs
from tasks.compute.job import Backend, Job, JobState
from tasks.compute.logs import is_step
from tasks.compute.nodes import read_mark
from tasks.compute.polling import CLOCK, Clock, Event, Kind, Poller, Watch, Watched
from tasks.compute.supervisor_lock import note

LEAST_STEPS = 5
REMEMBERED_STEPS = 50
LOOK_SECONDS = 0.5
SILENT_SECONDS = 60.0
"""Without a beat, as tasks/jobs/node/__main__.py counts."""
ELASTIC_SECONDS = 120.0
"""An elastic job may stand still for so long while its machines meet anew."""


class HangWatch:
    """Judges whether a running job hangs: whether it has had no new step for longer than its steps take.

    The rule is that of `cluster.watch`: no new step for max(hang_seconds, hang_factor x the median step) once this attempt
    has made five; before its first steps, `start_minutes` since the machines run. These are no hangs:

    - waiting in a queue, booting, pulling an image, and the time between two attempts in place: the clock stands;
    - a job that counts no steps (no `step` in logs.jsonl, and no `job.progress`): only its time limit ends it;
    - the end: once progress.json has `done` >= `total`, saving is left, which may take `start_minutes`;
    - a change of the file that `job.progress` names: a checkpoint was written;
    - files that come late: a step is missed only when the machines' own beat (`nodes/K/beat`, every five seconds) is newer
      than the last step by that time. A machine without a beat gets a minute more, then it counts as hung too.

    State: the steps of this attempt, and when something last moved, by this process's clock.
    """

    def __init__(
        self, job: Job, folder: Path, *, poll_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job, self._folder, self._poll_seconds, self._clock = job, folder, poll_seconds, clock
        self._looked = 0.0
        self._identity: Any = None
        self._progress: Any = None
        self._saved: Any = None
        self.newest = -1
        """The newest step that was seen."""
        self._counts_steps = bool(job.progress)
        self._opened = 0.0
        """When this attempt began, by the machine's clock: steps from before are another attempt's."""
        self._begin()

    def _begin(self) -> None:
        """A new attempt."""
        self._steps = 0
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._moved = self._clock()

    def look(self, state: JobState, records: list[dict[str, Any]]) -> str:
        """What hangs, in words; empty while nothing does. `records` are those of logs.jsonl since the last look."""
        now = self._clock()
        if state.state != "running":
            self._moved = now
        if now - self._looked >= LOOK_SECONDS or records:
            self._looked = now
            meeting, first = self._read("attempt.json"), self._read("ranks/0.json")
            identity = (meeting.get("attempt"), first.get("pid"), first.get("started"))
            if identity != self._identity:
                self._identity = identity
                self._begin()
            leader = self._read("nodes/0/node.json")
            # Where machines share no folder, marks and steps of the submission before lie there until the new leader's arrive.
            ours = leader.get("submission", self._job.submission if leader else 1) == self._job.submission
            if ours and leader.get("code") is not None:  # this attempt is over, and the next one not begun
                self._moved = now
            elif not self._job.elastic:
                self._opened = float(leader.get("time") or 0.0) if ours else math.inf
            progress, saved = self._read("progress.json"), self._stamp(self._job.progress)
            if saved != self._saved or (progress != self._progress and (self._steps == 0 or _done(progress))):
                self._moved = now
            self._progress, self._saved = progress, saved
        for record in filter(is_step, records):
            # After a step of this attempt only its own follow, even when its machine's clock was set back.
            of_attempt = self._steps or float(record.get("time") or self._opened) >= self._opened
            if of_attempt and self._opened < math.inf:
                at = float(record.get("time") or time.time())
                if self._last is not None and at > self._last:
                    self._intervals.append(at - self._last)
                self._last, self._moved, self._counts_steps = at, now, True
                self._steps += 1
                self.newest = max(self.newest, int(record["step"]))
        return self._verdict(now) if state.state == "running" else ""

    def _verdict(self, now: float) -> str:
        if not self._counts_steps:
            return ""
        still = now - self._moved
        if self._steps < LEAST_STEPS or not self._intervals or _done(self._progress or {}):
            begun = "its last step" if self._steps else "the start of its attempt"
            patience = self._job.watch.start_minutes * 60
            return f"nothing moved for {still:.0f} s since {begun}" if still > patience else ""
        usual = statistics.median(self._intervals) if self._intervals else 0.0
        patience = max(self._job.watch.hang_seconds, self._job.watch.hang_factor * usual)
        patience += ELASTIC_SECONDS if self._job.elastic else 0.0
        silent = still > patience + SILENT_SECONDS + 2 * self._poll_seconds
        if still <= patience or not (silent or self._beat() - (self._last or 0.0) > patience):
            return ""
        machines = ", and its machine is silent" if silent else ""
        return f"no step after step {self.newest} for {still:.0f} s, where a step takes {usual:.2g} s{machines}"

    def _beat(self) -> float:
        """The newest sign of life of a machine, by its own clock."""
        beats = [self._read(f"nodes/{path.name}/beat") for path in (self._folder / "nodes").glob("*")]
        return max((float(beat.get("time", 0.0)) for beat in beats), default=0.0)

    def _read(self, name: str) -> dict[str, Any]:
        return read_mark(self._folder / name)

    def _stamp(self, name: str) -> Any:
        try:
            return name and (self._folder / name).stat().st_mtime_ns
        except OSError:
            return None


def _done(progress: dict[str, Any]) -> bool:
    total = float(progress.get("total") or 0)
    return total > 0 and float(progress.get("done") or 0) >= total


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
    claim: Claim = ALONE
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
        """Have the backend end the job; False when it gives no answer now, or refuses. Raises Superseded."""
        try:
            self.claim.require()
            self.backend.cancel(self.watched.handle, self.folder)
        except Superseded:
            raise
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
        if self.claim.lost:
            self.claim.require()
        if self.watch.cancelled():
            raise Cancelled(f"the flow run was cancelled; the job in {self.folder} was stopped")

    def _forward(self) -> list[dict[str, Any]]:
        """Hand on the whole records that came since, and progress when it changed."""
        records, self.forwarding.offset = logs.since(self.folder / "metrics.jsonl", self.forwarding.offset)
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
