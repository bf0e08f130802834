"""Who may do what: a file that names persons, a hash of each one's token, and their rights. Without it everybody may everything.

`authorise` asks who it is by name and token; `require` asks about whoever acts already. What they did is audit.py. A policy that
others may write, or that is damaged, allows nothing. See docs/access.md.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasks.common.errors import Refused, Unknown
from tasks.common.process import locked, write_text
from tasks.common.validation import explain
from tasks.config.base import Name, policy_file
from tasks.security.audit import AUTOMATIC, account, actor, asked_of, audit
from tasks.storage import open_store
from tasks.storage.store import Store

# Personal tokens are random, kept as a salted scrypt hash, and compared in constant time.


SCRYPT = {"n": 2**14, "r": 8, "p": 1}
"""About 50 ms and 16 MB a try (RFC 7914). Tokens are 256 random bits, so the cost is against those who try many names."""
NOBODY = f"scrypt:{'A' * 22}==:{'A' * 43}="
"""Compared with when a name is unknown, so that it takes as long as a wrong token."""


def new_token() -> str:
    """A token of 256 random bits, to be shown once."""
    return f"hwt_{secrets.token_urlsafe(32)}"


def hashed(token: str, salt: bytes = b"") -> str:
    """What is kept of a token; without a salt, a new one is drawn."""
    salt = salt or secrets.token_bytes(16)
    made = hashlib.scrypt(token.encode(), salt=salt, dklen=32, **SCRYPT)
    return f"scrypt:{urlsafe_b64encode(salt).decode()}:{urlsafe_b64encode(made).decode()}"


def fits(token: str, kept: str) -> bool:
    """Whether a token is the one that is kept."""
    return hmac.compare_digest(hashed(token, urlsafe_b64decode(kept.split(":")[1])), kept)


Right = Literal["publish", "run", "promote", "approve", "roll_back", "override"]
RIGHTS: tuple[Right, ...] = get_args(Right)
Rights = tuple[Right, ...]
FREE_TRIES = 3
LONGEST_WAIT_SECONDS = 60.0
HEAD = (
    "# Who may do what: docs/access.md. `headway person` changes this file; comments below this line are lost then.\n"
)


class Person(BaseModel):
    """What the policy knows of somebody."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    may: Rights
    token: Annotated[str, Field(pattern=r"^scrypt:[\w-]{22}==:[\w-]{43}=$")]
    """scrypt:SALT:HASH of the token; the token itself is nowhere."""


class Policy(BaseModel):
    """The file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asked: Rights = Field(RIGHTS, alias="asks")
    """Rights that are asked for. What is not in here, everybody may."""
    persons: dict[Name, Person] = {}
    automatic: dict[str, Rights] = {"schedule": ("publish", "run"), "prefect": ("run",), "bridge": ("publish", "run")}
    """What flow runs may do that nobody with a name started: by a `schedule`, or in the page of `prefect`."""
    prefect_servers: tuple[str, ...] = Field((), exclude_if=lambda servers: not servers)
    """Addresses that `PREFECT_API_URL` may name, beside the home's own server. What they say of who started a run counts."""

    @model_validator(mode="after")
    def _names_apart(self) -> Policy:
        taken, unknown = set(self.persons) & set(AUTOMATIC), set(self.automatic) - set(AUTOMATIC)
        if taken or unknown:
            names = ", ".join(sorted(taken | unknown))
            raise ValueError(
                f"{names}: schedule, prefect and bridge belong under automatic, and everybody else under persons"
            )
        return self

    def asks(self, right: Right) -> bool:
        """Whether a right is asked for at all."""
        return right in self.asked

    def person(self, name: str, token: str) -> Person:
        """Who shows this name and token. Raises Refused, with the same words and after the same time for either mistake."""
        known = self.persons.get(name)
        right = fits(token, known.token if known else NOBODY)
        if known is None or not right:
            raise Refused(
                f"the name {name[:64]!r} and the token do not belong together",
                remedy="`headway person list` shows the names; `headway person renew NAME` makes a new token.",
            )
        return known

    def may(self, name: str, right: Right) -> bool:
        """Whether somebody who is known already, or an automatic starter, has a right."""
        known = self.persons.get(name)
        return right in (known.may if known else self.automatic.get(name, ()))


class InForce(BaseModel):
    """Which policy is asked."""

    model_config = ConfigDict(frozen=True)

    path: Path
    digest: str
    """sha256 of the file; empty where there is none."""
    named: bool
    """Whether HEADWAY_POLICY named it; a home with a policy of its own has no other."""

    @property
    def words(self) -> str:
        where = f", {self.path}, named by HEADWAY_POLICY: not the home's own" if self.named else ""
        return f"{self.digest[:16] or 'none: everyone may do everything'}{where}"


