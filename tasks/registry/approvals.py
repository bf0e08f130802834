"""Approvals that people gave, kept in the store so that nobody is asked twice; and whether one still counts.

It counts for exactly what its question named, for so many hours, while whoever gave it may still approve, and only while its
entry stands in the audit log. A key of the home seals it: who can only write to the store makes none. flows/support/approval.py
asks.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.artifacts import Value, parse_ref
from tasks.common.errors import IntegrityError, Refused
from tasks.config.base import canonical_json, digest
from tasks.config.flows import ApprovalConfig
from tasks.registry.records import StoreJournal
from tasks.security import audit_chain
from tasks.security.audit import DECISIONS, KEY, SPENT, audit, audited, noted
from tasks.security.audit_chain import Link
from tasks.security.policy import Policy, Right, load_policy
from tasks.signing.keys import ensure_secret
from tasks.storage.store import Store

DONE = "what it allowed was done, and it counts once"

DEFAULT_HOURS = ApprovalConfig().valid_hours
"""Of an approval that a release before this one kept, which did not write down for how long: the most that it counts."""


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
    valid_hours: float | None = None
    """For how long it counts, as its question said; a release before this one did not write it down."""
    token: str = ""
    """Of a proven person: the digest of the policy's hash of the token, so that nobody else of this name takes it over. Empty in
    approvals of a release that did not keep it."""
    before: dict[str, str] = Field(default={})
    """What stood when it was asked about, by the audit log's names: what each endpoint served, who was champion."""

    @property
    def place(self) -> str:
        return asked_about(self.kind, self.subject, self.terms)

    @property
    def digest(self) -> str:
        """What the audit log calls it by: of what is said in it, so that a field of a later release changes nothing."""
        return digest(self.model_dump(exclude_unset=True))


@dataclass(frozen=True)
class Asked:
    """A question, as its approvals must fit it."""

    kind: str
    subject: str
    terms: Mapping[str, str]
    right: Right
    """Who decides must have it."""
    exercises: Right
    """What is done by the decision: where the policy asks for that, who decides must prove who they are."""
    hours: float
    """The longest that an approval counts; one that was given for less counts for less."""
    stands: Callable[[], Mapping[str, str]] = dict
    """Looks at what the answer changes, by the audit log's names; an approval ends when somebody else decides about it."""
    starters: frozenset[str] | None = frozenset()
    """Persons who started what is asked about; None: somebody did, and nobody knows who."""

    @property
    def place(self) -> str:
        return asked_about(self.kind, self.subject, self.terms)

    def fits(self, given: Approval) -> bool:
        """Whether an approval is of exactly this. Its place alone does not say so: it has a part of a digest only."""
        messages = (given.kind, given.subject, given.terms, given.right)
        return messages == (self.kind, self.subject, dict(self.terms), self.right)

    def proof(self, policy: Policy) -> bool:
        """Whether who decides must show a token."""
        return policy.asks(self.right) or policy.asks(self.exercises)

    def refusal(self, policy: Policy, person: str, *, proven: bool) -> str:
        """Why somebody may not decide this; empty when they may."""
        if not self.proof(policy):
            return ""
        if not proven or person not in policy.persons:
            return f"the policy knows no {person} who proved it"
        if policy.asks(self.right) and not policy.may(person, self.right):
            return f"{person} may not {self.right}"
        if not policy.asks(self.exercises) or policy.may(person, self.exercises):
            return ""
        if self.starters is None:
            return f"nobody knows who started the run, so only who may {self.exercises} can approve it"
        if person in self.starters:
            return f"{person} started the run and may not {self.exercises}, so somebody else must approve it"
        return ""


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
    output = {"right": approval.right, "what": what, "claimed": "" if approval.proven else approval.person}
    _key(home)  # the home keeps its own entry where it has one
    with audited(store, "approve", **output, reason=approval.reason, approval=approval.digest) as entry:
        kept = {"approval": approval.model_dump(exclude_unset=True), "entry": asdict(entry)}
        StoreJournal(store).append(approval.place, {**kept, "mac": _mac(home, kept)})


def standing(home: Path, store: Store, asked: Asked) -> Approval | None:
    """The newest approval of exactly this that counts now. Raises Refused for a policy that cannot be trusted."""
    policy = load_policy(home)
    for given, entry in _given(home, store, asked):
        if not _void(home, store, policy, asked, given, entry):
            return given
    return None


