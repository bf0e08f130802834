"""Between the answer and the work: events that the webhook took, and that storage is asked about afterwards.

An event about a blob is kept in the table `waiting` of the ledger's database, in the transaction that its 2xx stands for, and
stays there until storage said what the blob is now. Then it leaves the table in the transaction that makes it an event of the
ledger. So a kill at any moment loses nothing and takes nothing twice; while storage is away, events wait. Events of our own
senders need no storage, and are in the ledger when the answer goes out.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from starlette.datastructures import Headers

from deployments.bridge.blobs import WORKERS, allowed
from deployments.bridge.messages import BLOB_CREATED, VALIDATION, NotAllowed, Told, to_event
from deployments.bridge.senders import Notes, NotTaken, Signature, Unable, remember
from deployments.configuration.events import EventsConfig, WebhookConfig
from tasks.common.errors import HeadwayError
from tasks.events.event import Event
from tasks.events.ledger import Ledger

CODE = re.compile(r"[\w.:-]{1,256}", re.ASCII)


def code_of(entries: Sequence[Told], config: WebhookConfig) -> str:
    """The code that Event Grid asks to have sent back before it delivers, when a validation was sent and nothing else; else
    nothing.

    It proves to Event Grid that we want events, and proves nothing to us. The address that it names beside the code
    (`validationUrl`) is never read, let alone opened:
    https://learn.microsoft.com/azure/event-grid/end-point-validation-event-grid-events-schema

    Raises NotTaken: 403 for a topic that is not listed, 400 for a validation without a code.
    """
    if len(entries) != 1 or entries[0].type != VALIDATION:
        return ""
    if not listed(entries[0].source, config):
        raise NotTaken(403, f"the topic {entries[0].source[:200]!r} is not listed, and may not subscribe")
    if not CODE.fullmatch(entries[0].handshake):
        raise NotTaken(400, "the validation event has no code to send back")
    return entries[0].handshake


def permission(headers: Headers, config: WebhookConfig) -> dict[str, str]:
    """The headers that let a sender of CloudEvents, which asks with HTTP OPTIONS, send here. Raises NotTaken (403) for one
    not listed.

    https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/http-webhook.md#4-abuse-protection; its
    `WebHook-Request-Callback` is not read.
    """
    origin = headers.get("webhook-request-origin", "").lower()
    if origin not in config.origins:
        raise NotTaken(403, f"CloudEvents are not taken from the origin {origin[:100]!r}")
    return {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}


def listed(topic: str, config: WebhookConfig) -> bool:
    """Whether a topic may send and subscribe. Azure does not tell upper from lower case in its names."""
    return not config.topics or topic.casefold() in {each.casefold() for each in config.topics}


TABLE = """CREATE TABLE IF NOT EXISTS waiting (number INTEGER PRIMARY KEY AUTOINCREMENT, received REAL NOT NULL,
    told TEXT NOT NULL, due REAL NOT NULL, tries INTEGER NOT NULL DEFAULT 0, why TEXT NOT NULL DEFAULT '')"""


MOST_WAITING = 100_000
"""Beyond, senders are told to come again: a day of Event Grid's without storage is less."""


AT_ONCE = 200


AGAIN_SECONDS = 5.0


LONGEST_SECONDS = 60.0
"""Time until storage is asked again about an event: doubled each time, up to the second."""


log = logging.getLogger("headway.webhook")


class Taken(NamedTuple):
    """What became of the events of one request: how many, and the numbers of those that are in the ledger."""

    accepted: int
    duplicate: int
    waiting: int
    refused: int
    numbers: list[int]


class _Row(NamedTuple):
    number: int
    told: Told
    tries: int


