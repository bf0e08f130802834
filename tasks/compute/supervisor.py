"""One job from intent to result, whatever dies in between, and however often it must be submitted.

The protocol (docs/compute.md): intent with token, submit, handle, poll, result. On a restart a handle is asked, an intent alone
is looked for by its name and adopted; a job is never submitted twice. What follows a failure is decided in retrying.py by the
table in failures.json. A submission is open until `settle` says how it ended (submission.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.cluster_config import ClusterConfig
from tasks.compute.attending import Attendance, Forwarding
from tasks.compute.failures import error_of
from tasks.compute.job import Backend, Job, JobResult, JobState, Journal, write_folder
from tasks.compute.polling import Poller, poller_of
from tasks.compute.retrying import Decision, close_failed
from tasks.compute.submission import (
    Generation,
    clear,
    differences,
    intend,
    newest,
    note_handle,
    set_aside,
    settle,
)
from tasks.compute.supervision import supervising
from tasks.compute.watching import Event, Kind, Watch
from tasks.errors import Cancelled, JobFailed, Missing
from tasks.process import read_json, write_json

PAUSE_SECONDS = 0.2
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
) -> JobResult:
    """Submit or adopt a job and wait for its result, through as many submissions as `job.retry` allows.

    `cluster` is what `backend` was opened with: it is noted in the folder, so that the job can be cancelled from outside.
    Raises ValueError for a user's error in the job, IntegrityError, Missing, JobFailed, and Cancelled. The generation stays
    open on success, until the stage has published what the job made and calls `settle`.
    """
    once = _Once(watch, job)
    with supervising(folder, flow_run=watch.flow_run, waiting=once):
        poller = poller_of(backend, cluster)
        return _Supervision(job, backend, folder, journal, watch, cluster, poller).run()


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
class _Submitted:
    """One submission that the scheduler has."""

    job: Job
    generation: Generation
    handle: dict[str, Any]
    adopted: bool


@dataclass
class _Supervision:
    """One call of `run`. `job` is as the caller gave it; a submission's own has its number and what was learned before."""

    job: Job
    backend: Backend
    folder: Path
    journal: Journal
    watch: Watch
    cluster: ClusterConfig | None
    poller: Poller
    forwarding: Forwarding = field(default_factory=Forwarding)
    retried: bool = False

    def run(self) -> JobResult:
        current = self._adopt_or_begin()
        while True:
            with self._attended(current) as attendance:
                state, hung = attendance.until_over()
            result = read_result(current.job, self.folder) if state.code == 0 else None
            if result is not None:
                return self._result(current, state, result)
            current = self._after_failure(current, state, hung)

    def _adopt_or_begin(self) -> _Submitted:
        generation = newest(self.job.token, self.journal)
        if generation is None or generation.outcome == "done":
            if generation:
                clear(self.folder)
            return self._begin(self.job, generation, stuck=0)
        job = _as_intended(self.job, generation)
        if generation.end:
            again = generation.end.get("again")
            return self._begin(_changed(self.job, again), generation, stuck=again["stuck"] if again else 0)
        handle = generation.handle or self.backend.find(job, self.folder)
        if handle is None:
            self._require_same(generation)
            return self._submit(job, generation)
        note_handle(job.token, job.submission, handle, self.journal)
        return self._adopt(_Submitted(job, generation, handle, adopted=True))

    def _adopt(self, found: _Submitted) -> _Submitted:
        """Take over a submission; one that ended without a result while nobody looked is closed, and the next one begins."""
        self._note_cluster()
        with self._attended(found) as attendance:
            attendance.say("adopted", f"The job of {self.job.name} is there already ({found.job.submission_id}).")
            state = attendance.first_answer()
        if state.over and not (self.folder / "result.json").exists():
            _, decision = self._close(found, state)
            again = _again(decision) if decision.again else None
            return self._begin(_changed(self.job, again), found.generation, stuck=decision.stuck)
        self._require_same(found.generation)
        return found

    def _require_same(self, generation: Generation) -> None:
        differs = differences(self.job, generation.intent)
        if differs:
            raise ValueError(
                f"a job for this stage is there under other settings of the cluster or the program ({self.folder}): "
                f"{'; '.join(differs)}. Run the same command with the settings that it was started with, or stop it: "
                f"headway job cancel {self.job.id}"
            )

    def _begin(self, job: Job, last: Generation | None, *, stuck: int) -> _Submitted:
        """The next generation. Whoever is first with the intent submits; the other one adopts."""
        number = last.number if last else 0
        if number:
            set_aside(self.folder, number)
        job = job.model_copy(update={"submission": number + 1})
        write_folder(job, self.folder)
        generation = intend(job, self.folder, self.journal, stuck=stuck, cluster=self.cluster)
        return self._submit(job, generation) if generation else self._adopt_or_begin()

    def _submit(self, job: Job, generation: Generation) -> _Submitted:
        self._note_cluster()
        try:
            handle = self._submitted(job)
        except ValueError as error:
            settle(job.token, self.journal, "failed", folder=self.folder, failure="user", message=str(error))
            raise ValueError(f"{error}{self._left_out(job)}") from error
        except JobFailed as error:
            settle(job.token, self.journal, "failed", folder=self.folder, failure=error.failure, message=error.message)
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and self.watch.stop_on_interrupt():
                self._stop_unnoted(job)
            raise
        note_handle(job.token, job.submission, handle, self.journal)
        self._say(job, "submitted", f"The job of {job.name} is submitted ({job.submission_id}).")
        return _Submitted(job, generation, handle, adopted=False)

    def _submitted(self, job: Job) -> dict[str, Any]:
        """The handle. While a job is retried, a scheduler that is away is waited for, and then asked before it is told.

        At the first submission what is missing is the user's business at once. The generation stays open, because a scheduler
        that did not answer may have taken the job.
        """
        deadline, asked, said = time.monotonic() + job.watch.silent_minutes * 60, False, False
        while True:
            try:
                found = self.backend.find(job, self.folder) if asked else None
                return found or self.backend.submit(job, self.folder)
            except Missing as away:
                if not self.retried or time.monotonic() > deadline:
                    raise
                if not said:
                    self._say(job, "silent", f"The job of {job.name} cannot be submitted now: {away.message}")
                asked = said = True
            self._wait(max(self.backend.poll_seconds, PAUSE_SECONDS))

    def _left_out(self, job: Job) -> str:
        """Why a scheduler may refuse what it took before."""
        added = [node for node in job.excluded_nodes if node not in self.job.excluded_nodes]
        return f" (left out because they failed: {', '.join(added)})" if added else ""

    def _stop_unnoted(self, job: Job) -> None:
        """Interrupted while the scheduler was told: it may have taken the job."""
        handle = self.backend.find(job, self.folder)
        if handle:
            self.backend.cancel(handle, self.folder)
        settle(job.token, self.journal, "cancelled", folder=self.folder, message="the run was interrupted")

    def _after_failure(self, failed: _Submitted, state: JobState, hung: str) -> _Submitted:
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
            self._say(job, "excluded", f"{', '.join(added)}: left out of the job of {name} from now on.")
        self._say(
            job,
            "retrying",
            f"The job of {name} failed ({why.failure}: {why.what}). {why.sentence} It is submitted again in "
            f"{decision.wait:.0f} s, as number {job.submission + 1}.",
        )
        self._wait(decision.wait)
        self.retried = True
        return self._begin(_changed(self.job, _again(decision)), failed.generation, stuck=decision.stuck)

    def _close(self, failed: _Submitted, state: JobState, hung: str = "") -> tuple[Any, Decision]:
        return close_failed(
            failed.generation,
            failed.job,
            state,
            self.folder,
            self.journal,
            one_machine=self.cluster is not None and self.cluster.backend == "local",
            hung=hung,
        )

    @contextmanager
    def _attended(self, current: _Submitted) -> Iterator[Attendance]:
        """Eyes on a submission; when the run is cancelled or interrupted meanwhile, the job is too."""
        with self.poller.watching(current.handle, self.folder) as watched:
            try:
                eyes = Attendance(
                    current.job, self.folder, self.backend, self.poller, watched, self.watch, self.forwarding
                )
                yield eyes
            except BaseException as error:
                interrupted = not isinstance(error, Exception) and self.watch.stop_on_interrupt()
                if isinstance(error, Cancelled) or interrupted:
                    self._cancel(eyes)
                raise

    def _cancel(self, eyes: Attendance) -> None:
        """End the job; one whose scheduler does not answer stays open, and is told of as an orphan."""
        deadline = time.monotonic() + CANCEL_SECONDS
        while not eyes.cancel():
            if time.monotonic() > deadline:
                eyes.say(
                    "silent",
                    f"The scheduler did not answer, so {eyes.job.submission_id} may still run. End it when it answers: "
                    f"headway job cancel {self.job.id}",
                )
                return
            time.sleep(PAUSE_SECONDS)
        settle(self.job.token, self.journal, "cancelled", folder=self.folder, message="the run was cancelled")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            if self.watch.cancelled():
                raise Cancelled("the flow run was cancelled while its job waited to be submitted again")
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, PAUSE_SECONDS))

    def _note_cluster(self) -> None:
        if self.cluster is not None:
            write_json(self.folder / "cluster.json", self.cluster.model_dump(mode="json"))

    def _say(self, job: Job, kind: Kind, text: str) -> None:
        self.watch.event(Event(kind, text, job.submission))

    def _result(self, current: _Submitted, state: JobState, result: dict[str, Any]) -> JobResult:
        number = current.job.submission
        return JobResult(
            id=f"{self.job.id}-{number}",
            folder=str(self.folder),
            submissions=number,
            attempts=state.attempts,
            adopted=current.adopted,
            resumed_from_step=result.get("resumed_from_step"),
            excluded_nodes=tuple(n for n in current.job.excluded_nodes if n not in self.job.excluded_nodes),
            result=result,
        )


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


def _as_intended(job: Job, generation: Generation) -> Job:
    """The job with what its submission was intended to have: number, excluded nodes, smaller batches."""
    intended = generation.intent.get("job") or {}
    kept = {name: intended[name] for name in ("excluded_nodes", "smaller_batches") if name in intended}
    if "excluded_nodes" in kept:
        kept["excluded_nodes"] = tuple(kept["excluded_nodes"])
    return job.model_copy(update={**kept, "submission": generation.number})


def _changed(job: Job, again: dict[str, Any] | None) -> Job:
    """The job with what a failure taught."""
    if not again:
        return job
    nodes = tuple(dict.fromkeys([*job.excluded_nodes, *again["excluded_nodes"]]))
    return job.model_copy(update={"excluded_nodes": nodes, "smaller_batches": int(again["smaller_batches"])})


def _again(decision: Decision) -> dict[str, Any]:
    return {"excluded_nodes": decision.excluded_nodes, "smaller_batches": decision.smaller_batches}
