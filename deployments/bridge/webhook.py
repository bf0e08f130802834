"""The HTTP bridge as a server: it listens in a thread of the bridge's process, with limits on what a client may make it wait for.

What a request is answered is answers.py; the whole way of an event is in docs/webhook.md. Starting the bridge's process does not
live here.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from deployments.bridge.answers import PATH, Answers
from deployments.bridge.intake import Intake
from deployments.bridge.refusals import Notes
from deployments.event_settings import EventsConfig, WebhookConfig
from deployments.platform.checks import choose_port
from tasks import process
from tasks.events.ledger import Ledger

HEAD_SECONDS = 10.0
"""In which the head of a request arrives."""
CONNECTIONS = 128
"""Beyond, a request is answered 503; beyond twice as many, a connection is closed at once."""
GRACE_SECONDS = 5


class Webhook:
    """A listening bridge. State: its server's thread, and what stands behind it."""

    def __init__(self, noted: Path, listener: socket.socket, config: EventsConfig, ledger: Ledger) -> None:
        assert config.webhook
        self._noted = noted
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
    noted = home / "events" / "webhook.json"
    noted.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    listener = _listen(config.webhook, (process.read_json(noted) or {}).get("port"))
    try:
        return Webhook(noted, listener, config, ledger)
    except OSError:  # the disk is full: the next turn needs the port
        listener.close()
        raise


def _listen(config: WebhookConfig, last: int | None) -> socket.socket:
    port = choose_port(config.port, last)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise ValueError(f"webhook: {config.host}:{port} cannot be listened on: {error}") from error
    # asyncio sets it only where a socket names its protocol; without it, an answer waits 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _server(answers: Answers, notes: Notes) -> uvicorn.Server:
    """No proxy's headers are believed, nothing is logged of a request, and nobody is told what answers."""

    async def settle() -> None:
        notes.settle()

    return uvicorn.Server(
        uvicorn.Config(
            answers,
            http=_Impatient,
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


class _Impatient(H11Protocol):  # type: ignore[misc]
    """Closes a connection on which no request begins in time: uvicorn waits for ever for the end of a head."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.waiting: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > 2 * CONNECTIONS:
            transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.waiting:
            self.waiting.cancel()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE and self.waiting:
            self.waiting.cancel()
            self.waiting = None
        elif self.conn.their_state is h11.IDLE and not self.waiting:
            self.waiting = self.loop.call_later(HEAD_SECONDS, self.transport.close)
