"""The HTTP bridge as a server: it listens in a thread of the bridge's process, with limits on what a client may make it wait for.

What a request is answered is answers.py; the whole way of an event is in docs/webhook.md. Starting the bridge's process does not
live here.
"""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import uvicorn

from deployments.bridge.answers import PATH, Answers
from deployments.bridge.intake import Intake
from deployments.bridge.refusals import Notes
from deployments.bridge.senders import unset
from deployments.configuration.events import EventsConfig, WebhookConfig
from deployments.services.checks import choose_port
from tasks.common import http_server, process
from tasks.events.ledger import Ledger

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
    try:
        return http_server.listen(config.host, port, backlog=CONNECTIONS)
    except OSError as error:
        raise ValueError(f"webhook: {config.host}:{port} cannot be listened on: {error}") from error


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