def in_force(home: Path) -> InForce:
    """Which policy this process asks, whatever it says."""
    path, named = policy_file(home)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if os.access(path, os.R_OK) and path.is_file() else ""
    return InForce(path=path, digest=digest, named=named and path != home / "policy.yaml")


def load_policy(home: Path) -> Policy:
    """The policy of a home; one that asks nothing where there is none. Raises Refused when it cannot be trusted."""
    result = load_or_none(home)
    asked_of(in_force(home).words if result else "")
    return result or Policy(asks=())


def authorise(
    home: Path, right: Right, name: str, token: str, *, what: str, reason: str, exercises: Right | None = None
) -> str:
    """Who does something, by name and token: the name for `acting`. Where the policy does not ask, the account's.

    With `exercises`, a right that is exercised by it, they prove who they are also where the policy asks for that one alone.

    Raises Refused, and notes it in the audit log, when the name, the token or the right is wrong. After three wrong tokens for a
    name the next try has to wait, longer every time.
    """
    store = open_store(home)
    try:
        policy = load_policy(home)
        if not policy.asks(right) and not (exercises and policy.asks(exercises)):
            return account()
        _identify(store, policy, name, token)
        if policy.asks(right) and not policy.may(name, right):
            raise _without_right(name, right)
    except Refused as error:
        output = {"what": what, "reason": reason, "claimed": name[:64], "why": error.message}
        audit(store, "authorise", outcome="refused", right=right, **output)
        raise
    return name


def require(home: Path, right: Right, *, what: str, reason: str = "") -> None:
    """Raise Refused, and note it in the audit log, unless whoever acts now (`acting`) has a right, or nobody asks for it."""
    now = actor()
    try:
        policy = load_policy(home)
        if not policy.asks(right) or (now.identity != "account" and policy.may(now.name, right)):
            return
        raise _without_right(now.name, right)
    except Refused as error:
        audit(open_store(home), "require", outcome="refused", right=right, what=what, reason=reason, why=error.message)
        raise


def require_of(home: Path, names: frozenset[str] | None, right: Right, *, what: str) -> None:
    """Raise Refused, and note it in the audit log, unless all of some persons have a right, or nobody asks for it.

    They stand behind something that goes on in another name; None: somebody does, and nobody can tell who.
    """
    policy = load_policy(home)
    lacking = sorted(name for name in names or () if not policy.may(name, right))
    if not policy.asks(right) or (names is not None and not lacking):
        return
    error = (
        _without_right(lacking[0], right)
        if lacking
        else Refused(
            f"it is not known who handed this run to the platform, and it would {right}",
            remedy=f"Have somebody who may {right} approve it (approval.before_deploy), or run it.",
        )
    )
    audit(open_store(home), "require", outcome="refused", right=right, what=what, why=error.message)
    raise error


def add_person(home: Path, name: str, may: Rights) -> str:
    """Let somebody in; returns the new token. The first person gets every right, for somebody must be able to add others."""

    def change(policy: Policy | None) -> Policy:
        if policy and name in policy.persons:
            raise ValueError(f"{name} is in the policy already; `headway person renew {name}` makes a new token")
        person = Person(may=may if policy else RIGHTS, token=hashed(token))
        return _with(policy or Policy(), {**(policy.persons if policy else {}), name: person})

    token = new_token()
    _change(home, change)
    return token


def renew_person(home: Path, name: str) -> str:
    """A new token for somebody; the old one ends. Raises Unknown."""

    def change(policy: Policy | None) -> Policy:
        known = _known(policy, name)
        return _with(known, {**known.persons, name: known.persons[name].model_copy(update={"token": hashed(token)})})

    token = new_token()
    _change(home, change)
    return token


def remove_person(home: Path, name: str) -> None:
    """Take somebody out. Raises Unknown, and ValueError when nobody would be left who may change the policy."""

    def change(policy: Policy | None) -> Policy:
        known = _known(policy, name)
        left = {other: person for other, person in known.persons.items() if other != name}
        if not any("override" in person.may for person in left.values()):
            raise ValueError(f"without {name} nobody could change the policy; to do without a policy, delete its file")
        return _with(known, left)

    _change(home, change)


