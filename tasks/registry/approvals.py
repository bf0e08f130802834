"""Approvals that people gave, kept in the store so that nobody is asked twice; and whether one still counts.

It counts for exactly what its question named, for so many hours, while whoever gave it may still approve, and only while its
entry stands in the audit log. A key of the home seals it: who can only write to the store makes none. flows/approval.py asks.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.artifacts import Value, parse_ref
from tasks.process import locked, write_text
from tasks.registry import audit_chain
from tasks.registry.audit import audited
from tasks.registry.journal import StoreJournal
from tasks.registry.policy import Right, load_policy
from tasks.settings import canonical_json, digest
from tasks.storage.store import Store

KEY = "keys/approvals.key"
"""In the home, made at the first approval; in no backup without the private keys. Without it, people are asked again."""


class Approval(Value):
    """A person said yes."""

    kind: str
    """What was asked: deploy, train, retrain, ..."""
    subject: str
    """Reference of what it was asked about."""
    terms: dict[str, str] = Field(default={})
    """What else the question named; changed, it is another question."""
    right: Right = "approve"
    person: str
    proven: bool = False
    """Whether the person showed a token; without one, the name is what somebody typed."""
    reason: str
    time: float
    """Seconds since the epoch."""
    flow_run: str

    @property
    def place(self) -> str:
        return asked_about(self.kind, self.subject, self.terms)


def asked_about(kind: str, subject: str, terms: Mapping[str, str]) -> str:
    """What a question is about, as the place of its approvals."""
    return "/".join(("approvals", kind, *parse_ref(subject), digest(dict(terms))[:16]))


def words(kind: str, subject: str, terms: Mapping[str, str]) -> str:
    """The same for people."""
    named = ", ".join(f"{name} {value}" for name, value in terms.items())
    return f"{kind} {subject}" + (f" ({named})" if named else "")


def keep(home: Path, store: Store, approval: Approval) -> None:
    """Write an approval down, first in the audit log. The caller acts as who gave it, if that was proven."""
    what = words(approval.kind, approval.subject, approval.terms)
    said = {"right": approval.right, "what": what, "claimed": "" if approval.proven else approval.person}
    with audited(store, "approve", **said, reason=approval.reason, approval=digest(approval.model_dump())) as entry:
        kept = {"approval": approval.model_dump(), "entry": asdict(entry)}
        StoreJournal(store).append(approval.place, {**kept, "mac": _mac(home, kept)})


def standing(
    home: Path, store: Store, kind: str, subject: str, terms: Mapping[str, str], *, right: Right, hours: float
) -> Approval | None:
    """The newest approval of exactly this that counts now. Raises Refused for a policy that cannot be trusted."""
    place, policy, journal = asked_about(kind, subject, terms), load_policy(home), StoreJournal(store)
    for key in reversed(journal.list(place)):
        given = _genuine(home, store, journal.get(key))
        if given is None or (given.place, given.right) != (place, right):
            continue
        may = not policy.asks(right) or (given.proven and policy.may(given.person, right))
        if may and time.time() - given.time < hours * 3600:
            return given
    return None


def _genuine(home: Path, store: Store, kept: dict[str, Any] | None) -> Approval | None:
    """What was kept, if this home sealed it, and its entry stands in the audit log and says the same."""
    try:
        said = {name: kept[name] for name in ("approval", "entry")} if kept else {}
        sealed = hmac.compare_digest(str((kept or {}).get("mac", "")).encode(), _mac(home, said).encode())
        if not sealed:
            return None
        given = Approval.model_validate(said["approval"])
        found = audit_chain.linked(store, audit_chain.Link(**said["entry"]))
        entry = json.loads(found) if found else {}
    except (ValueError, TypeError, KeyError):
        return None
    same = (entry.get("action"), entry.get("approval")) == ("approve", digest(given.model_dump()))
    return given if same else None


def _mac(home: Path, said: Mapping[str, Any]) -> str:
    path = home / KEY
    with locked(home / "locks" / "approvals"):
        if not path.exists():
            write_text(path, secrets.token_hex(32))
    return hmac.new(path.read_bytes(), canonical_json(said).encode(), "sha256").hexdigest()
