"""Runs that wait for a person without a process: people are reminded, and the time to answer ends.

Such a run is Suspended in Prefect, and its folder holds what it asks (flows/support/approval.py). When somebody answers, Prefect
schedules it, and a worker takes it up. When nobody does in time, it is scheduled here, and ends itself with its reasons. One that
somebody cancelled or deleted meanwhile has no process to write that down: it is done here. Time in which no watch looked, for the
platform was down, does not count.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.states import AwaitingRetry
from pydantic import ValidationError

from deployments.services.flow_runs import at, claim
from deployments.watch.dead_runs import RESUME_SECONDS
from flows.support.approval import Question
from flows.support.pause import withdraw
from tasks.common import process
from tasks.orchestration.run_log import note_cancelled, read_question, read_run, suspended, write_question

LOOKED = "platform/watch/waiting.json"
NOTED_EVERY_SECONDS = 30.0
SETTLED_SECONDS = 60.0
"""A run that was cancelled for longer stays so."""
UNWATCHED_SECONDS = 120.0
"""A watch that starts anew is back sooner than this."""


class Waiting:
    """State: when somebody last looked, in a file and in memory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._looked = float((process.read_json(home / LOOKED) or {}).get("time", 0.0))
        self._noted = 0.0

    def tick(self, client: SyncPrefectClient, now: float) -> None:
        """Look at every run that waits so."""
        unwatched = now - self._looked if self._looked else 0.0
        if unwatched > UNWATCHED_SECONDS:
            for folder in suspended(self.home):
                # Nobody reminded of the question for so long, or could be sure to reach the platform.
                with suppress(ValidationError):
                    question = Question.model_validate(read_question(folder))
                    later = {"asked": question.asked + unwatched, "expires": question.expires + unwatched}
                    write_question(folder, question.model_copy(update=later).model_dump())
            self._note(now)
        for folder in suspended(self.home):
            try:
                state: State[Any] | None = client.read_flow_run(UUID(folder.name)).state
            except ObjectNotFound:
                state = None
            # One that crashed, or that a limit cancelled, is put back by dead_runs.py.
            patience = RESUME_SECONDS if state and state.is_crashed() else SETTLED_SECONDS
            if state is None or (state.is_final() and now - state.timestamp.timestamp() > patience):
                # Write down what nobody else can any more, and forget the question.
                if read_run(folder).status == "waiting":
                    how = f"ended the flow run ({state.name})" if state else "deleted the flow run"
                    note_cancelled(folder, f"somebody {how} in Prefect while it waited for an approval")
                withdraw(client, self.home, UUID(folder.name))
            elif state.is_paused() and state.state_details.pause_reschedule:
                self._look(client, folder, state, now)
        self._looked = now
        if abs(now - self._noted) >= NOTED_EVERY_SECONDS:
            self._note(now)

    def _note(self, now: float) -> None:
        self._looked = self._noted = now
        process.write_json(self.home / LOOKED, {"time": now})

    def _look(self, client: SyncPrefectClient, folder: Path, state: State[Any], now: float) -> None:
        """Remind, or end the time to answer. A question of another release, which cannot be read, is asked anew."""
        try:
            question = Question.model_validate(read_question(folder))
        except ValidationError:
            self._put_back(client, folder, state, now, "Its question is of another release: it asks again")
            return
        if now >= question.expires:
            self._put_back(
                client,
                folder,
                state,
                now,
                f"Nobody answered until {at(question.expires)}: it resumes, and its gate closes",
            )
        elif now >= question.reminded + question.remind_seconds:
            payload = {"id": str(uuid4()), "occurred": datetime.fromtimestamp(now, UTC).isoformat(), "related": []}
            client.request("POST", "/events", json=[{**payload, **question.reminder()}]).raise_for_status()
            write_question(folder, question.model_copy(update={"reminded": now}).model_dump())

    def _put_back(self, client: SyncPrefectClient, folder: Path, state: State[Any], now: float, text: str) -> None:
        if state.id and claim(client, UUID(folder.name), state.id, now):
            client.set_flow_run_state(UUID(folder.name), AwaitingRetry(message=text))