def load_or_none(home: Path) -> Policy | None:
    """The policy of a home; None where there is none. Raises Refused."""
    path, named = policy_file(home)
    try:
        with open(path, "rb") as file:
            # What others may write is not a policy.
            result = os.fstat(file.fileno())
            if result.st_uid != os.geteuid() or stat.S_IMODE(result.st_mode) & 0o077:
                raise Refused(
                    f"the policy {path} must be a file of {account()}, with access for nobody else: nothing is allowed",
                    remedy=f"See who changed it, then: chown {account()} {path} && chmod 600 {path}",
                )
            return _parse(path, file.read())
    except (FileNotFoundError, NotADirectoryError):  # of the second kind there is no home either
        if named:
            raise Refused(
                f"HEADWAY_POLICY names {path}, and there is no such file: nothing is allowed",
                remedy="Correct HEADWAY_POLICY, or unset it: then the home's own is asked; `headway person add NAME` makes one.",
            ) from None
        return None
    except OSError as error:
        raise Refused(f"the policy {path} cannot be read ({error.strerror}): nothing is allowed") from error


def _parse(path: Path, data: bytes) -> Policy:
    try:
        return Policy.model_validate(yaml.safe_load(data.decode()))
    except ValidationError as error:
        text = explain(error, Policy, values=False)  # a token may stand where another value should
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)  # the error's own words show the line itself
        text = f"it is not YAML{f', at line {mark.line + 1}' if mark else ''}"
    raise Refused(
        f"the policy {path} is damaged, so nothing is allowed: {text}",
        remedy="Correct the file, or restore it from a backup; its format is in docs/access.md.",
    )


def _without_right(name: str, right: Right) -> Refused:
    where = f"to `{name}` under automatic" if name in AUTOMATIC else f"to `may` of {name}"
    return Refused(
        f"{name} may not {right.replace('_', ' ')}",
        remedy=f"Ask somebody who may, or have {right} added {where} in the policy.",
    )


def _identify(store: Store, policy: Policy, name: str, token: str) -> None:
    """Raise Refused unless name and token belong together. Wrong tokens are counted by name, all unknown names as one."""
    if not name or not token:
        raise Refused(
            "the policy asks who you are: a name and its token",
            remedy="--as NAME (or HEADWAY_PERSON), and the token in HEADWAY_TOKEN or typed when you are asked for it.",
        )
    key = f"tries/{name if name in policy.persons else '-unknown'}.json"
    before = store.read(key)
    try:
        output = json.loads(before.data if before else b"")
        wrong, last = int(output["wrong"]), float(output["time"])
    except (ValueError, TypeError, KeyError, OverflowError):  # nobody is locked out by what cannot be read
        wrong, last = 0, 0.0
    since = time.time() - last
    wait = _wait(wrong, since)
    if wait > 0:
        if since < 0:  # a clock that was set back, or somebody who wrote to the store: the wait is counted from now on
            _note_tries(store, key, wrong)
        raise Refused(f"too many wrong tokens for {name[:64]!r}: wait {math.ceil(wait)} s", remedy="Then try again.")
    try:
        policy.person(name, token)
    except Refused:
        _note_tries(store, key, wrong + 1)
        raise
    if wrong:
        _note_tries(store, key, 0)


def _wait(wrong: int, since: float) -> float:
    """Seconds until the next try is looked at; `since` is negative after a clock was set back, and makes nobody wait longer."""
    if wrong < FREE_TRIES:
        return 0.0
    pause = min(2.0 ** min(wrong - FREE_TRIES + 1, 10), LONGEST_WAIT_SECONDS)
    return min(pause - since, pause)


def _note_tries(store: Store, key: str, wrong: int) -> None:
    now = store.read(key)
    data = json.dumps({"wrong": wrong, "time": time.time()}).encode()
    store.replace(key, data, etag=now.etag if now else None)


def _known(policy: Policy | None, name: str) -> Policy:
    if policy is None or name not in policy.persons:
        hint = f"There are: {', '.join(policy.persons)}." if policy else "There is no policy: everybody may everything."
        raise Unknown(f"the policy knows no {name!r}", remedy=hint)
    return policy


def _with(policy: Policy, persons: dict[str, Person]) -> Policy:
    return Policy.model_validate({**policy.model_dump(by_alias=True), "persons": persons})


def _change(home: Path, change: Callable[[Policy | None], Policy]) -> None:
    """Write the policy anew, whole or not at all, for its owner only; two changes at once happen one after the other."""
    path, _ = policy_file(home)
    with locked(home / "locks" / "policy"):
        changed = change(load_or_none(home) if path.exists() else None)
        text = HEAD + yaml.safe_dump(changed.model_dump(mode="json", by_alias=True), sort_keys=False)
        write_text(path, text)
