"""`headway endpoint key`: who may ask an endpoint. A key is shown once; what is kept is a hash. See docs/endpoint.md."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Json
from deployments.cli.output import say
from tasks.common.home import home
from tasks.security.audit import audited
from tasks.serving.keys import add_key, read_keys, revoke_key
from tasks.storage import open_store

CALLER = r"[a-z0-9][a-z0-9._-]{0,62}"
Endpoint = Annotated[str, typer.Argument(help="Name of the endpoint.")]


def add(
    name: Endpoint,
    caller: Annotated[str, typer.Option("--caller", help="Whose key it is: lower case, digits, dot, dash.")],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Make a key, and print it, this once. From the first one on, the endpoint asks everybody for a key."""
    bare, folder = _folder(name)
    if not re.fullmatch(CALLER, caller):
        raise ValueError(f"--caller {caller!r} is no name: lower case letters, digits, dot and dash, at most 63")
    payload = {"right": "promote", "reason": reason, "after": caller}
    with (
        asked("promote", as_, what=f"make a key of endpoint/{bare} for {caller}", reason=reason),
        _told("make key", bare, payload),
    ):
        key, shown = add_key(folder, caller)
    fields = {"ref": f"endpoint/{bare}", "id": key.id, "caller": caller, "key": shown}
    say(fields, f"{shown}\n{key.id} of {caller}: keep the line above, it is not shown again", as_json=as_json)


def list_(name: Endpoint, as_json: Json = False) -> None:
    """List the keys of an endpoint, without what they are."""
    bare, folder = _folder(name)
    rows = [
        {"id": key.id, "caller": key.caller, "created": _utc(key.created), "revoked": _utc(key.revoked)}
        for key in read_keys(folder).keys
    ]
    words = [
        f"{r['id']:<16}{r['caller']:<24}{r['created']}  {r['revoked'] and 'revoked ' + r['revoked']}" for r in rows
    ]
    nothing = f"endpoint/{bare} asks for no key."
    say({"ref": f"endpoint/{bare}", "keys": rows}, "\n".join(words).rstrip() or nothing, as_json=as_json)


def revoke(
    name: Endpoint,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Of the key, as `list` shows it.")],
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """End a key. The endpoint knows within a second."""
    bare, folder = _folder(name)
    payload = {"right": "roll_back", "reason": reason, "before": key_id}
    with (
        asked("roll_back", as_, what=f"revoke {key_id} of endpoint/{bare}", reason=reason),
        _told("revoke key", bare, payload),
    ):
        key = revoke_key(folder, key_id)
    say(
        {"ref": f"endpoint/{bare}", "id": key.id, "caller": key.caller},
        f"{key.id} of {key.caller} is revoked",
        as_json=as_json,
    )


def _folder(name: str) -> tuple[str, Path]:
    from tasks.serving.known import require_known

    bare = require_known(home(), name)
    return bare, home() / "endpoints" / bare


def _told(action: str, bare: str, details: dict[str, str]) -> AbstractContextManager[object]:
    """An entry in the audit log around a change. No key is ever part of one."""
    return audited(open_store(home()), action, what=f"endpoint/{bare}", **details)


def _utc(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else ""
