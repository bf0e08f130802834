"""Who is believed by the webhook, why a request is not taken, and the note of that in the ledger: a few a minute, however
many come.

Any proof that is configured is enough: a token of Microsoft Entra, a shared secret, or a signature of a sender of our own. A
request that carries more than one must have all of them right. Where we cannot check (a variable is not set, keys are away),
that is our fault and not the sender's: Unable, not NotTaken. Nothing of what was sent as a proof is ever part of a reason. What
a request is answered is webhook.py. See docs/webhook.md.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from starlette.datastructures import Headers

from deployments.configuration.events import WebhookConfig
from tasks.azure import entra
from tasks.common.redaction import redact
from tasks.config.access import EntraConfig
from tasks.events.ledger import Ledger

NOTES_A_MINUTE = 20
"""Refusals that have a row of their own; those beyond are one row with their number. So a flood writes 30,000 rows a day."""
MINUTE = 60.0
LONGEST = 300
"""Characters of a reason, a source and so on that are kept of something refused."""
log = logging.getLogger("headway.webhook")


class NotTaken(Exception):
    """The request is at fault: trying it again as it is makes no difference."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unable(Exception):
    """We are at fault, for now: the answer is 503, so that the sender keeps the event and tries again."""

    def __init__(self, message: str, *, retry_after: float = 30.0) -> None:
        super().__init__(message)
        self.retry_after = max(1, round(retry_after))


