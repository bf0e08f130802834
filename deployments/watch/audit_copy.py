"""Keeps the copy of the audit log elsewhere up to date, where stores.yaml names one. How is tasks/security/audit_copy.py."""

from __future__ import annotations

import logging
from pathlib import Path

from tasks.common.errors import Conflict
from tasks.security.audit_copy import copy_of, send
from tasks.storage import open_store

EVERY_SECONDS = 15.0


class AuditCopy:
    """State: when it last looked."""

    def __init__(self, home: Path) -> None:
        self.home, self._last = home, 0.0

    def tick(self, now: float) -> None:
        """Send what the copy lacks. What is away, or does not fit, is raised: the watch says so once, and tries again."""
        if 0 <= now - self._last < EVERY_SECONDS:
            return
        self._last = now
        lines = copy_of(self.home)
        if lines is None:
            return
        try:
            sent = send(open_store(self.home), lines)
        except Conflict:  # the watch of another host sends as well
            return
        if sent:
            logging.info("audit log: %s entries were copied to %s", sent, lines.uri)
