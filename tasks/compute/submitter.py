"""Hand a job to a scheduler once: the intent first, then the job, then the note of its handle.

Whatever is lost in between, the scheduler's answer or this process, the intent and the job's name are enough to find it again.
When there is a next submission is supervisor.py and failures.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tasks.common.errors import Cancelled, IntegrityError, JobFailed, Missing
from tasks.common.process import write_json
from tasks.compute.job import Backend, Job, JobState, Journal, require_enough, write_folder
from tasks.compute.marks import read_mark
from tasks.compute.nodes import ended_state
from tasks.compute.polling import CLOCK, Clock, Event, Watch
from tasks.compute.submission import CANCELLED, Generation, intend, note_handle, set_aside, settle
from tasks.config.base import NodeName
from tasks.config.cluster import ClusterConfig

PAUSE_SECONDS = 0.2
NODE_NAMES = TypeAdapter(tuple[NodeName, ...])


@dataclass
class Submitted:
    """One submission that the scheduler has, or had."""

    job: Job
    generation: Generation
    handle: dict[str, Any]
    adopted: bool
    over: JobState | None = None
    """How it ended, of one that the scheduler does not know any more."""


@dataclass
class Submitter:
    """`job` is as the caller of the supervisor gave it; a submission's own has its number and what was learned before."""

    job: Job
    backend: Backend
    folder: Path
    journal: Journal
    watch: Watch
    cluster: ClusterConfig | None
    clock: Clock = CLOCK

    def begin(self, job: Job, last: Generation | None, *, stuck: int, patient: bool = False) -> Submitted | None:
        """The next submission; None when somebody else was first with the intent."""
        number = last.number if last else 0
        if number:
            set_aside(self.folder, number)
        job = job.model_copy(update={"submission": number + 1})
        write_folder(job, self.folder)
        generation = intend(job, self.folder, self.journal, stuck=stuck, cluster=self.cluster)
        return self.submit(job, generation, patient=patient) if generation else None

    def submit(self, job: Job, generation: Generation, *, patient: bool = False) -> Submitted:
        """Hand over a job whose intent is written down. What the scheduler refuses is settled.

        `patient`: a scheduler that is away is waited for. Raises ValueError, JobFailed, and Missing, which leaves the submission
        open: a scheduler that did not answer may have taken the job.
        """
        self.note_cluster()
        try:
            handle = self._handed_over(job, patient)
        except ValueError as error:
            settle(job.token, self.journal, "failed", folder=self.folder, failure="user", message=str(error))
            raise ValueError(f"{error}{self._left_out(job)}") from error
        except JobFailed as error:
            outcome = "cancelled" if error.failure == "cancelled" else "failed"
            settle(job.token, self.journal, outcome, folder=self.folder, failure=error.failure, message=error.message)
            raise
        except BaseException as error:
            interrupted = not isinstance(error, Exception) and self.watch.stop_on_interrupt()
            if isinstance(error, Cancelled) or interrupted:
                self._stop_unnoted(job)
            raise
        note_handle(job.token, job.submission, handle, self.journal)
        if read_mark(self.folder / CANCELLED).get("submission") == job.submission:  # while it was handed over
            with suppress(Missing):
                self.backend.cancel(handle, self.folder)
        text = f"The job of {job.name} is submitted ({job.submission_id})."
        self.watch.event(Event("submitted", text, job.submission))
        return Submitted(job, generation, handle, adopted=False)

    def found(self, job: Job, generation: Generation) -> Submitted | None:
        """The open submission: by its handle, by its name, or by what it left in the folder. None when it never came to be.

        Raises Missing when the scheduler does not answer.
        """
        handle = generation.handle or self.backend.find(job, self.folder)
        if handle is not None:
            note_handle(job.token, job.submission, handle, self.journal)
            return Submitted(job, generation, handle, adopted=True)
        marks = [self.folder / "attempt.json", *(self.folder / "nodes").glob("*/node.json")]
        if not any(read_mark(mark).get("submission") == job.submission for mark in marks):
            return None
        return Submitted(job, generation, {}, True, over=ended_state(self.folder) or JobState(state="lost"))

    def wait(self, seconds: float) -> None:
        """Wait. Raises Cancelled when the flow run is cancelled meanwhile, JobFailed when the job is (jobs_book.py)."""
        until = self.clock.now() + seconds
        while True:
            if self.watch.cancelled():
                raise Cancelled("the flow run was cancelled while its job waited to be submitted again")
            if (self.folder / CANCELLED).exists():
                raise JobFailed(
                    f"the job of {self.job.name} was cancelled by hand while it waited to be submitted again",
                    failure="cancelled",
                    folder=str(self.folder),
                    remedy="The same command goes on from where it stopped.",
                )
            left = until - self.clock.now()
            if left <= 0:
                return
            self.clock.sleep(min(left, PAUSE_SECONDS))

    def note_cluster(self) -> None:
        """Say in the folder what the job was submitted to, for those who find it later."""
        if self.cluster is not None:
            write_json(self.folder / "cluster.json", self.cluster.model_dump(mode="json"))

    def _handed_over(self, job: Job, patient: bool) -> dict[str, Any]:
        """The handle. A scheduler that was away is asked for the job before it is told again."""
        require_enough(job)
        deadline, away = self.clock.now() + job.watch.silent_minutes * 60, False
        while True:
            try:
                result = self.backend.find(job, self.folder) if away else None
                return result or self.backend.submit(job, self.folder)
            except Missing as error:
                if not patient or self.clock.now() > deadline:
                    raise
                if not away:
                    text = f"The job of {job.name} cannot be submitted now: {error.message}"
                    self.watch.event(Event("silent", text, job.submission))
                away = True
            self.wait(max(self.backend.poll_seconds, PAUSE_SECONDS))

    def _left_out(self, job: Job) -> str:
        """Why a scheduler may refuse what it took before."""
        added = [node for node in job.excluded_nodes if node not in self.job.excluded_nodes]
        return f" (left out because they failed: {', '.join(added)})" if added else ""

    def _stop_unnoted(self, job: Job) -> None:
        """Interrupted while the scheduler was told: it may have taken the job."""
        try:
            handle = self.backend.find(job, self.folder)
            if handle:
                self.backend.cancel(handle, self.folder)
        except Missing as away:
            end = f"End it when the scheduler answers: headway job cancel {job.id}"
            self.watch.event(Event("silent", f"{away.message}: {job.submission_id} may run. {end}", job.submission))
            return
        settle(job.token, self.journal, "cancelled", folder=self.folder, message="the run was interrupted")


def as_intended(job: Job, generation: Generation) -> Job:
    """The job with what its submission was intended to have: number, excluded nodes, smaller batches."""
    return with_lessons(job, generation.intent.get("job")).model_copy(update={"submission": generation.number})


def with_lessons(job: Job, learned: dict[str, Any] | None) -> Job:
    """The job with what failures taught: further excluded nodes, smaller batches."""
    if not learned:
        return job
    try:
        further = NODE_NAMES.validate_python(learned.get("excluded_nodes", ()))
    except ValidationError as error:
        raise IntegrityError(
            f"the journal of {job.id} names a machine {error.errors()[0]['input']!r}, which is no name of one",
            remedy="Nothing was submitted. Find out who wrote journal/jobs in the store, and cancel the job.",
        ) from error
    nodes = tuple(dict.fromkeys([*job.excluded_nodes, *further]))
    return job.model_copy(update={"excluded_nodes": nodes, "smaller_batches": int(learned.get("smaller_batches", 0))})
