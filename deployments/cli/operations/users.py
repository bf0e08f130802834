"""`headway person`: who may do what; and how every command that asks for it finds out who types. See docs/access.md.

The rules are tasks/security/policy.py. A token is never an option: other users of the machine see command lines.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import say
from tasks.common.errors import Refused
from tasks.common.home import home
from tasks.config.base import policy_file
from tasks.security.audit import acting, audited
from tasks.security.policy import (
    RIGHTS,
    Right,
    Rights,
    add_person,
    authorise,
    load_or_none,
    load_policy,
    remove_person,
    renew_person,
)
from tasks.storage import open_store

As = Annotated[
    str,
    typer.Option("--as", metavar="NAME", envvar="HEADWAY_PERSON", help="Your name, where the policy requires it."),
]
Reason = Annotated[
    str, typer.Option("--reason", help="The reason, for the audit log; required where the policy asks who you are.")
]

HistoryReason = Annotated[str, typer.Option("--reason", help="The reason, for the audit log and the history.")]


@contextmanager
def asked(right: Right, name: str, *, what: str, reason: str | None = None) -> Iterator[None]:
    """Do what is inside as the person who types, when the policy lets them. Raises Refused.

    `reason` is None for what needs none. The token is in HEADWAY_TOKEN, and is taken out of the environment; or it is typed.
    """
    token = os.environ.pop("HEADWAY_TOKEN", "")
    if not asks(right):
        yield
        return
    if reason is not None and not reason.strip():
        raise ValueError(f"say why: --reason TEXT goes into the audit log with {what}")
    if name and not token and sys.stdin.isatty():
        token = getpass.getpass(f"Token of {name}: ")
    with acting(authorise(home(), right, name, token, what=what, reason=reason or "")):
        yield


def asks(right: Right) -> bool:
    """Whether the policy asks; one that cannot be trusted does, and `authorise` says and notes why it refuses."""
    try:
        return load_policy(home()).asks(right)
    except Refused:
        return True


def add(
    name: Annotated[str, typer.Argument(help="The person's name: lower-case letters, digits, dot, dash.")],
    may: Annotated[
        list[str],
        typer.Option(
            help="Rights, separated by commas or one by one: publish, run, promote, approve, roll_back, override."
        ),
    ] = [],  # noqa: B006 typer copies it
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Add someone and print their token; it is shown only once. The first person creates the policy, and gets every right."""
    first = load_or_none(home()) is None
    rights: Rights = RIGHTS
    if not first:
        wanted = [word.strip() for word in ",".join(may).split(",") if word.strip()]
        wrong = [word for word in wanted if word not in RIGHTS]
        if wrong or not wanted:
            what = f"{', '.join(wrong)}: no such right" if wrong else "say what they may do"
            raise ValueError(f"{what}; --may takes some of {', '.join(RIGHTS)}, with commas")
        rights = tuple(right for right in RIGHTS if right in wanted)
    with asked("override", as_, what=f"add person {name}"), _noted("add person", f"{name} may {', '.join(rights)}"):
        token = add_person(home(), name, rights)
    if first:
        _tell(
            f"{name} is the first person of the policy, so {name} may everything: somebody must be able to add others."
        )
        _tell("From now on commands ask who you are: --as NAME, and the token in HEADWAY_TOKEN or typed.")
    _say_token(name, rights, token, as_json)


def renew(name: Annotated[str, typer.Argument()], as_: As = "", as_json: Json = False) -> None:
    """Give someone a new token and print it; it is shown only once. The old token stops working."""
    with asked("override", as_, what=f"renew person {name}"), _noted("renew person", name):
        token = renew_person(home(), name)
    _say_token(name, load_policy(home()).persons[name].may, token, as_json)


def remove(name: Annotated[str, typer.Argument()], as_: As = "", as_json: Json = False) -> None:
    """Remove someone. Their token stops working at once, also for their running flows."""
    with asked("override", as_, what=f"remove person {name}"), _noted("remove person", name):
        remove_person(home(), name)
    say({"person": name, "removed": True}, f"{name} is out", as_json=as_json)


def list_(as_json: Json = False) -> None:
    """List persons and their rights, and which rights the policy asks for."""
    policy = load_or_none(home())
    if policy is None:
        fields: dict[str, Any] = {"policy": None, "asks": [], "persons": [], "automatic": {}}
        words = "There is no policy: everybody may everything. `headway person add NAME` makes one."
        return say(fields, words, as_json=as_json)
    persons = [{"person": name, "may": list(one.may)} for name, one in policy.persons.items()]
    asks = [right for right in RIGHTS if policy.asks(right)]
    path = str(policy_file(home())[0])
    automatic = {name: list(rights) for name, rights in policy.automatic.items()}
    lines = [f"{one['person']:<20}{', '.join(one['may'])}" for one in persons]
    lines += [f"{name:<20}{', '.join(rights)}   (no person)" for name, rights in automatic.items()]
    lines += [f"asked for: {', '.join(asks)}   in {path}"]
    return say(
        {"policy": path, "asks": asks, "persons": persons, "automatic": automatic}, "\n".join(lines), as_json=as_json
    )


@contextmanager
def _noted(action: str, what: str) -> Iterator[None]:
    """Change the policy inside, with an entry in the audit log before."""
    with audited(open_store(home()), action, right="override", what=what):
        yield


def _say_token(name: str, may: Rights, token: str, as_json: bool) -> None:
    """The token alone on stdout, so that it can go into a file; the words about it on stderr."""
    _tell(f"{name} may {', '.join(may)}. The token, shown this once (only a hash of it is kept):")
    say({"person": name, "may": list(may), "token": token}, token, as_json=as_json)


def _tell(words: str) -> None:
    print(words, file=sys.stderr)
