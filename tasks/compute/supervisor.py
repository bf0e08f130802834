"""One job from intent to result, whatever dies in between, and however often it must be submitted.

The protocol (docs/compute.md): intent with token, submit, handle, poll, result. On a restart a handle is asked, an intent alone
is looked for by its name and adopted; a job is never submitted twice. What follows a failure is decided in failures.py by the
table in failures.json. A submission is open until `settle` says how it ended (submission.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tasks.common.claims import ALONE, Claim
from tasks.common.errors import Cancelled, IntegrityError, JobFailed, Missing, Superseded
from tasks.common.process import read_json, write_json
from tasks.compute.elastic import bad_machines
from tasks.compute.failures import Decision, Failed, close_failed, error_of
from tasks.compute.job import Backend, Job, JobResult, JobState, Journal, NotAccepted, require_enough, write_folder
from tasks.compute.job_monitor import Attendance, Forwarding, with_result
from tasks.compute.nodes import ended_state, read_mark
from tasks.compute.polling import CLOCK, Clock, Event, Poller, Watch, poller_of
from tasks.compute.submission import (
    CANCELLED,
    HOME_DIGITS,
    Generation,
    clear,
    differences,
    home_of,
    intend,
    newest,
    note_handle,
    require_reachable,
    set_aside,
    settle,
)
from tasks.compute.supervisor_lock import Fenced, supervising
from tasks.config.base import NodeName
from tasks.config.cluster import ClusterConfig

# A job is handed to its scheduler once: the intent is written first, then the job is submitted, then its handle is
# noted. If the scheduler's answer or this process is lost in between, the intent and the job's name suffice to look
# the job up again.


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
    claim: Claim = ALONE
    """To the job, against other hosts: nothing is submitted or ended without it."""

    def begin(self, job: Job, last: Generation | None, *, stuck: int, patient: bool = False) -> Submitted | None:
        """The next submission; None when somebody else was first with the intent."""
        self.claim.require()
        number = last.number if last else 0
        if number:
            set_aside(self.folder, number)
        job = job.model_copy(update={"submission": number + 1, "home": home_of(self.folder)[:HOME_DIGITS]})
        write_folder(job, self.folder)
        generation = intend(job, self.folder, self.journal, stuck=stuck, cluster=self.cluster)
        return self.submit(job, generation, patient=patient) if generation else None

    def submit(self, job: Job, generation: Generation, *, patient: bool = False) -> Submitted:
        """Hand over a job whose intent is written down. What the scheduler refuses is settled.

        `patient`: a scheduler that is away is waited for. Raises ValueError, JobFailed, and Missing, which leaves the submission
        open unless the backend knows that nothing was accepted: a scheduler that did not answer may have taken the job.
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
        except NotAccepted as error:
            settle(
                job.token,
                self.journal,
                "failed",
                folder=self.folder,
                failure="missing",
                message=f"never accepted: {error}",
            )
            raise error.reason from error
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
        if not (self.folder / "job.json").exists():  # somebody deleted the folder
            write_folder(job, self.folder)
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
                    remedy="Run the same command again to continue from where it stopped.",
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
        """The handle. A scheduler that was away is asked for the job before it is told again. Raises Superseded."""
        require_enough(job)
        deadline, away = self.clock.now() + job.watch.silent_minutes * 60, False
        while True:
            try:
                result = self.backend.find(job, self.folder) if away else None
                self.claim.require()
                return result or self.backend.submit(job, self.folder)
            except Superseded:
                raise
            except Missing as error:
                final = isinstance(error, NotAccepted) and error.final
                if final or not patient or self.clock.now() > deadline:
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
            self.claim.require()
            handle = self.backend.find(job, self.folder)
            if handle:
                self.backend.cancel(handle, self.folder)
        except Superseded:
            raise
        except Missing as away:
            end = f"End it when the scheduler answers: headway job cancel {job.id}"
            self.watch.event(Event("silent", f"{away.message}: {job.submission_id} may run. {end}", job.submission))
            return
        settle(job.token, self.journal, "cancelled", folder=self.folder, message="the run was interrupted")


def as_intended(job: Job, generation: Generation) -> Job:
    """The job with what its submission was intended to have: number, home, excluded nodes, smaller batches."""
    intended = generation.intent.get("job") or {}
    home = str(intended.get("home", ""))
    if not re.fullmatch("[0-9a-f]*", home):  # it is in names that commands of the scheduler get
        raise IntegrityError(
            f"the journal of {job.id} names a home {home!r}, which is none",
            remedy="Nothing was submitted. Find out who wrote journal/jobs in the store, and cancel the job.",
        )
    return with_lessons(job, intended).model_copy(update={"submission": generation.number, "home": home})


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


