"""Waivers in the audit log: one counts in a home once somebody who may override noted it, and until its last day."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.report.estate.audit import Waiver
from tasks.security.audit import audited, entries
from tasks.storage.store import Store

ACTION = "waive"


def unnoted(store: Store, waivers: Sequence[Waiver]) -> list[Waiver]:
    """Those that the audit log does not have, with the same row, resource, person and day."""
    if not waivers:
        return []
    known = {(one.what, one.after) for one in entries(store) if one.action == ACTION and one.outcome == "done"}
    return [one for one in waivers if _what(one) not in known]


def note(store: Store, waivers: Sequence[Waiver]) -> None:
    """Write them into the audit log. Whether the one who acts may do so was asked before."""
    for one in waivers:
        what, after = _what(one)
        with audited(store, ACTION, right="override", what=what, after=after, reason=one.why):
            pass


def _what(one: Waiver) -> tuple[str, str]:
    return f"estate/{one.row}", f"until {one.until}, by {one.who}" + (f", of {one.resource}" if one.resource else "")
