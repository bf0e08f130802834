"""Whether a job that failed is submitted again, without which machines, and when. The table is in failures.json.

The bound is `retry.attempts` submissions in a row without progress; progress is a new content of the file that `job.progress`
names, or a higher step in metrics.jsonl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.common.redaction import redact
from tasks.compute.failures import Failed, classify, rules
from tasks.compute.job import Job, JobState, Journal
from tasks.compute.submission import Generation, marker, settle


@dataclass(frozen=True)
class Decision:
    """What becomes of a job after a failed submission. Of one that is not submitted again only `why_not` counts."""

    again: bool
    why_not: str = ""
    wait: float = 0.0
    """Seconds."""
    excluded_nodes: tuple[str, ...] = ()
    smaller_batches: int = 0
    stuck: int = 0
    """Submissions in a row without progress."""

    def learned(self) -> dict[str, Any]:
        """What the next submission must know, as the journal keeps it."""
        return {
            "excluded_nodes": self.excluded_nodes,
            "smaller_batches": self.smaller_batches,
            "stuck": self.stuck,
        }


@dataclass(frozen=True)
class History:
    """What came before a failure."""

    stuck: int
    """Submissions in a row, up to the one before, without progress."""
    progressed: bool
    """Whether the submission that failed got further."""
    restarted: bool
    """Whether it was started on the same machines as often as the job allows."""
    one_machine: bool
    """Whether a further submission would get the very same machine."""


def decide(job: Job, failed: Failed, history: History) -> Decision:
    """Apply the table to one failure."""
    retry, table = job.retry, rules().classes[failed.failure]
    if retry is None:
        return Decision(False)
    stuck = 0 if history.progressed else history.stuck + 1
    smaller = job.smaller_batches + (failed.failure == "out_of_memory")
    refused = _refusal(job, failed, history, stuck)
    if refused is not None:
        return Decision(False, refused)
    added = failed.nodes if table.excludes_nodes else ()
    return Decision(
        again=True,
        wait=min(retry.back_off_seconds * 2 ** max(stuck - 1, 0), retry.max_back_off_seconds),
        excluded_nodes=tuple(dict.fromkeys([*job.excluded_nodes, *added])),
        smaller_batches=smaller,
        stuck=stuck,
    )


def _refusal(job: Job, failed: Failed, history: History, stuck: int) -> str | None:
    """Why a job is not submitted again; empty where its class says it all, None when it is."""
    assert job.retry is not None
    again = rules().classes[failed.failure].again
    if again == "never" or failed.final:
        return ""
    if again == "smaller_batch" and not job.retry.smaller_batch:
        return "It is tried again only with cluster.retry.smaller_batch."
    if again == "with_progress" and not history.progressed:
        return "It made no progress within the limit, and would make none in a further submission."
    if again == "elsewhere" and history.one_machine and history.restarted and not history.progressed:
        return "This machine has restarted it as often as it may, without progress."
    if stuck >= job.retry.attempts:
        return f"{stuck} submissions in a row made no progress."
    return None


def close_failed(
    generation: Generation,
    job: Job,
    state: JobState,
    folder: Path,
    journal: Journal,
    *,
    one_machine: bool,
    hung: str = "",
) -> tuple[Failed, Decision]:
    """Settle a submission that ended without a result: its class and what becomes of the job are written into its end."""
    failed = classify(job, state, folder, hung=hung)
    failed = replace(failed, what=redact(failed.what))
    before, now = generation.marker, marker(job, folder)
    history = History(
        stuck=generation.stuck,
        progressed=before.is_behind(now),
        restarted=state.state == "ended" and state.attempts - before.attempts > job.restarts,
        one_machine=one_machine,
    )
    decision = decide(job, failed, history)
    outcome = "cancelled" if failed.failure == "cancelled" else "failed"
    facts = {"failure": failed.failure, "message": failed.what, "nodes": failed.nodes}
    settle(job.token, journal, outcome, folder=folder, **facts, again=decision.learned() if decision.again else None)
    return failed, decision
