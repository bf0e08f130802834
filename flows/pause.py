"""The mechanics of a pause with a form: shown in Prefect's page, answered there or by `headway approve`, read once and deleted.

What is asked, and who may answer, is flows/approval.py. See docs/approval.md, "What Prefect keeps".
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.exceptions import ObjectNotFound
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key
from prefect.runtime import flow_run as runtime
from prefect.states import Paused, Running
from pydantic import Field, SecretStr, ValidationError

from tasks.errors import Cancelled
from tasks.prefect_notes import Away, Request, ask, hand_in, log

MARGIN_SECONDS = 120.0
"""Time that Prefect waits longer than we do: we end a run that nobody approved, with its reasons, and Prefect only a dead one."""


class Form(RunInput):  # type: ignore[misc]
    """Approve or reject."""

    decision: Literal["approve", "reject"] = Field(title="Decision", description="What shall be done.")
    reason: str = Field(min_length=1, title="Reason", description="Why. It goes into the audit log.")
    person: str = Field(min_length=1, title="Your name", description="As in the role policy, where there is one.")
    token: SecretStr = Field(
        SecretStr(""), title="Your personal token", description="Empty where there is no role policy. It is not kept."
    )


class NeverAnswered(Exception):
    """The flow run was ended from outside while it was paused: Prefect does so when the time of a pause is over."""


class Pause:
    """One question of the running flow. State: the lease on a slot of its deployment, kept while the run is paused."""

    def __init__(self, name: str, home: Path) -> None:
        self.flow_run = UUID(str(runtime.get_id()))
        self.home, self._name = home, name
        self._lease: UUID | None = None

    def turn(self, text: str, expires: float) -> Form | None:
        """Look once: show the form, or take the answer. None while there is none. Raises Cancelled, NeverAnswered."""
        try:
            return self._turn(text, expires)
        except Away:
            return None

    def leave(self) -> None:
        """Name the lease again that was kept from Prefect, so that the end of the run frees it."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        details = {"deployment_concurrency_lease_id": lease}
        try:
            state = self._state()
            if state and (state.is_paused() or state.is_running()):
                ask(lambda c: c.set_flow_run_state(self.flow_run, Running(state_details=details), force=True))
            else:
                ask(lambda client: client.release_concurrency_slots_with_lease(lease))
        except Away:
            pass  # nobody renews the lease once this process has ended; it runs out after five minutes

    def _turn(self, text: str, expires: float) -> Form | None:
        state = self._state()
        if state is None:
            raise Cancelled("somebody deleted the flow run in Prefect while it waited for an approval")
        if state.is_cancelling() or state.is_cancelled():
            raise Cancelled("the flow run was cancelled while it waited for an approval")
        if state.is_final():
            raise NeverAnswered(state.message or state.name)
        if state.is_paused():
            return None
        answer = self._take()
        if answer is None:
            self._keep_lease(state)
            self._show(text, expires)
        return answer

    def _state(self) -> State[Any] | None:
        """The flow run's state; None when there is no such run any more. Raises Away."""

        def read(client: Any) -> State[Any] | None:
            try:
                found: State[Any] = client.read_flow_run(self.flow_run).state
            except ObjectNotFound:
                return None
            return found

        return ask(read)

    def _show(self, text: str, expires: float) -> None:
        """The form is there before the run is paused: a paused run without a form could never be resumed."""
        number = len(self._inputs("-schema"))
        keys = keyset_from_base_key(f"paused-{self._name}-{number}")
        form = Form.with_initial_data(description=text)
        told = {keys["schema"]: form.model_json_schema(), keys["description"]: text}
        for key, value in told.items():
            self._write(key, value)
        until = datetime.fromtimestamp(expires + MARGIN_SECONDS, UTC)
        state = Paused(pause_expiration_time=until, pause_key=f"{self._name}-{number}")
        state.state_details.run_input_keyset = keys
        ask(lambda client: client.set_flow_run_state(self.flow_run, state))

    def _take(self) -> Form | None:
        """The newest answer, if there is one; it may have come while no process of this run lived. All answers are deleted."""
        found = self._inputs("-response")
        if not found:
            return None
        hand_in(*(self._deletion(one.key) for one in found))
        empty_write_ahead_log(self.home / "prefect" / "prefect.db")
        newest = max(found, key=lambda one: int(one.key.split("-")[-2]))
        try:
            answer: Form = Form.model_validate(newest.decoded_value)
        except ValidationError:  # an answer to another version of the form
            return None
        return answer

    def _deletion(self, key: str) -> Request:
        return lambda client: client.delete_flow_run_input(self.flow_run, key)

    def _inputs(self, suffix: str) -> list[Any]:
        prefix = f"paused-{self._name}-"
        found = ask(lambda c: c.filter_flow_run_input(self.flow_run, key_prefix=prefix, limit=200, exclude_keys=set()))
        return [one for one in found if one.key.endswith(suffix)]

    def _write(self, key: str, value: Any) -> None:
        import orjson

        text = orjson.dumps(value).decode()
        try:
            ask(lambda client: client.create_flow_run_input(self.flow_run, key=key, value=text))
        except Away as away:
            if not away.refused:  # it is there already: this was tried before
                raise

    def _keep_lease(self, state: Any) -> None:
        """Prefect ends a deployment's lease when a run pauses, and then crashes the run because it has none (3.8.8).

        The engine goes on renewing the lease every few minutes. So the state that Prefect pauses from does not name it; `leave`
        names it again. The slot is free meanwhile; a second run of the same flow and subject waits in its lifecycle.
        """
        lease = state.state_details.deployment_concurrency_lease_id
        if lease is not None:
            self._lease = lease
            ask(lambda client: client.set_flow_run_state(self.flow_run, Running(), force=True))


def empty_write_ahead_log(path: Path) -> None:
    """Have SQLite move its log into the database, and empty it: what was deleted lies in the log until then.

    SQLite overwrites deleted rows with zeros where it was built with SECURE_DELETE, as on Debian and Ubuntu.
    """
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(path, timeout=2.0)) as database:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        log.warning("the write-ahead log of %s was not emptied: %s", path, error)