class Notes:
    """Notes of refusals, written by a thread of their own: nobody who is refused waits for the disk.

    State: how many there were in this minute, and what was last said in the log.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()
        self._minute = 0
        self._count = 0
        self._last = ""
        self._trouble = ("", -MINUTE)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="webhook-notes")

    def refused(self, reason: str, *, source: str, identity: str = "", about: str = "") -> None:
        """Note one refusal, or count it when this minute had its share."""
        self.settle()
        with self._lock:
            self._count += 1
            self._last = reason
            if self._count > NOTES_A_MINUTE:
                return
        self._writer.submit(self._write, reason, source, identity, about)

    def settle(self, *, ending: bool = False) -> None:
        """Write down how many more there were in a minute that is over, or ends here."""
        with self._lock:
            now = int(time.monotonic() / MINUTE)
            if now == self._minute and not ending:
                return
            more, last = self._count - NOTES_A_MINUTE, self._last
            self._minute, self._count = now, 0
        if more > 0:
            self._writer.submit(self._write, f"and {more} more were refused within a minute; of the last one: {last}")

    def trouble(self, text: str) -> None:
        """Say in the log what is wrong with us: once a minute while it stays the same."""
        now = time.monotonic()
        with self._lock:
            before, when = self._trouble
            if text == before and now - when < MINUTE:
                return
            self._trouble = (text, now)
        log.warning("%s", text)

    def close(self) -> None:
        """Write down what there is to write, and end."""
        self.settle(ending=True)
        self._writer.shutdown()

    def _write(self, reason: str, source: str = "", identity: str = "", about: str = "") -> None:
        output, who, which, what = (redact(text)[:LONGEST] for text in (reason, source, identity, about))
        try:
            self._ledger.refuse("webhook", output, source=who, identity=which, about=what)
        except (sqlite3.Error, OSError) as error:
            self.trouble(f"a refusal could not be noted: {error}")


SIGNATURE_HEADER = "x-headway-signature"
MOST_SIGNATURES = 8
"""`v1` in one header: the new key's and the old one's, while a key is changed."""
FORM = re.compile(rf"t=(\d{{1,12}})((?:,v1=[0-9a-fA-F]{{64}}){{1,{MOST_SIGNATURES}}})")
TABLE = "CREATE TABLE IF NOT EXISTS signatures (mac TEXT PRIMARY KEY, until REAL NOT NULL) WITHOUT ROWID"


class Signature(NamedTuple):
    """A right signature."""

    mac: str
    """As we compute it: however the header was put together, a body and a time stamp have one."""
    until: float
    """Seconds since the epoch until which it is remembered: twice as long as it is good for, should the clock be set back."""


def check_signature(header: str, body: bytes, key: bytes, *, max_age: float) -> Signature:
    """The signature of `X-Headway-Signature: t=SECONDS,v1=HEX`, HMAC-SHA256 over `SECONDS.BODY`, when it is right and not stale.

    The time stamp bounds how long it is good for; within that time `remember` lets each be used once. Raises NotTaken (401).
    """
    match = FORM.fullmatch(header.replace(" ", ""))
    if not match:
        raise NotTaken(401, "the signature is not of the form t=SECONDS,v1=HEX")
    stamp = int(match[1])
    away = time.time() - stamp
    right = hmac.new(key, b"%s.%s" % (match[1].encode(), body), hashlib.sha256).hexdigest()
    given = match[2].lower().split(",v1=")[1:]
    if not any([hmac.compare_digest(one, right) for one in given]):
        raise NotTaken(401, "the signature is not right: another key, another body or another time stamp")
    if abs(away) > max_age:
        raise NotTaken(
            401, f"the signature is {abs(away):.0f} s {'old' if away > 0 else 'ahead'}; {max_age:g} s are believed"
        )
    return Signature(right, stamp + 2 * max_age)


def remember(db: sqlite3.Connection, signature: Signature) -> None:
    """Note that a signature was used, as part of the transaction that takes its events in. Raises NotTaken (401) for a
    second use.

    So a restart forgets nothing, and a request that was not taken in may be sent again as it is.
    """
    db.execute(TABLE)
    db.execute("DELETE FROM signatures WHERE until < ?", (time.time(),))
    if not db.execute("INSERT OR IGNORE INTO signatures VALUES (?, ?)", signature).rowcount:
        raise NotTaken(401, "the signature was used before: sign each request by itself")


class Entra:
    """One tenant, and who of it may send."""

    def __init__(self, config: EntraConfig) -> None:
        self._entra = entra.Entra(config)

    def check(self, token: str) -> str:
        """The client id that a token is of. Raises NotTaken (401; 403 for an application not listed), Unable without keys."""
        try:
            return self._entra.check(token)
        except entra.NotBelieved as error:
            raise NotTaken(error.status, str(error)) from error
        except entra.KeysAway as error:
            raise Unable(str(error), retry_after=error.retry_after) from error


SECRET_HEADER = "x-headway-secret"
TOKEN_HEADER = "authorization"
Check = Callable[[str, bytes], Signature | None]


class Senders:
    """The ways that senders of one webhook can prove themselves."""

    def __init__(self, config: WebhookConfig) -> None:
        self._config = config
        self._entra = Entra(config.entra) if config.entra else None
        ways: dict[str, Check | None] = {
            SECRET_HEADER: self._secret if config.secret else None,
            SIGNATURE_HEADER: self._signature if config.hmac else None,
            TOKEN_HEADER: self._token if self._entra else None,
        }
        self._checks = {header: check for header, check in ways.items() if check}

    @property
    def challenge(self) -> str:
        """What a request without a proof is told in `WWW-Authenticate`."""
        return "Bearer" if self._entra else "Headway"

    def check(self, headers: Headers, body: bytes) -> Signature | None:
        """Return when every proof that a request carries is right, with its signature if it has one.

        Raises NotTaken (401, 403), and Unable when it cannot be checked.
        """
        carried = [header for header in self._checks if header in headers]
        if not carried:
            raise NotTaken(401, f"the request proves nothing: it has none of {', '.join(self._checks)}")
        signature = None
        for header in carried:
            values = headers.getlist(header)
            if len(values) > 1:
                raise NotTaken(401, f"the request has {header} {len(values)} times")
            signature = self._checks[header](values[0], body) or signature
        return signature

    def _secret(self, value: str, _: bytes) -> None:
        """Compares hashes, so that not even the length of the secret takes time to tell."""
        both = value.encode("latin-1"), _variable(self._config.secret)
        if not hmac.compare_digest(*(hashlib.sha256(each).digest() for each in both)):
            raise NotTaken(401, "the shared secret is not right")

    def _signature(self, value: str, body: bytes) -> Signature:
        return check_signature(value, body, _variable(self._config.hmac), max_age=self._config.max_age_seconds)

    def _token(self, value: str, _body: bytes) -> None:
        scheme, _, token = value.partition(" ")
        if scheme.lower() != "bearer":
            raise NotTaken(401, "the request has no bearer token")
        assert self._entra
        self._entra.check(token.strip())


def unset(config: WebhookConfig) -> dict[str, str]:
    """Secrets of the settings that this process does not have, by the name of their setting: whoever sends is answered 503."""
    result = {}
    for name, reference in (("secret", config.secret), ("hmac", config.hmac)):
        try:
            if reference:
                _variable(reference)
        except Unable as error:
            result[f"webhook, {name}"] = str(error)
    return result


def _variable(reference: str) -> bytes:
    """The secret that env:NAME stands for. Raises Unable when it is not there."""
    name = reference.removeprefix("env:")
    value = os.fsencode(os.environ.get(name, "")).strip()
    if not value:
        raise Unable(
            f"the variable {name} is not set where the bridge runs: export it, then `headway down` and `headway up`"
        )
    return value
