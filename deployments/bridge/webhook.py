"""The HTTP bridge as a server: it listens in a thread of the bridge's process, with limits on what a client may make it wait for.

What a request is answered, and the server. The whole way of an event is in docs/webhook.md. Starting the bridge's process does
not live here.

Between the answer and the work: events that the webhook took, and that storage is asked about afterwards.

An event about a blob is kept in the table `waiting` of the ledger's database, in the transaction that its 2xx stands for, and
stays there until storage said what the blob is now. Then it leaves the table in the transaction that makes it an event of the
ledger. So a kill at any moment loses nothing and takes nothing twice; while storage is away, events wait. Events of our own
senders need no storage, and are in the ledger when the answer goes out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import uvicorn
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deployments.bridge.blobs import WORKERS, allowed
from deployments.bridge.messages import BLOB_CREATED, VALIDATION, NotAllowed, Told, cloud_event, read_events, to_event
from deployments.bridge.senders import Notes, NotTaken, Senders, Signature, Unable, remember, unset
from deployments.configuration.events import EventsConfig, WebhookConfig
from deployments.services.checks import choose_port
from tasks.common import http_server, process
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


PATH = "/events"
METHODS = {PATH: ("OPTIONS", "POST"), "/healthz": ("GET", "HEAD")}
MEDIA_TYPES = ("application/json", "application/cloudevents+json", "application/cloudevents-batch+json")
ATTRIBUTES = ("specversion", "id", "source", "type", "subject", "time")
"""Of CloudEvents: in binary mode each is a header `ce-NAME`, and the body is the data."""
BODY_SECONDS = 10.0
"""In which a body arrives."""
ANSWER_SECONDS = 10.0
"""After which the answer is 503, and nothing was taken. Event Grid waits 30 s."""
LINGER_BYTES = 8 << 20
"""Of a body that is too large, so much is read and thrown away: a sender that still sends does not hear an answer."""
THREADS = 16
QUIET = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class Answers:
    """The ASGI application: two paths, and no page. docs/webhook.md has every status.

    A request is measured, then proven, then read (messages.py), then compared with what is allowed and written to disk
    (`Intake`), and answered; storage is asked afterwards. An answer of 2xx is a promise: what it says was taken is on disk.
    Event Grid drops an event at 400, 401, 403 and 413, so what is our own fault is always 503.
    """

    def __init__(self, config: EventsConfig, intake: Intake, notes: Notes) -> None:
        assert config.webhook
        self._config = config.webhook
        self._intake = intake
        self._notes = notes
        self._senders = Senders(config.webhook)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="webhook")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(Request(scope, receive))
        answer.headers.update(QUIET)
        await answer(scope, receive, send)

    def close(self) -> None:
        """Wait for what is under way."""
        self._pool.shutdown()

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        if path not in METHODS:
            return _error(404, "there is nothing here")
        if request.method not in METHODS[path]:
            methods = ", ".join(METHODS[path])
            return _error(405, f"the methods are {methods}", Allow=methods)
        if path != PATH:
            return JSONResponse({"status": "up"})
        try:
            if request.method == "OPTIONS":
                return Response(headers=permission(request.headers, self._config))
            body = await _body(request, self._config.max_bytes)
            # The rest is done in a thread: it waits for disks, and sometimes for an authority.
            deadline = time.monotonic() + ANSWER_SECONDS
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._pool, self._take, request.headers, body, deadline)
            try:
                return await asyncio.wait_for(work, ANSWER_SECONDS)
            except TimeoutError as error:
                raise Unable(f"nothing came of a request within {ANSWER_SECONDS:g} s") from error
            except (sqlite3.Error, OSError) as error:
                raise Unable(f"the ledger cannot be written: {error}") from error
        except NotTaken as error:
            self._notes.refused(str(error), source=request.client.host if request.client else "")
            challenge = {"WWW-Authenticate": self._senders.challenge} if error.status == 401 else {}
            return _error(error.status, str(error), **challenge)
        except Unable as error:
            self._notes.trouble(f"answered 503: {error}")
            again = {"Retry-After": str(error.retry_after)}
            return _error(503, "this cannot be checked or kept now: send it again later", **again)
        except ClientDisconnect:
            return Response(status_code=400)

    def _take(self, headers: Headers, body: bytes, deadline: float) -> Response:
        signature = self._senders.check(headers, body)
        if signature and _binary_mode(headers):
            raise NotTaken(400, "a signed event is sent in structured mode: a signature covers no headers")
        events = _events(headers, body)
        if code := code_of(events, self._config):
            return JSONResponse({"validationResponse": code})
        if not any(listed(one.source, self._config) for one in events):
            raise NotTaken(403, f"the topic {events[0].source[:200]!r} is not listed")
        return JSONResponse(self._intake.take(events, signature, deadline=deadline)._asdict(), 202)


async def _body(request: Request, most: int) -> bytes:
    """The body. Raises NotTaken: 413 when it is too large, however it comes, and 408 when it does not come in time."""
    kept, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    kept += part
                elif size > most + LINGER_BYTES:
                    break
    except TimeoutError as error:
        raise NotTaken(408, f"the body did not come within {BODY_SECONDS:g} s") from error
    if size > most:
        raise NotTaken(413, f"the body has more than {most} bytes")
    return bytes(kept)


def _events(headers: Headers, body: bytes) -> list[Told]:
    """What a body tells, in any of the forms. Raises NotTaken: 415 for another media type, 400 for what cannot be read."""
    binary = _binary_mode(headers)
    media, _, parameters = headers.get("content-type", "").partition(";")
    encoding = headers.get("content-encoding", "identity"), parameters.replace(" ", "").replace('"', "").lower()
    if encoding not in (("identity", ""), ("identity", "charset=utf-8")):
        raise NotTaken(415, "a body is plain UTF-8")
    if media.strip().lower() not in (MEDIA_TYPES[:1] if binary else MEDIA_TYPES) and (body or not binary):
        raise NotTaken(415, f"a body is one of {', '.join(MEDIA_TYPES)}, not {media[:100]!r}")
    try:
        if not binary:
            return read_events(body)
        attributes = {
            name: unquote(headers[f"ce-{name}"], errors="strict") for name in ATTRIBUTES if f"ce-{name}" in headers
        }
        return [cloud_event({**attributes, "data": from_json(body, allow_inf_nan=False) if body else None})]
    except ValueError as error:
        raise NotTaken(400, f"the body cannot be read: {str(error)[:200]}") from error


def _binary_mode(headers: Headers) -> bool:
    return "ce-specversion" in headers


def _error(status: int, text: str, **headers: str) -> Response:
    return JSONResponse({"error": text}, status, headers)


READ_SECONDS = 10.0
"""In which the head of a request arrives, and again its body."""
CONNECTIONS = 128
"""Beyond, a request is answered 503; beyond twice as many, a connection is closed at once."""
GRACE_SECONDS = 5


class Webhook:
    """A listening bridge. State: its server's thread, and what stands behind it."""

    def __init__(self, noted: Path, listener: socket.socket, config: EventsConfig, ledger: Ledger) -> None:
        assert config.webhook
        self._config, self._noted = config.webhook, noted
        self._port = int(listener.getsockname()[1])
        host = f"[{config.webhook.host}]" if ":" in config.webhook.host else config.webhook.host
        self.url = f"http://{host}:{self._port}{PATH}"
        self._notes = Notes(ledger)
        self._intake = Intake(config, ledger, self._notes)
        self._answers = Answers(config, self._intake, self._notes)
        self._server = _server(self._answers, self._notes)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="webhook", daemon=True)
        process.write_json(noted, {"url": self.url, "port": self._port, "since": time.time()})
        self._intake.start()
        self._thread.start()

    def problems(self) -> dict[str, str]:
        """What keeps senders from being believed, by setting."""
        return unset(self._config)

    def stop(self) -> None:
        """Answer what is under way, and end; the port is kept for the next time."""
        self._server.should_exit = True
        self._thread.join()
        self._answers.close()
        self._intake.stop()
        self._notes.close()
        process.write_json(self._noted, {"port": self._port})


def start(home: Path, config: EventsConfig, ledger: Ledger) -> Webhook | None:
    """Listen, when the settings have a webhook; its address is in events/webhook.json too. Raises ValueError for a taken port."""
    if config.webhook is None:
        return None
    noted = process.private_folder(home / "events") / "webhook.json"
    host, port = config.webhook.host, (process.read_json(noted) or {}).get("port")
    port = choose_port(config.webhook.port, port)
    try:
        listener = http_server.listen(host, port, backlog=CONNECTIONS)
    except OSError as error:
        raise ValueError(f"webhook: {host}:{port} cannot be listened on: {error}") from error
    try:
        return Webhook(noted, listener, config, ledger)
    except OSError:  # the disk is full: the next turn needs the port
        listener.close()
        raise


def _server(answers: Answers, notes: Notes) -> uvicorn.Server:
    """No proxy's headers are believed, nothing is logged of a request, and nobody is told what answers."""

    async def settle() -> None:
        notes.settle()

    return uvicorn.Server(
        uvicorn.Config(
            answers,
            http=http_server.impatient(read_seconds=READ_SECONDS, connections=CONNECTIONS),
            ws="none",
            lifespan="off",
            loop="asyncio",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            callback_notify=settle,
        )
    )
