"""Who did what: the audit log in the store, append-only; and who acts now, which each entry names.

Who may do it is policy.py; how entries hang together, so that an edit shows, is audit_chain.py. Who read what is access.py: that
is no entry. An entry is written before the change that it tells of, so that nothing changes unlogged. See docs/audit.md.

A copy of the audit log elsewhere, in lines that only grow: what whoever can rewrite the log here cannot rewrite there.

How far the copy goes is asked of the copy itself, so nothing is sent twice, and what was missed while it was away is sent later,
in its order. Who sends is the watch (deployments/watch/duties.py). See docs/audit.md.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.common.errors import HeadwayError, IntegrityError
from tasks.common.home import home
from tasks.common.process import append, private_folder
from tasks.common.redaction import has_form_of_secret, redact, redact_value
from tasks.security import audit_chain
from tasks.security.audit_chain import NOTHING, Link
from tasks.storage.store import Store

if TYPE_CHECKING:
    from tasks.storage.blob.lines import End, Lines

FOLDER = "audit-log"
AT_ONCE = 500
"""Entries of one append."""


def copy_of(home: Path) -> Lines | None:
    """Where the copy lies; None where stores.yaml names none. Raises ValueError, Missing."""
    from tasks.storage.settings import load_stores  # needs yaml, and every command imports this file

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


WRITTEN = ("reason", "why", "claimed")
"""What people and errors say in their own words. Only these are redacted: what was done, to what, is what the log is for, and
whoever names a variable SECRET must not choose what stands there."""
SPENT = "use approval"
"""The action of the entry that says that what an approval allowed was done."""
DECISIONS = ("deploy", "stop endpoint", "rollback endpoint", "move_ref")
"""Actions that end an approval of a change of the same thing, beside the rollback of its model."""
KEY = "keys/approvals.key"
"""In the home, made at the first approval; in no backup without the private keys. Without it, people are asked again."""
NOTED = "keys/decisions.jsonl"
"""The home's own copy of entries that approvals depend on, for whoever can write to the store can rewrite the audit log: every
`start run`, and the actions of NOTED_ACTIONS once the home has a key for approvals."""
NOTED_ACTIONS = ("approve", SPENT, *DECISIONS, "rollback", "reject")
"""What gives an approval, uses it up, or ends it."""
AUTOMATIC = ("schedule", "prefect", "bridge")
"""Who starts a flow run without a name: a schedule, or somebody behind the one login of Prefect's page."""


class Actor(BaseModel):
    """Who acts."""

    model_config = ConfigDict(frozen=True)

    name: str
    identity: Literal["person", "automatic", "account", "unknown"]
    """A person has shown a token; an account is the one that the process runs under, when nobody was asked; unknown
    is who sent what came by Prefect's page."""


class Entry(BaseModel):
    """One line of the audit log."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int
    time: float
    """Seconds since 1970, UTC."""
    who: str
    identity: str = "account"
    claimed: str = ""
    """The name that somebody gave, and did not prove."""
    host: str = ""
    account: str = ""
    """The account of the process, whoever it acts for."""
    action: str
    right: str = ""
    what: str = ""
    outcome: str = "done"
    """done; refused; or failed, when a later entry says that it did not come to it."""
    reason: str = ""
    why: str = ""
    """Why it was refused, or failed."""
    before: str | None = None
    after: str | None = None
    policy: str = ""
    """The policy that was asked last: how its sha256 begins, and its path when HEADWAY_POLICY named another than the home's."""
    seals: bool = False
    """Whether the Headway that wrote this seals what it writes (tasks/common/seal.py): what is later must have a seal."""
    of: int | None = None
    """Number of the entry whose change did not happen."""


_actor: ContextVar[Actor | None] = ContextVar("headway_actor", default=None)
_policy: ContextVar[str] = ContextVar("headway_policy", default="")


