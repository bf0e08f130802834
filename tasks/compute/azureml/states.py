"""What Azure ML says of a job, as ours: its states, and the classes of its errors. Pure.

The states are those of the service's JobStatus; the codes are read in the run history. An image that is built and nodes that
boot are no hang: they are `starting`, with the service's word as the reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tasks.azure.arm_client import QUOTA
from tasks.compute.job import Failure, JobState
from tasks.compute.nodes import ended_state

QUEUED = ("NotStarted", "Queued")
STARTING = ("Starting", "Provisioning", "Preparing")
RUNNING = ("Running", "Finalizing", "CancelRequested", "Paused", "NotResponding")
"""NotResponding: the service's own agent is silent; the job may well run, and its marks and heartbeats tell."""
OVER = ("Completed", "Failed", "Canceled")

CAUSES: tuple[tuple[re.Pattern[str], Failure, str], ...] = (
    (re.compile(r"preempt|evict|low.?priority.*(lost|taken|unavailable)", re.I), "preempted", ""),
    (QUOTA, "missing", "Ask for quota in the studio, or set azureml.compute to a cluster of another size or tier."),
    (
        re.compile(r"(image|manifest).*(not.?found|unknown|pull)|ImagePull|pull.*image", re.I),
        "user",
        "Look at cluster.image.",
    ),
    (re.compile(r"ImageBuild|environment.*(build|fail)|build.*image", re.I), "user", "Look at azureml.environment."),
    (re.compile(r"(time.?out|exceeded.*(duration|time)|MaxRunDuration)", re.I), "timeout", ""),
    (re.compile(r"OutOfMemory|out of memory|OOMKill|exit code 137", re.I), "out_of_memory", ""),
    (re.compile(r"node.*(unhealthy|unusable|lost|failed)|NodeFailure|DiskFull", re.I), "node", ""),
)
"""Read from the first on: pattern in the service's codes and messages, class, remedy."""


def state_of(found: dict[str, Any] | None, why: dict[str, Any], folder: Path) -> JobState:
    """A job's state: what the service says of it, and how its leader said that it ended. `folder` is up to date.

    `found` None: an administrator deleted it. `why` is the run history's error of one that failed.
    """
    if found is None:
        return JobState(state="lost", reason="Azure ML has no job of this name any more: somebody deleted it")
    status = str(found["properties"].get("status") or "Unknown")
    if status in QUEUED:
        return JobState(state="queued", reason=status)
    if status in STARTING:
        return JobState(state="starting", reason=status)
    if status in RUNNING:
        return JobState(state="running", reason="" if status == "Running" else status)
    if status not in OVER:
        return JobState(state="unknown", reason=f"Azure ML says {status}")
    return _ended(status, found, why, folder)


def _ended(status: str, found: dict[str, Any], why: dict[str, Any], folder: Path) -> JobState:
    marked = ended_state(folder)
    attempts = marked.attempts if marked else 1
    if status == "Completed":
        return marked or JobState(state="ended", code=0, reason="ended")
    if status == "Canceled":
        return JobState(state="ended", code=1, reason="cancelled", attempts=attempts, failure="cancelled")
    said = words(why)
    cause, remedy = cause_of(said)
    if marked and cause not in ("preempted", "node", "missing"):
        return marked if marked.code else JobState(state="ended", code=1, reason=said or status, attempts=attempts)
    reason = " ".join(part for part in (said or "Azure ML says Failed, and not why", remedy) if part)
    return JobState(state="ended", code=1, reason=reason, attempts=attempts, failure=cause, failed_nodes=())


def cause_of(said: str) -> tuple[Failure, str]:
    """The class of what the service said, and what a person can do."""
    for pattern, cause, remedy in CAUSES:
        if pattern.search(said):
            return cause, remedy
    return "infrastructure", ""


def words(why: dict[str, Any]) -> str:
    """All codes of an error, from the outermost to the innermost, and its message."""
    codes, inner = [], why
    while inner:
        codes.append(str(inner.get("code") or ""))
        inner = inner.get("innerError") or inner.get("inner_error") or {}
    said = [*dict.fromkeys(filter(None, codes))]
    message = str(why.get("message") or "").strip()
    return ": ".join(part for part in ("/".join(said), message) if part)[:600]
