"""The audit log as log records, for those who watch over many machines in one place. The log itself is tasks/security/audit.py.

How far each exporter got is in the ledger, as for runs. A record that is told is no proof; the chain is.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from deployments.telemetry.trace_builder import Log
from tasks.common.errors import HeadwayError
from tasks.security import audit_chain
from tasks.security.audit import Entry
from tasks.storage import open_store

EVERY_SECONDS = 15.0
AT_ONCE = 500
ITEM = "audit"
"""Its name in the ledger."""


class Audited:
    """State: the newest entry that is known, and when it was asked for."""

    def __init__(self, home: Path) -> None:
        self.home, self._newest, self._asked = home, 0, float("-inf")

    def read(self, after: int, now: float) -> tuple[list[Log], dict[str, int]]:
        """Entries behind a number, some at once, and the number after them; none while the store is away."""
        try:
            if not 0 <= now - self._asked < EVERY_SECONDS:
                self._newest, self._asked = audit_chain.newest(open_store(self.home)).number, now
            to = min(self._newest, after + AT_ONCE)
            if to <= after:
                return [], {}
            results = list(audit_chain.between(open_store(self.home), after, to))
        except (HeadwayError, OSError, ValueError) as error:
            logging.info("telemetry: the audit log is not known now: %s", error)
            return [], {}
        return [log for link, data in results if (log := _log(link.number, link.hash, data))], {ITEM: to}


def _log(number: int, hash_: str, data: bytes) -> Log | None:
    """None for an entry that cannot be read: `headway audit-log --verify` names it."""
    try:
        entry = Entry.model_validate({**json.loads(data), "number": number})
    except (ValueError, TypeError):
        return None
    output = entry.model_dump(exclude_none=True, exclude={"time"})
    return Log(
        name="headway.audit",
        time=entry.time,
        severity="INFO" if entry.outcome == "done" else "WARN",
        body=f"{entry.who}: {entry.action} {entry.what} ({entry.outcome})",
        attributes={
            "log.record.uid": f"audit:{number}",
            "headway.audit.hash": hash_,
            **{f"headway.audit.{name}": value for name, value in output.items() if value != ""},
        },
    )