class Intake:
    """Takes events in for one webhook. State: a thread that asks storage about those that wait."""

    def __init__(self, config: EventsConfig, ledger: Ledger, notes: Notes) -> None:
        assert config.webhook
        self._config = config
        self._webhook = config.webhook
        self._ledger = ledger
        self._notes = notes
        self._writing = threading.Lock()
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook-intake", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is at; what waits is taken up by the next one."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def take(self, entries: Sequence[Told], signature: Signature | None, *, deadline: float) -> Taken:
        """Put events on disk, all in one transaction, and say what became of them.

        Raises NotTaken for a signature that was used before; Unable when too many wait, or when the transaction begins after
        `deadline` (of time.monotonic): its sender has been told to try again by then.
        """
        later, events, refused = self._sorted(entries)

        def first(db: sqlite3.Connection) -> None:
            if time.monotonic() > deadline:
                raise Unable("the ledger was busy for too long")
            if signature:
                remember(db, signature)
            if later:
                db.execute(TABLE)
                if db.execute("SELECT count(*) FROM waiting").fetchone()[0] + len(later) > MOST_WAITING:
                    raise Unable(f"{MOST_WAITING} events wait for storage already", retry_after=LONGEST_SECONDS)
                now = time.time()
                # Of what an event says of a blob, its address is all that is needed.
                rows = [(now, json.dumps(one._replace(data={"url": one.url})), now) for one in later]
                db.executemany("INSERT INTO waiting (received, told, due) VALUES (?, ?, ?)", rows)

        if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unable("the ledger was busy for too long")
        try:
            receipts = self._ledger.receive_all(events, first=first)
        finally:
            self._writing.release()
        for one, why in refused:
            self._notes.refused(why, source=one.source, identity=one.identity, about=one.subject)
        if later:
            self._wake.set()
        new = [receipt for receipt in receipts if receipt.status == "accepted"]
        numbers = [receipt.number for receipt in receipts]
        return Taken(len(new), len(receipts) - len(new), len(later), len(refused), numbers)

    def _sorted(self, entries: Iterable[Told]) -> tuple[list[Told], list[Event], list[tuple[Told, str]]]:
        """Those that storage is to be asked about, those that need none, and those that are not allowed."""
        later: list[Told] = []
        events: list[Event] = []
        refused: list[tuple[Told, str]] = []
        for one in entries:
            try:
                if not listed(one.source, self._webhook):
                    raise NotAllowed(f"the topic {one.source[:200]!r} is not listed")
                if one.type == BLOB_CREATED:
                    allowed(one.url, self._config)
                    later.append(one)
                else:
                    events.append(to_event(one, self._config, "webhook"))
            except ValueError as error:
                refused.append((one, str(error)))
        return later, events, refused

    def _run(self) -> None:
        """The thread's main: what waits must not be forgotten, whatever goes wrong."""
        while not self._stopping:
            try:
                pause = self._turn()
            except (sqlite3.Error, OSError) as error:
                self._notes.trouble(f"what waits cannot be looked at: {error}")
                pause = AGAIN_SECONDS
            except Exception:
                log.exception("what waits could not be looked at")
                pause = LONGEST_SECONDS
            self._wake.wait(pause)
            self._wake.clear()

    def _turn(self) -> float:
        """Ask storage about those whose time has come; returns seconds until there may be more to do."""
        with self._ledger.transaction() as db:
            db.execute(TABLE)
            due = "SELECT number, told, tries FROM waiting WHERE due <= ? ORDER BY number LIMIT ?"
            result = db.execute(due, (time.time(), AT_ONCE)).fetchall()
        rows = [_Row(row["number"], Told(*json.loads(row["told"])), row["tries"]) for row in result]
        if not rows:
            return AGAIN_SECONDS
        away: dict[str, str] = {}

        def look(payload: Told) -> Event | NotAllowed | str:
            """What an event is to us; why it is never anything; or why storage does not say, which then holds for its
            container."""
            try:
                container = allowed(payload.url, self._config)[0].url
                if container not in away:
                    return to_event(payload, self._config, "webhook")
            except NotAllowed as error:
                return error
            except (HeadwayError, ValueError) as error:  # storage is away, or our settings of it are wrong
                away[container] = str(error)
                self._notes.trouble(f"events wait for storage: {error}")
            return away[container]

        with ThreadPoolExecutor(WORKERS, thread_name_prefix="webhook-look") as pool:
            looked = list(zip(rows, pool.map(lambda row: look(row.told), rows), strict=True))
        events = {row.number: value for row, value in looked if isinstance(value, Event)}
        self._ledger.receive_all(list(events.values()), first=lambda db: _forget(db, events))
        for row, value in looked:
            if isinstance(value, NotAllowed):
                self._notes.refused(
                    str(value), source=row.told.source, identity=row.told.identity, about=row.told.subject
                )
        with self._ledger.transaction() as db:
            _forget(db, [row.number for row, value in looked if isinstance(value, NotAllowed)])
            for row, value in looked:
                if isinstance(value, str):
                    again = time.time() + min(LONGEST_SECONDS, AGAIN_SECONDS * 2.0 ** min(row.tries, 10))
                    db.execute(
                        "UPDATE waiting SET due = ?, tries = tries + 1, why = ? WHERE number = ?",
                        (again, value[:300], row.number),
                    )
        return 0.0


def _forget(db: sqlite3.Connection, numbers: Iterable[int]) -> None:
    db.executemany("DELETE FROM waiting WHERE number = ?", [(number,) for number in numbers])