@contextmanager
def acting(name: str) -> Iterator[None]:
    """Do everything inside in the name of a person whom the policy knows, or of an automatic starter."""
    token = _actor.set(Actor(name=name, identity="automatic" if name in AUTOMATIC else "person"))
    try:
        yield
    finally:
        _actor.reset(token)


@contextmanager
def by_somebody() -> Iterator[None]:
    """Write down inside what somebody sent who is not known, whoever's run it came to."""
    token = _actor.set(Actor(name="unknown", identity="unknown"))
    try:
        yield
    finally:
        _actor.reset(token)


def actor() -> Actor:
    """Who acts now; without `acting`, the account that this process runs under."""
    return _actor.get() or Actor(name=account(), identity="account")


def asked_of(policy: str) -> None:
    """Note in the entries that follow which policy was asked: its digest, and where it lies when it is not the home's own."""
    _policy.set(policy)


def account() -> str:
    """The account that this process runs under, as the system knows it: LOGNAME and USER say what anybody wrote there."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


def audit(store: Store, action: str, *, outcome: Literal["done", "refused", "failed"] = "done", **details: Any) -> Link:
    """Append one entry to the audit log; returns its number and hash. For what is about to change, use `audited`.

    Raises ValueError when what is to be done cannot be told, because it holds what has the form of a secret.
    """
    now = actor()
    who = {"who": now.name, "identity": now.identity, "host": socket.gethostname(), "account": account()}
    for name, value in details.items():
        if name not in WRITTEN and has_form_of_secret(json.dumps(value, ensure_ascii=False)):
            raise ValueError(
                f"{redact(str(value))}: the action to record contains what looks like a secret, which the audit log can neither "
                "keep nor leave out. Choose another name, or pass the secret in the environment"
            )
    details = {name: redact_value(value) if name in WRITTEN else value for name, value in details.items()}
    entry = {"action": action, **details, "outcome": outcome, **who, "seals": True}
    if policy := _policy.get():
        entry["policy"] = policy
    # Before the log: whoever can write to the store can keep that from being written.
    if action == "start run" or (action in NOTED_ACTIONS and (home() / KEY).exists()):
        path, line = home() / NOTED, json.dumps({**entry, "time": time.time()})
        private_folder(path.parent)
        append(path, f"\n{line}\n".encode())
    return audit_chain.append(store, entry)


def noted(base: Path) -> list[dict[str, Any]]:
    """This home's own entries about started runs and decisions, oldest first, whatever became of the audit log."""
    path, result = base / NOTED, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):  # of a machine that lost its power; the line after it begins anew
            result.append(json.loads(line))
    return result


@contextmanager
def audited(store: Store, action: str, **details: Any) -> Iterator[Link]:
    """Write an entry, then make the change inside. When it raises, a second entry says that the first one's change failed.

    A process that is killed inside leaves the first entry alone: a change that is told and did not happen, never one that
    happened and is not told.
    """
    entry = audit(store, action, **details)
    try:
        yield entry
    except BaseException as error:
        with suppress(HeadwayError, OSError):  # what went wrong with the change is what the caller must hear
            audit(
                store,
                action,
                **{
                    **details,
                    "outcome": "failed",
                    "of": entry.number,
                    "why": f"{type(error).__name__}: {error}".removesuffix(": "),
                },
            )
        raise


def entries(store: Store) -> Iterator[Entry]:
    """The audit log, newest first; an entry whose change failed is told as failed."""
    failed: set[int] = set()
    for number, data in audit_chain.backwards(store):
        try:
            entry = Entry.model_validate({**json.loads(data), "number": number})
        except (ValueError, TypeError):  # told as such, it does not hide the others
            why = "`headway audit-log --verify`"
            entry = Entry(number=number, time=0.0, who="", action="not readable", why=why)
        if entry.outcome == "failed" and entry.of:
            failed.add(entry.of)
        yield entry.model_copy(update={"outcome": "failed"}) if number in failed else entry
