"""The HTTP bridge as a server: it listens in a thread of the bridge's process, with limits on what a client may make it wait for.

What a request is answered, and the server. The whole way of an event is in docs/webhook.md. Starting the bridge's process does
not live here.
"""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import uvicorn
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deployments.bridge.intake import Intake, code_of, listed, permission
from deployments.bridge.messages import Told, cloud_event, read_events
from deployments.bridge.senders import Notes, NotTaken, Senders, Unable, unset
from deployments.configuration.events import EventsConfig
from deployments.services.starting import choose_port
from tasks.common import http_server, process
from tasks.events.ledger import Ledger

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
