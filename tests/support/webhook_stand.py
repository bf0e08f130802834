"""A webhook that runs, and how its senders write to it: signed by hand here, not by the code under test."""

import hashlib
import hmac
import json
import os
import sqlite3
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from waiting import limit

from deployments.bridge import webhook
from deployments.configuration.events import EventsConfig
from tasks.events.ledger import Ledger

SECRET, KEY = "canary-of-the-shared-secret-5e1b", "canary-of-the-signing-key-77aa"
VARIABLES = {"STAND_SECRET": SECRET, "STAND_KEY": KEY}
JSON = {"Content-Type": "application/cloudevents+json"}
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Webhooks speak plain HTTP here; a client that reads all certificates costs 20 ms."""
REACHED: list[tuple[str, Any]] = []
"""Every address that a thread of a webhook connected to or looked up, in this process."""


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo") and threading.current_thread().name.startswith("webhook"):
        REACHED.append((event, arguments[1] if event == "socket.connect" else arguments[:2]))


sys.addaudithook(_guard)


@dataclass
class Stand:
    """A home with a webhook that listens."""

    home: Path
    url: str
    ledger: Ledger
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=limit(30), verify=NO_CERTIFICATES))

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":")[-1].split("/")[0])

    def post(self, body: bytes, headers: dict[str, str], **how: Any) -> httpx.Response:
        return self.client.post(self.url, content=body, headers={**JSON, **headers}, **how)

    def rows(self, *, status: str = "accepted") -> list[dict[str, Any]]:
        with self.ledger.transaction() as db:
            return [dict(row) for row in db.execute("SELECT * FROM events WHERE status = ? ORDER BY number", (status,))]

    def refusals(self, count: int = 1) -> list[str]:
        """Their reasons, once there are as many: they are written beside the answer."""
        return [
            row["reason"] for row in eventually(lambda: self.rows(status="refused"), lambda rows: len(rows) >= count)
        ]

    def traces(self) -> str:
        """All that is kept on disk, as text."""
        with closing(sqlite3.connect(self.ledger.path)) as db:
            dump = "\n".join(db.iterdump())
        files = [path for path in self.home.rglob("*") if path.is_file()]
        return dump + "".join(path.read_bytes().decode("latin-1") for path in files)


@contextmanager
def listening(home: Path, **settings: Any) -> Iterator[Stand]:
    """A webhook for as long as the block lasts; `containers` are the events' and the rest the webhook's settings."""
    ledger = Ledger(home)
    containers = settings.pop("containers", [])
    config = EventsConfig.model_validate({"webhook": settings, "containers": containers})
    running = webhook.start(home, config, ledger)
    assert running
    try:
        yield Stand(home, running.url, ledger)
    finally:
        running.stop()


def secret() -> dict[str, str]:
    return {"X-Headway-Secret": SECRET}


def signed(body: bytes, *, key: str = KEY, seconds: int | None = None) -> dict[str, str]:
    """The header of a sender who signs."""
    stamp = int(time.time()) if seconds is None else seconds
    return {"X-Headway-Signature": f"t={stamp},v1={mac(body, stamp, key)}"}


def mac(body: bytes, stamp: int, key: str = KEY) -> str:
    return hmac.new(key.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()


def event(number: int = 1, **changed: Any) -> dict[str, Any]:
    """A CloudEvent of a sender of our own: a dataset has a new version."""
    said = {"specversion": "1.0", "id": f"id-{number}", "source": "/tests/sender", "type": "headway.dataset.published"}
    said |= {"subject": "dataset/corpus", "time": "2026-01-01T00:00:00Z"}
    return {**said, "data": {"object": f"dataset/corpus@{number:064x}"}, **changed}


def written(said: Any) -> bytes:
    return json.dumps(said).encode()


def eventually(look: Any, well: Any = bool, *, timeout: float = 30.0) -> Any:
    """What `look` gives once it is well."""
    deadline = time.monotonic() + limit(timeout)
    while not well(found := look()):
        assert time.monotonic() < deadline, f"after {timeout} s it is {found!r}"
        time.sleep(0.02)
    return found


def with_variables() -> dict[str, str]:
    """The environment of a process that knows the secrets."""
    return {**os.environ, **VARIABLES}
