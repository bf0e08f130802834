"""What a supervisor tells, and asks, while a job runs; and the events of a job that a person wants to hear of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "waiting",
    "submitted",
    "adopted",
    "queued",
    "starting",
    "running",
    "hung",
    "retrying",
    "excluded",
    "silent",
    "answers",
]
OUT_OF_THE_ORDINARY: tuple[Kind, ...] = ("adopted", "hung", "retrying", "excluded", "silent", "answers")


@dataclass(frozen=True)
class Event:
    """Something happened to a job."""

    kind: Kind
    """`waiting`: another process supervises it. `queued`, `starting`, `running`: as JobState. `hung`: it stands still and is
    ended. `retrying`: it failed, and is submitted again after a wait. `excluded`: machines are left out from now on. `silent`:
    the scheduler gives no answer; `answers`: it does again."""
    text: str
    """A sentence."""
    submission: int


@dataclass(frozen=True)
class Watch:
    """Callbacks of whoever has a job supervised; all are called in the caller's own thread."""

    metrics: Callable[[list[dict[str, Any]]], None] = lambda records: None
    progress: Callable[[dict[str, Any]], None] = lambda progress: None
    event: Callable[[Event], None] = lambda event: None
    cancelled: Callable[[], bool] = lambda: False
    """Asked at every look; True cancels the job."""
    stop_on_interrupt: Callable[[], bool] = lambda: True
    """Asked when the orchestrator is interrupted (Ctrl-C, SIGTERM): whether the job stops too."""
    flow_run: str = ""
    """Prefect's identity of the flow run, for those who find the job later."""
