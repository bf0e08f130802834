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

from tasks.compute.job import JobState, Journal
from tasks.compute.jobs_book import JobEntry, cluster_of, find_job, handle_of, job_of
from tasks.compute.retrying import close_failed
from tasks.compute.submission import newest
from tasks.compute.supervision import is_supervised

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


def reconcile(home: Path, journal: Journal, *, ask: bool = False) -> list[Reconciled]:
    """Settle what ended while nobody looked, and tell of the rest; never cancels, never submits.

    With `ask`, schedulers other than this machine are asked. A job that somebody supervises is not touched.
    """
    raise NotImplementedError
