"""One job from intent to result, whatever dies in between.

The protocol (docs/DESIGN.md, "Job and supervisor"): intent with token, submit, handle, poll, result. On a restart a handle is
asked, an intent alone is looked for and adopted; a job is never submitted twice. A *generation* is one submission: it is
open until `settle` says how it ended, and the next one begins only after that.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.compute.job import Backend, Job, JobResult, JobState, Journal
from tasks.compute.logs import tail_of_failure
from tasks.errors import Cancelled, IntegrityError, JobFailed, Missing
from tasks.process import read_json

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Watch:
    """What the supervisor tells, and asks, while a job runs."""

    metrics: Callable[[list[dict[str, Any]]], None] = lambda records: None
    progress: Callable[[dict[str, Any]], None] = lambda progress: None
    cancelled: Callable[[], bool] = lambda: False
    """Asked at every poll; True cancels the job."""
    stop_on_interrupt: Callable[[], bool] = lambda: True
    """Asked when the orchestrator is interrupted (Ctrl-C, SIGTERM): whether the job stops too."""


def run(job: Job, *, backend: Backend, folder: Path, journal: Journal, watch: Watch) -> JobResult:
    """Submit or adopt a job and wait for its result.

    Raises ValueError for a user's error in the job, IntegrityError, Missing, JobFailed, and Cancelled. The generation stays
    open on success, until the stage has published what the job made and calls `settle`.
    """
    number, handle, adopted = _submit_or_adopt(job, backend, folder, journal)
    state = _wait(handle, backend, folder, watch, token=job.token, journal=journal)
    result = read_json(folder / "result.json")
    if state.code != 0 or result is None:
        settle(job.token, journal, "failed")
        raise _failure(job, state, folder)
    return JobResult(
        id=f"{job.id}-{number}",
        folder=str(folder),
        submissions=number,
        attempts=state.attempts,
        adopted=adopted,
        resumed_from_step=result.get("resumed_from_step"),
        result=result,
    )


def settle(token: str, journal: Journal, outcome: str) -> None:
    """Close the open generation of a token: done, failed or cancelled."""
    number = _newest(token, journal)
    if number:
        journal.put(f"{_key(token, number)}/end", {"outcome": outcome, "time": time.time()})


def _submit_or_adopt(job: Job, backend: Backend, folder: Path, journal: Journal) -> tuple[int, dict[str, Any], bool]:
    number = _newest(job.token, journal)
    ended = journal.get(f"{_key(job.token, number)}/end") if number else None
    if number and not ended:
        return _adopt(job, backend, folder, journal, number)
    if ended and ended["outcome"] == "done":
        shutil.rmtree(folder, ignore_errors=True)
    _forget_last_end(folder)
    job = job.model_copy(update={"submission": number + 1})
    intent = {"job": job.model_dump(mode="json"), "spec": job.spec_digest, "time": time.time()}
    if not journal.put(f"{_key(job.token, number + 1)}/intent", intent):
        return _submit_or_adopt(job, backend, folder, journal)
    handle = backend.submit(job, folder)
    journal.put(f"{_key(job.token, number + 1)}/handle", handle)
    return number + 1, handle, False


def _adopt(job: Job, backend: Backend, folder: Path, journal: Journal, number: int) -> tuple[int, dict[str, Any], bool]:
    """Take over an open generation: by its handle, else by its token; submit only when neither exists.

    One that ended without a result while nobody looked is closed, and the next one goes on from its checkpoints.
    """
    job = job.model_copy(update={"submission": number})
    intent = journal.get(f"{_key(job.token, number)}/intent") or {}
    handle = journal.get(f"{_key(job.token, number)}/handle") or backend.find(job, folder)
    if handle and backend.states([(handle, folder)])[0].over and not (folder / "result.json").exists():
        settle(job.token, journal, "failed")
        return _submit_or_adopt(job, backend, folder, journal)
    if handle and intent.get("spec") != job.spec_digest:
        raise ValueError(
            f"a job for this stage is there under other settings of the cluster or the program ({folder}); run the same "
            f"command with the settings that it was started with, or stop it: kill {handle.get('pid')}"
        )
    if not handle:
        handle = backend.submit(job, folder)
        journal.put(f"{_key(job.token, number)}/handle", handle)
        return number, handle, False
    return number, handle, True


def _forget_last_end(folder: Path) -> None:
    """Before a new submission in an old folder: what it left of its end must not be read as the new one's."""
    for name in ("result.json", "exit.json", "handle.json", "attempt.json", "progress.json"):
        (folder / name).unlink(missing_ok=True)
    for name in ("errors", "ranks", "nodes", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)


