"""Settle jobs whose orchestrator is gone, without ending any: `headway reconcile`, and every start of a lifecycle.

A dead flow run is the platform's business (deployments/watch/dead_runs.py). What is looked at costs little: a folder whose job
is settled has a mark (`settled.json`) and is passed over; of the others the journal is read, and their own marks. A scheduler
is asked only when the caller says so, because a start must not wait for one that is away: a job that runs there is no worse off
for an hour without a supervisor, and the run that it belongs to adopts it anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.common import process
from tasks.common.errors import Missing
from tasks.compute import open_backend
from tasks.compute.failures import close_failed
from tasks.compute.job import Job, JobState, Journal
from tasks.compute.jobs_book import JobEntry, Opener, cluster_of, find_job, handle_of, job_of
from tasks.compute.nodes import ended_state
from tasks.compute.submission import mark_settled, newest
from tasks.compute.supervisor_lock import unsupervised

Verdict = Literal["failed", "waits", "orphan", "unknown", "not_submitted"]


class Reconciled(BaseModel):
    """A job that nobody supervises, and what was found of it."""

    model_config = ConfigDict(frozen=True)

    entry: JobEntry
    verdict: Verdict
    """`failed`: it ended without a result, and is settled now. `waits`: it ended with a result, and is adopted by the next run of
    the same command. `orphan`: it runs, or waits in a queue. `unknown`: its scheduler was not asked, or gave no answer.
    `not_submitted`: it was about to be submitted, and its scheduler does not have it."""
    text: str
    """What it is and what to do, for people: names the command."""


def reconcile(home: Path, journal: Journal, *, ask: bool = False, opener: Opener = open_backend) -> list[Reconciled]:
    """Settle what ended while nobody looked, and tell of the rest; never cancels, never submits.

    With `ask`, schedulers other than this machine are asked. A job that somebody supervises is not touched.
    """
    folders = sorted(path.parent for path in (home / "jobs").glob("*/job.json"))
    open_ones = (folder for folder in folders if not (folder / "settled.json").exists())
    result = (_reconciled(home, folder, journal, opener if ask else None) for folder in open_ones)
    return [one for one in result if one]


def _reconciled(home: Path, folder: Path, journal: Journal, opener: Opener | None) -> Reconciled | None:
    """One job; None when it is settled, or somebody supervises it."""
    with unsupervised(folder) as mine:
        generation = newest(job_of(folder).token, journal) if mine else None
        if generation is None:
            return None
        if generation.end:
            mark_settled(folder, generation)
            return None
        state = _state_of(folder, journal, opener)
        verdict = _verdict(folder, state)
        if verdict == "failed" and state:
            cluster = cluster_of(folder)
            is_local = cluster is not None and cluster.capabilities.this_machine
            job = Job.model_validate(generation.intent.get("job") or process.read_json(folder / "job.json"))
            close_failed(generation, job, state, folder, journal, one_machine=is_local)
    entry = find_job(home, folder.name, journal)
    return Reconciled(entry=entry, verdict=verdict, text=_text(entry, verdict))


def _state_of(folder: Path, journal: Journal, opener: Opener | None) -> JobState | None:
    """The state of an open submission: None when its scheduler does not have it, `unknown` when it was not asked."""
    cluster, ended = cluster_of(folder), ended_state(folder)
    final = (
        cluster is None
        or not cluster.capabilities.starts_again  # else the mark of an end may be of the start before
        or (ended and ended.code == 0 and not job_of(folder).elastic)
    )
    if ended and final:
        return ended
    if cluster is None or (opener is None and not cluster.capabilities.this_machine):
        return JobState(state="unknown", reason="its scheduler was not asked")
    try:
        backend = (opener or open_backend)(cluster)
        handle = handle_of(folder, journal, backend)
    except Missing as away:
        return JobState(state="unknown", reason=away.message)
    return backend.states([(handle, folder)])[0] if handle else None


def _verdict(folder: Path, state: JobState | None) -> Verdict:
    if state is None:
        return "not_submitted"
    if state.over:
        return "waits" if (folder / "result.json").exists() and state.code in (0, None) else "failed"
    return "unknown" if state.state == "unknown" else "orphan"


def _text(entry: JobEntry, verdict: Verdict) -> str:
    again = "run the same command again"
    return {
        "failed": f"{entry.id} ended without a result ({entry.failure}: {entry.reason}); settled. To go on, {again}.",
        "waits": f"{entry.id} ended with a result that nobody took; to take it, {again}.",
        "orphan": f"{entry.id} is {entry.state} and nobody supervises it. To go on with it, {again}; "
        f"to end it: headway job cancel {entry.id}",
        "unknown": f"{entry.id} is open and nobody supervises it; its scheduler gave no answer ({entry.reason}). "
        "To ask it: headway reconcile",
        "not_submitted": f"{entry.id} was about to be submitted, and its scheduler does not have it; to submit it, {again}.",
    }[verdict]
