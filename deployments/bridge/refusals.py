"""Why a request is not taken, and the note of it in the ledger: a few a minute, however many come.

Who answers, and with what else than the status, is webhook.py. Nothing of what was sent as a proof is ever part of a reason.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tasks.common.redaction import redact
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
