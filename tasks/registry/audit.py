"""Who did what: the audit log in the store, append-only; and who acts now, which each entry names.

Who may do it is policy.py. An entry names the hash of the one before it, so that an edit shows. See docs/access.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.redaction import redact_value
from tasks.storage.store import Store

AUTOMATIC = ("schedule", "prefect")
"""Who starts a flow run without a name: a schedule, or somebody behind the one login of Prefect's page."""


class Actor(BaseModel):
    """Who acts."""

    model_config = ConfigDict(frozen=True)

    name: str
    identity: Literal["person", "automatic", "account"]
    """A person has shown a token; an account is the one that the process runs under, when nobody was asked."""


class Entry(BaseModel):
    """One line of the audit log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int
    time: float
    """Seconds since 1970, UTC."""
    who: str
    identity: str = "account"
    claimed: str = ""
    """The name that a refused one gave."""
    host: str = ""
    action: str
    right: str = ""
    what: str = ""
    outcome: str = "done"
    """done or refused."""
    reason: str = ""
    why: str = ""
    """Why it was refused."""
    before: str | None = None
    after: str | None = None


_actor: ContextVar[Actor | None] = ContextVar("headway_actor", default=None)


@contextmanager
def acting(name: str) -> Iterator[None]:
    """Do everything inside in the name of a person whom the policy knows, or of an automatic starter."""
    token = _actor.set(Actor(name=name, identity="automatic" if name in AUTOMATIC else "person"))
    try:
        yield
    finally:
        _actor.reset(token)


def actor() -> Actor:
    """Who acts now; without `acting`, the account that this process runs under."""
    return _actor.get() or Actor(name=account(), identity="account")


def account() -> str:
    """The account that this process runs under, as the system knows it: LOGNAME and USER say what anybody wrote there."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def audit(store: Store, action: str, *, outcome: Literal["done", "refused"] = "done", **details: Any) -> None:
    """Append one entry to the audit log: each names the hash of the one before it, so that an edit shows."""
    now = actor()
    said = {"action": action, **redact_value(details), "outcome": outcome}
    who = {"who": now.name, "identity": now.identity, "host": socket.gethostname()}
    while True:
        keys = store.list("audit")
        last = store.read(keys[-1]) if keys else None
        link = hashlib.sha256(last.data).hexdigest() if last else None
        entry = {**said, **who, "time": time.time(), "previous": link}
        if store.create(f"audit/{len(keys) + 1:08d}.json", json.dumps(entry, indent=1).encode()):
            return


def entries(store: Store) -> Iterator[Entry]:
    """The audit log, newest first."""
    for key in reversed(store.list("audit")):
        document = store.read(key)
        if document:
            number = int(key.rpartition("/")[2].removesuffix(".json"))
            yield Entry.model_validate({**json.loads(document.data), "number": number})
