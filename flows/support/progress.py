"""Shows in Prefect's page how far a stage is: one progress artifact a stage that lasts, moved every two seconds at most.

An observer (tasks/orchestration/observers.py) that every flow hands to its lifecycle. Prefect's server may be away: then the bar
stands still.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from prefect.logging import get_run_logger

from tasks.common.redaction import redact
from tasks.compute.polling import OUT_OF_THE_ORDINARY
from tasks.orchestration.observers import Outcome, Unobserved
from tasks.orchestration.prefect_artifacts import Away, Request, ask, hand_in, new_artifact

FIRST_AFTER_SECONDS = 2.0
EVERY_SECONDS = 2.0


class PrefectProgress(Unobserved):
    """State: the bar of the running stage, when it was last moved, and how far."""

    def __init__(self) -> None:
        self._artifact: Any = None
        self._told = 0.0
        self._percent = 0.0

    def started(self, stage: str, estimate: float | None) -> None:
        self._artifact, self._percent = None, 0.0
        self._told = time.monotonic() + FIRST_AFTER_SECONDS - EVERY_SECONDS

    def progress(self, stage: str, done: float, total: float, text: str, seconds_left: float | None) -> None:
        if time.monotonic() - self._told < EVERY_SECONDS:
            return
        self._percent = min(100.0 * done / total, 100.0) if total else self._percent
        left = "" if seconds_left is None else f"about {seconds_left:.0f} s left"
        message = ", ".join(part for part in (stage, text, left) if part)
        try:
            if self._artifact is None:
                self._artifact = ask(new_artifact("progress", f"progress-{stage}", self._percent, message)).id
            else:
                ask(_moved(self._artifact, self._percent, message))
        except Away:
            pass  # the next move tells more than this one
        self._told = time.monotonic()

    def happened(self, stage: str, kind: str, text: str) -> None:
        """In the logs of the page, and beside the bar."""
        get_run_logger().log(logging.WARNING if kind in OUT_OF_THE_ORDINARY else logging.INFO, redact(text))
        if kind != "running":
            self.progress(stage, 0, 0, text, None)

    def ended(self, outcome: Outcome) -> None:
        if self._artifact is None:
            return
        whole = outcome.status in ("ran", "reused")
        text = f"{outcome.name}: {outcome.status.replace('_', ' ')}, {outcome.seconds:.0f} s"
        hand_in(_moved(self._artifact, 100.0 if whole else self._percent, text))
        self._artifact = None


def _moved(artifact: Any, percent: float, text: str) -> Request:
    from prefect.client.schemas.actions import ArtifactUpdate

    wanted = ArtifactUpdate(data=percent, description=redact(text))
    return lambda client: client.update_artifact(artifact, wanted)
