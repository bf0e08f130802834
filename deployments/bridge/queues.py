"""Storage Queues that Event Grid delivers to: messages are read, become events in the ledger, and only then are deleted.

So a kill at any point loses nothing: a message that was not deleted is delivered again, and the ledger knows it. What cannot be
read is set aside after some deliveries; what is refused is noted and deleted; what cannot be looked at because storage is away
stays in the queue. What an event means is messages.py.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from pathlib import Path
from typing import NamedTuple

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.queue import QueueMessage

from deployments.bridge.blobs import WORKERS, Places, list_many, queue_of
from deployments.bridge.messages import BLOB_CREATED, NotAllowed, Told, read_events, to_event
from deployments.configuration.events import EventsConfig, QueueConfig
from tasks.common.errors import HeadwayError, Missing
from tasks.common.redaction import redact
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.storage.blob import faults
from tasks.storage.blob.client import in_order

AT_ONCE = 32
"""Messages of one request; the service gives no more."""
ROUND = 8 * AT_ONCE
"""Messages that are taken in by one transaction."""
MOST_SECONDS = 10.0
"""Longest time that one turn goes on reading a queue that is not empty."""
LONGEST_WAIT_SECONDS = 60.0
log = logging.getLogger("headway.queue")


class _Read(NamedTuple):
    """A message, and what it came to."""

    message: QueueMessage
    events: list[Event]
    refused: list[tuple[Told, str]]
    unreadable: str = ""
    away: HeadwayError | None = None
    """Storage did not answer: the message stays in the queue."""


class _Pace:
    """When a queue is looked at again. State: what went wrong last, and how often in a row."""

    def __init__(self) -> None:
        self.due, self.failures, self.said = 0.0, 0, ""

    def well(self, now: float, wait: float) -> None:
        if self.failures:
            log.info("the queue answers again")
        self.due, self.failures, self.said = now + wait, 0, ""

    def wrong(self, now: float, error: HeadwayError) -> None:
        """Say so once; wait twice as long each time."""
        if self.said != error.message:
            log.warning("%s. %s It is tried again; nothing is lost.", error.message, error.remedy)
        self.said, self.failures = error.message, self.failures + 1
        self.due = now + min(LONGEST_WAIT_SECONDS, 2.0 ** min(self.failures - 1, 10))


class Queues:
    """All queues of a configuration. State: when each is looked at again."""

    def __init__(self, home: Path, config: EventsConfig, ledger: Ledger) -> None:
        self.config, self.ledger = config, ledger
        self._pace = {queue: _Pace() for queue in config.queues}

    def problems(self) -> dict[str, str]:
        """Queues that did not answer last time, and why."""
        return {f"queue {queue.url}": pace.said for queue, pace in self._pace.items() if pace.said}

    def tick(self, now: float) -> None:
        """Take in what the queues hold. A queue that does not answer is told in the log once, and keeps none of the others."""
        for queue, pace in self._pace.items():
            if now < pace.due and pace.due - now <= LONGEST_WAIT_SECONDS:
                continue
            began = time.monotonic()
            try:
                client = queue_of(queue)
                while True:
                    with faults.told(queue.url, queue.credential):
                        received = client.receive_messages(
                            messages_per_page=AT_ONCE, max_messages=ROUND, visibility_timeout=queue.visibility_seconds
                        )
                        messages = list(received)
                    if messages:
                        self._take(queue, messages)
                    if len(messages) < AT_ONCE or time.monotonic() - began > MOST_SECONDS:
                        break
            except HeadwayError as error:
                pace.wrong(now, error)
            else:
                pace.well(now, queue.poll_seconds)

    def _take(self, queue: QueueConfig, messages: list[QueueMessage]) -> None:
        """One transaction for all events, then the notes, then the messages are deleted. Raises Missing."""
        read = _Reading(self.config).all(messages)
        self.ledger.receive_all([event for one in read for event in one.events])
        done: list[QueueMessage] = []
        away = next((one.away for one in read if one.away), None)
        for one in read:
            try:
                if not one.away and self._settled(queue, one):
                    done.append(one.message)
            except HeadwayError as error:  # it cannot be set aside; the others are done all the same
                away = away or error

        def delete(message: QueueMessage) -> None:
            """Delete a message; one that was delivered anew meanwhile is another's."""
            with faults.told(queue.url, queue.credential):
                try:
                    queue_of(queue).delete_message(message)
                except ResourceNotFoundError as error:
                    if faults.code_of(error) == "QueueNotFound":
                        raise

        for _ in in_order(delete, done, workers=WORKERS, ahead=4 * WORKERS):
            pass
        if away:
            raise away

    def _settled(self, queue: QueueConfig, read: _Read) -> bool:
        """Note what is not taken in; False for a message that is to be delivered again."""
        if not read.unreadable:
            for entry, why in read.refused:
                self._note(read.message, why, entry.source, entry.identity, entry.subject)
            return True
        if _deliveries(read.message) < queue.max_deliveries:
            return False
        why = f"message {read.message.id} was not to be read {queue.max_deliveries} times: {read.unreadable}"
        self._note(read.message, why, queue.url, read.message.id, "", poison=True)
        name = f"{queue.url.rpartition('/')[2]}-poison"
        log.warning("%s: %s. It is set aside in %s", queue.url, why, name)
        aside = queue_of(queue, name)
        with faults.told(f"{queue.url}-poison", queue.credential):
            try:
                aside.send_message(read.message.content)
            except ResourceNotFoundError:
                aside.create_queue()
                aside.send_message(read.message.content)
        return True

    def _note(
        self, message: QueueMessage, why: str, source: str, identity: str, about: str, *, poison: bool = False
    ) -> None:
        """Note something that was not taken in; once, also when its message could not be deleted afterwards."""
        if _deliveries(message) > 1:
            query = (
                "SELECT 1 FROM events WHERE status IN ('refused', 'poison') AND channel = 'queue'"
                " AND source = ? AND identity = ?"
            )
            with self.ledger.snapshot() as db:
                if db.execute(query, (source, identity)).fetchone() is not None:
                    return
        self.ledger.refuse("queue", redact(why), source=source, identity=identity, about=about, poison=poison)