def require_standing(home: Path, store: Store, asked: Asked, given: Approval) -> None:
    """Raise Refused, with the reason, unless an approval counts still."""
    policy, kept = load_policy(home), _given(home, store, asked)
    why = next(
        (_void(home, store, policy, asked, given, entry) for each, entry in kept if each == given), "it is not kept"
    )
    if why:
        raise Refused(
            f"the approval that {given.person} gave does not count any more: {why}",
            remedy="Start the run again: it reuses what is finished, and asks again.",
        )


def spend(store: Store, given: Approval) -> None:
    """What an approval was for is done: from now on it counts for nothing, and the same run again asks again."""
    what = words(given.kind, given.subject, given.terms)
    audit(store, SPENT, right=given.right, what=what, approval=given.digest)


def _void(home: Path, store: Store, policy: Policy, asked: Asked, given: Approval, entry: Link) -> str:
    """Why an approval does not count; empty while it does."""
    hours = min(asked.hours, DEFAULT_HOURS if given.valid_hours is None else given.valid_hours)
    if time.time() - given.time >= hours * 3600:
        return f"it was given more than {hours:g} hours ago"
    if why := asked.refusal(policy, given.person, proven=given.proven):
        return why
    if given.token not in ("", token_of(policy, given.person)):
        return f"{given.person} has another token since then"
    # What became of it, or of what it is about, after it was given; empty when nothing did. What it allowed may have
    # been done in part when a run died: the model that was approved may stand there already.
    stands = asked.stands()
    later = audit_chain.since(store, entry)
    if later is None:
        return "the audit log does not hang together from its entry on"
    about, own = words(given.kind, given.subject, given.terms), noted(home)
    its = [at for at, one in enumerate(own) if (one["action"], one.get("approval")) == ("approve", given.digest)]
    for each in (*later, *own[its[0] + 1 if its else 0 :]):
        mine = each.get("approval") == given.digest
        if mine and each.get("action") == SPENT:
            return DONE
        if not mine and (
            _decides(each, stands, given.subject) or (each.get("action"), each.get("what")) == ("reject", about)
        ):
            return f"{each.get('action')} of {each.get('what')} came after it"
    for name, now in stands.items():
        then = given.before.get(name, now)
        if now not in (then, given.subject):
            return f"{name} was {then} when it was asked about, and is {now}"
    return ""


def _decides(entry: Mapping[str, Any], stands: Mapping[str, str], subject: str) -> bool:
    """Whether an entry of the audit log decides about what an approval was to change."""
    action, what = entry.get("action"), str(entry.get("what"))
    if action == "rollback":
        return bool(stands) and what != subject and what.startswith(subject.partition("@")[0] + "@")
    return action in DECISIONS and what in stands and (action != "move_ref" or entry.get("after") != subject)


def _given(home: Path, store: Store, asked: Asked) -> Iterator[tuple[Approval, Link]]:
    """Approvals of exactly this, newest first, each with its entry of the audit log."""
    journal = StoreJournal(store)
    for key in reversed(journal.list(asked.place)):
        result = _genuine(home, store, journal, key)
        if result and asked.fits(result[0]):
            yield result


def _genuine(home: Path, store: Store, journal: StoreJournal, key: str) -> tuple[Approval, Link] | None:
    """What was kept, if this home sealed it, and its entry stands in the audit log and says the same."""
    try:
        kept = journal.get(key)
    except IntegrityError:
        return None
    try:
        output = {name: kept[name] for name in ("approval", "entry")} if kept else {}
        sealed = hmac.compare_digest(str((kept or {}).get("mac", "")).encode(), _mac(home, output).encode())
        if not sealed:
            return None
        given, link = Approval.model_validate(output["approval"]), Link(**output["entry"])
        result = audit_chain.linked(store, link)
        entry = json.loads(result) if result else {}
    except (ValueError, TypeError, KeyError):
        return None
    same = (entry.get("action"), entry.get("approval")) == ("approve", given.digest)
    return (given, link) if same else None


def token_of(policy: Policy, person: str) -> str:
    """What an approval says of the token of who gave it; of somebody whom the policy does not know, what no token has."""
    return digest(policy.persons[person].token)[:16] if person in policy.persons else "none"


def _mac(home: Path, output: Mapping[str, Any]) -> str:
    return hmac.new(_key(home), canonical_json(output).encode(), "sha256").hexdigest()


def _key(home: Path) -> bytes:
    return ensure_secret(
        home / KEY,
        lock=home / "locks" / "approvals",
        lost="approvals cannot be distinguished from forged ones",
        remedy="Find out who changed it, and remove it: approvals that were given until now are then asked for once more.",
    )
