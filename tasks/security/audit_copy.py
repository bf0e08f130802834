"""A copy of the audit log elsewhere, in lines that only grow: what whoever can rewrite the log here cannot rewrite there.

How far the copy goes is asked of the copy itself, so nothing is sent twice, and what was missed while it was away is sent later,
in its order. Who sends is the watch (deployments/watch/duties.py). See docs/audit.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.common.errors import IntegrityError
from tasks.security import audit_chain
from tasks.security.audit_chain import NOTHING, Link
from tasks.storage.settings import load_stores
from tasks.storage.store import Store

if TYPE_CHECKING:
    from tasks.storage.blob.lines import End, Lines

FOLDER = "audit-log"
AT_ONCE = 500
"""Entries of one append."""


def copy_of(home: Path) -> Lines | None:
    """Where the copy lies; None where stores.yaml names none. Raises ValueError, Missing."""
    stores = load_stores(home)
    if not stores.audit_copy:
        return None
    config = stores.stores.get(stores.audit_copy)
    if config is None or not config.uri.startswith("az://"):
        raise ValueError(
            f"audit_copy: {stores.audit_copy!r} is no store in Azure Blob; name one of stores.yaml whose uri is az://..."
        )
    from tasks.storage.blob.lines import Lines

    return Lines(config, FOLDER)


def newest_copied(lines: Lines) -> Link:
    """The newest entry of the copy; `NOTHING` where it is empty. Raises Missing, IntegrityError."""
    return _link(lines.end(), lines.uri)


def send(store: Store, lines: Lines) -> int:
    """Append to the copy what it does not have; how many entries that were.

    Raises IntegrityError, and sends nothing, when the copy holds what the log here does not: one of them was changed. Raises
    Conflict when somebody else sends at the same time.
    """
    end, sent = lines.end(), 0
    after, newest = _link(end, lines.uri), audit_chain.newest(store)
    copied = after
    uri = lines.uri
    local = next((link for link, _ in audit_chain.between(store, copied.number - 1, copied.number)), NOTHING)
    if copied.number and local != copied:
        raise IntegrityError(
            f"entry {copied.number} of the audit log is not the one that was copied to {uri}",
            remedy="`headway audit-log --verify` says where the log breaks; the copy is what was written.",
        )
    while after.number < newest.number:
        to = min(after.number + AT_ONCE, newest.number)
        results = list(audit_chain.between(store, after.number, to))
        if results:
            end = lines.append(
                end, b"".join(_line(*one) for one in results), begins=f"{results[0][0].number:08d}.jsonl"
            )
        after, sent = Link(to, ""), sent + len(results)
    return sent


def _line(link: Link, data: bytes) -> bytes:
    """The entry, and the hash of its bytes in the log: those of `json.dumps(entry, indent=1)`."""
    try:
        text = json.loads(data)
    except ValueError:
        text = data.decode(errors="replace")
    return json.dumps({"number": link.number, "hash": link.hash, "entry": text}).encode() + b"\n"


def _link(end: End | None, uri: str) -> Link:
    if end is None or not end.line:
        return NOTHING
    try:
        output = json.loads(end.line)
        return Link(int(output["number"]), str(output["hash"]))
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(
            f"the last line of {end.blob} in {uri} is no entry of an audit log",
            remedy="See who may write there; name another store as audit_copy to begin a new copy.",
        ) from error