CANCEL_SECONDS = 10.0
"""Patience with a scheduler that does not answer when a job is cancelled: a cancelled flow ends within 15 s."""


def run(
    job: Job,
    *,
    backend: Backend,
    folder: Path,
    journal: Journal,
    watch: Watch,
    cluster: ClusterConfig | None = None,
    poller: Poller | None = None,
    clock: Clock = CLOCK,
) -> JobResult:
    """Submit or adopt a job and wait for its result, through as many submissions as `job.retry` allows.

    `cluster` is what `backend` was opened with: it is noted in the folder, so that the job can be cancelled from outside. Without
    a `poller`, this process's own for the scheduler looks.
    Raises ValueError for a user's error in the job, IntegrityError, Missing, JobFailed, and Cancelled. The generation stays
    open on success, until the stage has published what the job made and calls `settle`.
    """
    once = _Once(watch, job)
    with supervising(folder, job.token, flow_run=watch.flow_run, claims=journal.claims, waiting=once) as claim:
        poller = poller or poller_of(backend, cluster)
        fenced = journal if claim is ALONE else Fenced(journal, claim)
        return _Supervision(Submitter(job, backend, folder, fenced, watch, cluster, clock, claim), poller).run()


@dataclass
class _Once:
    """While another process supervises the job: say so once, and ask whether to stop."""

    watch: Watch
    job: Job
    said: bool = False

    def __call__(self) -> None:
        if not self.said:
            self.said = True
            self.watch.event(Event("waiting", f"Another process supervises the job of {self.job.name}.", 0))
        if self.watch.cancelled():
            raise Cancelled("the flow run was cancelled while another process supervised its job")


