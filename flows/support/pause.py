"""The mechanics of a pause with a form: shown in Prefect's page, answered there or by `headway approve`, read once and deleted.

A run of a deployment is suspended: its process ends, and a worker takes the run up again when somebody has answered. Any other
run, as one of the command line, has only its process, which waits. What is asked, and who may answer, is
flows/support/approval.py. See docs/approval.md, "What Prefect keeps".
"""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.exceptions import Pause as Stop
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key
from prefect.runtime import deployment
from prefect.runtime import flow_run as runtime
from prefect.states import Paused, Suspended
from pydantic import Field, SecretStr

from tasks.common.errors import Cancelled
from tasks.common.errors import Suspended as Waits
from tasks.orchestration.prefect_artifacts import Away, ask, hand_in, log
from tasks.orchestration.run_log import drop_question

AWAY_SECONDS = 2.0
"""Between two tries to reach Prefect's server."""
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
    question: str = Field(
        title="Question", description="What is answered. An answer to an earlier question is refused."
    )


class NeverAnswered(Exception):
    """The time to answer is over, or Prefect ended the flow run while it was paused: it does so when that time is over."""


class Pause:
    """One question of the running flow. An answer must name its `key`, which no other question of the run has."""

    def __init__(self, kind: str, key: str, home: Path) -> None:
        self.flow_run = UUID(str(runtime.get_id()))
        self.home, self._key, self._name = home, key, f"{kind}-{key}"
        self._suspends = bool(deployment.get_id())

    def turn(self, text: str, expires: float) -> Form | None:
        """Look once: take the answer, or show the form. None while there is none.

        Raises Cancelled; NeverAnswered after `expires`; tasks.common.errors.Suspended where the run is to wait without a process.
        """

        def read(client: Any) -> State[Any] | None:
            with suppress(ObjectNotFound):
                state: State[Any] = client.read_flow_run(self.flow_run).state
                return state
            return None

        try:
            state = ask(read)
            if state is None:
                raise Cancelled("somebody deleted the flow run in Prefect while it waited for an approval")
            if state.is_cancelling() or state.is_cancelled():
                raise Cancelled("the flow run was cancelled while it waited for an approval")
            if state.is_final():
                raise NeverAnswered(state.message or state.name)
            if state.is_paused():
                return None
            answer = self._take()
            if answer is not None:
                return answer
            if time.time() >= expires:
                raise NeverAnswered("nobody answered in time")
            if self._suspends:
                raise Waits(partial(self._suspend, text))
            until = datetime.fromtimestamp(expires + MARGIN_SECONDS, UTC)
            self._show(text, Paused(pause_expiration_time=until))
            return None
        except Away:
            return None

    def answer(self) -> Form | None:
        """An answer that came while the run had no process. While Prefect is away, it waits for that: it may be a rejection."""
        while True:
            try:
                return self._take()
            except Away as away:
                if away.refused:
                    return None
                time.sleep(AWAY_SECONDS)

    def _suspend(self, text: str) -> NoReturn:
        """Show the form, and end the process: the watch ends the time to answer. Raises Prefect's Pause, or Cancelled."""
        while True:
            try:
                shown = self._show(text, Suspended())
            except Away as away:
                if away.refused:
                    raise Cancelled("somebody deleted the flow run in Prefect when it was to wait") from away
                time.sleep(AWAY_SECONDS)
                continue
            if shown.status == SetStateStatus.ACCEPT:
                raise Stop(state=shown.state)
            raise Cancelled(f"the flow run does not wait for an approval: Prefect refused, {shown.details.reason}")

    def _show(self, text: str, state: State[Any]) -> Any:
        """The form is there before the run is paused: a paused run without a form could never be resumed. Raises Away."""
        import orjson

        number = len(self._inputs("-schema"))
        keys = keyset_from_base_key(f"paused-{self._name}-{number}")
        schema = Form.model_json_schema()
        schema["properties"]["question"] |= {"enum": [self._key], "default": self._key}
        payload = {keys["schema"]: schema, keys["description"]: text}
        for key, value in payload.items():
            text_of = orjson.dumps(value).decode()
            try:
                ask(partial(_add, self.flow_run, key, text_of))
            except Away as away:
                if not away.refused:  # it is there already: this was tried before
                    raise
        state.state_details.pause_key, state.state_details.run_input_keyset = f"{self._name}-{number}", keys
        return ask(lambda client: client.set_flow_run_state(self.flow_run, state))

    def _take(self) -> Form | None:
        """The newest answer, if there is one; it may have come while no process of this run lived. All answers are deleted.

        A rejection goes before any other: whoever has Prefect's login can add answers, and must not hide it behind one.
        """
        result = self._inputs("-response")
        if not result:
            return None
        hand_in(*(partial(_forget, self.flow_run, one.key) for one in result))
        empty_write_ahead_log(self.home / "prefect" / "prefect.db")
        answers: list[Form] = []
        for one in sorted(result, key=lambda one: int(one.key.split("-")[-2])):
            with suppress(ValueError):  # an answer to another version of the form, or no answer at all
                answers.append(Form.model_validate(one.decoded_value))
        mine = [answer for answer in answers if answer.question == self._key]
        return next((answer for answer in mine if answer.decision == "reject"), mine[-1] if mine else None)

    def _inputs(self, suffix: str) -> list[Any]:
        return ask(lambda client: _inputs(client, self.flow_run, f"paused-{self._name}-", suffix))


def withdraw(client: Any, home: Path, flow_run: UUID) -> None:
    """Forget what a flow run asked when it was suspended, and every answer that it has not taken."""
    for one in _inputs(client, flow_run, "paused-", "-response"):
        _forget(flow_run, one.key, client)
    empty_write_ahead_log(home / "prefect" / "prefect.db")
    drop_question(home / "runs" / str(flow_run))


def _add(flow_run: UUID, key: str, value: str, client: Any) -> None:
    client.create_flow_run_input(flow_run, key=key, value=value)


def _forget(flow_run: UUID, key: str, client: Any) -> None:
    client.delete_flow_run_input(flow_run, key)


def _inputs(client: Any, flow_run: UUID, prefix: str, suffix: str) -> list[Any]:
    result = client.filter_flow_run_input(flow_run, key_prefix=prefix, limit=200, exclude_keys=set())
    return [one for one in result if re.fullmatch(rf".*-\d{{1,9}}{suffix}", one.key)]


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