def _wait(
    handle: dict[str, Any], backend: Backend, folder: Path, watch: Watch, *, token: str, journal: Journal
) -> JobState:
    offset, said = 0, None
    try:
        while True:
            state = backend.states([(handle, folder)])[0]
            offset = _forward(folder / "metrics.jsonl", offset, watch)
            progress = read_json(folder / "progress.json")
            if progress and progress != said:
                said = progress
                watch.progress(progress)
            if state.over:
                return _settled_state(state, folder)
            if watch.cancelled():
                raise Cancelled(f"the flow run was cancelled; the job in {folder} was stopped")
            time.sleep(POLL_SECONDS)
    except BaseException as error:
        interrupted = isinstance(error, Cancelled) or not isinstance(error, Exception)
        if interrupted and (isinstance(error, Cancelled) or watch.stop_on_interrupt()):
            backend.cancel(handle, folder)
            settle(token, journal, "cancelled")
        raise


def _settled_state(state: JobState, folder: Path) -> JobState:
    """A parent that died after the result was written still leaves a result."""
    if state.state == "lost" and (folder / "result.json").exists():
        return JobState(state="ended", code=0, reason="ended")
    return state


def _forward(path: Path, offset: int, watch: Watch) -> int:
    """Hand on the whole lines that came since; returns the new offset in bytes."""
    if not path.exists() or path.stat().st_size <= offset:
        return offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    records = [json.loads(line) for line in whole.splitlines()]
    if records:
        watch.metrics(records)
    return offset + len(whole)


def _failure(job: Job, state: JobState, folder: Path) -> Exception:
    reports = [read_json(path) for path in sorted((folder / "errors").glob("rank-*.json"))]
    report = next(
        (r for r in reports if r["class"] in ("user", "integrity", "missing")), reports[0] if reports else None
    )
    if report and report["class"] == "user":
        return ValueError(report["message"])
    if report and report["class"] == "integrity":
        return IntegrityError(report["message"], remedy=report["remedy"])
    if report and report["class"] == "missing":
        remedy = "Free room on the disk; or, if a package is named: pip install -c constraints.txt -e '.[cluster]'."
        return Missing(report["message"], remedy=report["remedy"] or remedy)
    failure = {"timeout": "timeout", "cancelled": "cancelled"}.get(state.reason)
    failure = failure or (report["class"] if report else "infrastructure")
    what = f"{report['type']}: {report['message']}" if report else _what(state)
    log = tail_of_failure(folder)
    return JobFailed(
        f"the job of {job.name} failed after {state.attempts} attempt(s): {what}" + (f"\n{log}" if log else ""),
        failure=failure,
        folder=str(folder),
        remedy=f"Its logs are in {folder}. The same command goes on from where it stopped.",
    )


def _what(state: JobState) -> str:
    if state.state == "lost":
        return "its parent process is gone without a word"
    if state.code == 0:
        return "it ended with exit code 0 and without a result"
    return f"{state.reason}, exit code {state.code}"


def _newest(token: str, journal: Journal) -> int:
    """The number of the newest generation; 0 when there is none."""
    return max((int(key.split("/")[-2]) for key in journal.list(f"jobs/{token}") if key.endswith("/intent")), default=0)


def _key(token: str, number: int) -> str:
    return f"jobs/{token}/{number:04d}"