class _Reading:
    """What the messages of one round come to. State: storage that did not answer is not asked again in this round."""

    def __init__(self, config: EventsConfig) -> None:
        self.config = config
        self.listed: Places = {}
        self.away: HeadwayError | None = None

    def all(self, messages: list[QueueMessage]) -> list[_Read]:
        parsed: list[tuple[QueueMessage, list[Told] | str]] = []
        for message in messages:
            try:
                parsed.append((message, read_events(_body(str(message.content)))))
            except ValueError as error:
                parsed.append((message, " ".join(str(error).split())[:300]))
        entries = [entry for _, value in parsed if not isinstance(value, str) for entry in value]
        try:
            self.listed = list_many((entry.url for entry in entries if entry.type == BLOB_CREATED), self.config)
        except Missing as away:
            self.away = away
        return list(in_order(self._read, parsed, workers=WORKERS, ahead=4 * WORKERS))

    def _read(self, parsed: tuple[QueueMessage, list[Told] | str]) -> _Read:
        message, entries = parsed
        if isinstance(entries, str):
            return _Read(message, [], [], unreadable=entries)
        read = _Read(message, [], [])
        for entry in entries:
            try:
                if self.away and entry.type == BLOB_CREATED:
                    raise self.away
                read.events.append(to_event(entry, self.config, "queue", self.listed))
            except NotAllowed as error:
                read.refused.append((entry, str(error)))
            except HeadwayError as error:
                self.away = self.away or error
                return _Read(message, [], [], away=error)
        return read


def _body(text: str) -> bytes:
    """JSON, as it is or in base64: Event Grid writes either, as its subscription says. Raises ValueError."""
    text = text.strip("\ufeff \t\r\n")
    if text.startswith(("{", "[")):
        return text.encode()
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is neither JSON nor base64") from None


def _deliveries(message: QueueMessage) -> int:
    return message.dequeue_count or 1
