"""Signatures of senders of our own: HMAC-SHA256 over `SECONDS.BODY`, in the header `X-Headway-Signature: t=SECONDS,v1=HEX`.

The time stamp bounds how long a signature is good for; within that time each is believed once, and the ledger's database
remembers it in the transaction that takes its events in. So a restart forgets nothing, and a request that was not taken in
may be sent again as it is. Whose key it is, and the other proofs, are in webhook.py.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import sqlite3
import time
from typing import NamedTuple

from deployments.bridge.refusals import NotTaken

HEADER = "x-headway-signature"
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


def check(header: str, body: bytes, key: bytes, *, max_age: float) -> Signature:
    """The signature in a header, when it is right and not stale. Raises NotTaken (401)."""
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
    """Note, as part of a transaction, that a signature was used. Raises NotTaken (401) when it was used before."""
    db.execute(TABLE)
    db.execute("DELETE FROM signatures WHERE until < ?", (time.time(),))
    if not db.execute("INSERT OR IGNORE INTO signatures VALUES (?, ?)", signature).rowcount:
        raise NotTaken(401, "the signature was used before: sign each request anew")