@dataclass
class _Supervision:
    """One call of `run`."""

    submitter: Submitter
    poller: Poller
    forwarding: Forwarding = field(default_factory=Forwarding)

    def __post_init__(self) -> None:
        submitter = self.submitter
        self.job, self.folder, self.journal, self.watch = (
            submitter.job,
            submitter.folder,
            submitter.journal,
            submitter.watch,
        )

    def run(self) -> JobResult:
        current = self._adopt_or_begin()
        while True:
            if current.over:
                state, hung = with_result(current.over, self.folder), ""
            else:
                with self._attended(current) as attendance:
                    state, hung = attendance.until_over()
            result = read_result(current.job, self.folder) if state.code == 0 else None
            if result is not None:
                number = current.job.submission
                return JobResult(
                    id=f"{self.job.id}-{number}",
                    folder=str(self.folder),
                    submissions=number,
                    attempts=state.attempts,
                    adopted=current.adopted,
                    resumed_from_step=result.get("resumed_from_step"),
                    excluded_nodes=self._left_out(current.job),
                    result=result,
                )
            current = self._after_failure(current, state, hung)

    def _left_out(self, job: Job) -> tuple[str, ...]:
        """Machines that the job did without in the end; an elastic one also those that were named while it ran."""
        named = bad_machines(self.folder) if job.elastic else ()
        return tuple(dict.fromkeys(n for n in (*job.excluded_nodes, *named) if n not in self.job.excluded_nodes))

    def _adopt_or_begin(self) -> Submitted:
        generation = newest(self.job.token, self.journal)
        if generation is None:
            return self._begin(self.job, None)
        if generation.outcome == "done":
            clear(self.folder)
            return self._begin(self.job, generation)
        if generation.end:
            again = generation.end.get("again") or {}
            return self._begin(with_lessons(self.job, again), generation, stuck=again.get("stuck", 0))
        job = as_intended(self.job, generation)
        ours = require_reachable(generation, self.folder, self.submitter.cluster, self.journal.claims)
        if ours == "gone":
            return self._instead(generation, "the machine that it ran on is gone, and its supervisor with it")
        result = self.submitter.found(job, generation)
        if result is None:
            self._require_same(generation)
            if ours == "another's":
                # Its supervisor may only be stopped, and submit it yet. Machines of a submission that is not the newest end
                # themselves: so this one is over, and the next one is submitted.
                return self._instead(generation, "its supervisor was lost before its scheduler had it")
            return self.submitter.submit(job, generation)
        # Take over a submission; one that ended without a result while nobody looked is closed, and the next one begins
        self.submitter.note_cluster()
        text = f"The job of {self.job.name} is there already ({result.job.submission_id})."
        self.watch.event(Event("adopted", text, result.job.submission))
        state = result.over
        if state is None:
            with self._attended(result) as attendance:
                state = attendance.first_answer()
        if state.over and not (self.folder / "result.json").exists():
            _, decision = self._close(result, state)
            again = decision.learned() if decision.again else None
            return self._begin(with_lessons(self.job, again), result.generation, stuck=decision.stuck)
        self._require_same(result.generation)
        return result

    def _instead(self, generation: Generation, why: str) -> Submitted:
        """Close what another host's supervisor left, and begin the next submission."""
        settle(self.job.token, self.journal, "failed", folder=self.folder, failure="infrastructure", message=why)
        text = f"The job of {self.job.name} is submitted again: {why} ({generation.intent.get('host')})."
        self.watch.event(Event("retrying", text, generation.number))
        return self._begin(with_lessons(self.job, generation.intent.get("job")), generation, stuck=generation.stuck)

    def _require_same(self, generation: Generation) -> None:
        differs = differences(self.job, generation.intent)
        if differs:
            raise ValueError(
                f"a job for this stage is there under other settings of the cluster or the program ({self.folder}): "
                f"{'; '.join(differs)}. Run the same command with the settings that it was started with, or stop it: "
                f"headway job cancel {self.job.id}"
            )

    def _begin(self, job: Job, last: Generation | None, *, stuck: int = 0, patient: bool = False) -> Submitted:
        """The next submission. Whoever is first with the intent submits; the other one adopts."""
        return self.submitter.begin(job, last, stuck=stuck, patient=patient) or self._adopt_or_begin()

    def _after_failure(self, failed: Submitted, state: JobState, hung: str) -> Submitted:
        """The next submission, after a wait. Raises the error when there is none."""
        why, decision = self._close(failed, state, hung)
        if not decision.again:
            number = failed.job.submission
            raise error_of(
                failed.job, why, state, self.folder, submissions=number, why_not_again=decision.why_not
            ) from None
        job, name = failed.job, failed.job.name
        added = [node for node in decision.excluded_nodes if node not in job.excluded_nodes]
        if added:
            text = f"{', '.join(added)}: left out of the job of {name} from now on."
            self.watch.event(Event("excluded", text, job.submission))
        text = (
            f"The job of {name} failed ({why.failure}: {why.what}). {why.sentence} It is submitted again in "
            f"{decision.wait:.0f} s, as number {job.submission + 1}."
        )
        self.watch.event(Event("retrying", text, job.submission))
        self.submitter.wait(decision.wait)
        again = with_lessons(self.job, decision.learned())
        return self._begin(again, failed.generation, stuck=decision.stuck, patient=True)

    def _close(self, failed: Submitted, state: JobState, hung: str = "") -> tuple[Failed, Decision]:
        cluster = self.submitter.cluster
        return close_failed(
            failed.generation,
            failed.job,
            state,
            self.folder,
            self.journal,
            one_machine=cluster is not None and cluster.capabilities.this_machine,
            hung=hung,
        )

    @contextmanager
    def _attended(self, current: Submitted) -> Iterator[Attendance]:
        """Eyes on a submission; when the run is cancelled or interrupted meanwhile, the job is too."""
        with self.poller.watching(current.handle, self.folder) as watched:
            try:
                eyes = Attendance(
                    current.job,
                    self.folder,
                    self.submitter.backend,
                    self.poller,
                    watched,
                    self.watch,
                    self.forwarding,
                    self.submitter.clock,
                    self.submitter.claim,
                )
                yield eyes
            except BaseException as error:
                interrupted = not isinstance(error, Exception) and self.watch.stop_on_interrupt()
                if isinstance(error, Cancelled) or interrupted:
                    self._cancel(eyes)
                elif not isinstance(error, Exception):
                    eyes.say(
                        "left", f"{current.job.id} continues to run. To end it: headway job cancel {current.job.id}"
                    )
                raise

    def _cancel(self, eyes: Attendance) -> None:
        """End the job; one whose scheduler does not answer stays open, and is told of as an orphan."""
        clock = self.submitter.clock
        deadline = clock.now() + CANCEL_SECONDS
        while not eyes.cancel():
            if clock.now() > deadline:
                eyes.say(
                    "silent",
                    f"The scheduler did not answer, so {eyes.job.submission_id} may still run. End it when it answers: "
                    f"headway job cancel {self.job.id}",
                )
                return
            clock.sleep(PAUSE_SECONDS)
        settle(self.job.token, self.journal, "cancelled", folder=self.folder, message="the run was cancelled")


def read_result(job: Job, folder: Path) -> dict[str, Any] | None:
    """What a job that ended well says; None when it says nothing, which is a failure.

    A program of the user's own (`module` false) need not know of our results: its exit code is enough.
    """
    try:
        result = read_json(folder / "result.json")
    except json.JSONDecodeError:
        return None
    if result is None and not job.module:
        return {}
    made = isinstance(result, dict) and (result or any((folder / "out").glob("*")))
    return dict(result) if made else None
