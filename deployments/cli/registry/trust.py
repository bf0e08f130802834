"""`headway trust`, `headway sign`: whose signatures count, and signing an artifact again. See docs/trust.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.cli.operations.users import As, asked
from deployments.cli.options import Json
from deployments.cli.output import in_home, say
from tasks.artifacts import parse_ref
from tasks.common.home import home
from tasks.config.base import trust_file
from tasks.security.audit import actor, audited
from tasks.security.policy import in_force
from tasks.security.signatures import KINDS
from tasks.security.signatures import sign as sign_artifact
from tasks.security.trust import Revoked, add_key, held_keys, load_or_none, revoke_key, vault_key
from tasks.signing.keys import key_id, load_public_key
from tasks.storage import open_store
from tasks.storage.manifest import require_intact
from tasks.storage.settings import Identity
from tasks.storage.store import find

Why = Annotated[str, typer.Option("--reason", help="The reason, for the audit log.")]


def list_(as_json: Json = False) -> None:
    """List the trusted keys, what each may sign, and the revoked keys."""
    file = load_or_none(home())
    keys: list[dict[str, Any]] = [
        {
            "name": one.name,
            "key": one.id,
            "may_sign": list(one.may_sign),
            "revoked": one.revoked.model_dump(mode="json") if one.revoked else None,
        }
        for one in held_keys(home())
    ]
    path = str(trust_file(home())[0]) if file else None
    signs = file.sign_with.key if file and file.sign_with else "the home's own key"
    words = []
    for one in keys:
        revoked = f"revoked {Revoked.model_validate(one['revoked'])}" if one["revoked"] else ""
        words.append(f"{one['name']:<20}{one['key'][:16]}  {revoked or ', '.join(one['may_sign'])}")
    words = words or [in_home("No key yet", "The first run makes it.")]
    words.append(f"signs here: {signs}" + (f"   in {path}" if path else "   (there is no trust.yaml)"))
    say({"trust": path, "keys": keys, "sign_with": signs}, words, as_json=as_json)


def add(
    name: Annotated[str, typer.Argument(help="The name of the key: lower-case letters, digits, dot, dash.")],
    key: Annotated[
        str, typer.Argument(help="A public key (PEM), or https://VAULT.vault.azure.net/keys/NAME[/VERSION].")
    ],
    may_sign: Annotated[
        str,
        typer.Option(help="Patterns of KIND/NAME with * and ?, separated by commas: 'model/codeparrot*,checkpoint/*'."),
    ],
    reason: Why = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Trust a key. The first one creates trust.yaml, in which the home's own key stays trusted."""
    patterns = tuple(word.strip() for word in may_sign.split(",") if word.strip())
    what = f"key {name} for {', '.join(patterns)}"
    with asked("override", as_, what=f"trust {what}", reason=_given(reason)):
        if not key.startswith("https://"):
            public = load_public_key(Path(key))
        else:
            file = load_or_none(home())
            public = vault_key(key, (file.sign_with if file else None) or Identity()).public_key()
        with _noted("trust key", what, reason, after=key_id(public)):
            add_key(home(), name, public, patterns)
    fields = {"name": name, "key": key_id(public), "may_sign": list(patterns)}
    say(fields, f"{name} ({fields['key'][:16]}) may sign {', '.join(patterns)}", as_json=as_json)


def revoke(
    name: Annotated[str, typer.Argument(help="`headway trust list` shows the names.")],
    reason: Why = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Revoke a key: neither new signatures nor those that it has made count any more."""
    with (
        asked("override", as_, what=f"revoke key {name}", reason=_given(reason)),
        _noted("revoke key", f"key {name}", reason),
    ):
        revoke_key(home(), name, reason, by=actor().name)
    words = f"{name} is revoked: what it signed counts no more. What you stand by: headway sign REF --reason TEXT"
    say({"name": name, "revoked": True}, words, as_json=as_json)


def sign(
    ref: Annotated[str, typer.Argument(help="KIND/NAME or KIND/NAME@VERSION, of a checkpoint or model.")],
    reason: Why = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Sign an artifact again with this home's key, after checking every byte of it. You vouch for where it comes from."""
    kind, name, version = parse_ref(ref)
    if kind not in KINDS:
        raise ValueError(
            f"{ref} is not signed here: checkpoints and models are; for a dataset: headway dataset publish --sign-key"
        )
    store = open_store(home())
    if len(version) < 64 and in_force(home()).digest:
        # Which version is the newest, or has these first digits, is what the store says: who may write to it is not who signs.
        raise ValueError(
            f"{ref} names no version: write the one that you vouch for, {ref}@DIGITS; `headway artifacts` lists them"
        )
    with asked("override", as_, what=f"sign {ref}", reason=_given(reason)):
        manifest = find(store, kind, name, version)
        require_intact(manifest, store.verify(manifest))
        statement = sign_artifact(store, home(), manifest, reason=reason)
    fields = {"ref": manifest.ref, "key": statement.key, "index": statement.index, "time": statement.time}
    say(fields, f"{manifest.ref} is signed by key {statement.key[:16]}", as_json=as_json)


def _given(reason: str) -> str:
    """The reason, which these commands ask of everybody: they decide what is believed from now on."""
    if not reason.strip():
        raise ValueError("say why: --reason TEXT goes into the audit log")
    return reason


def _noted(action: str, what: str, reason: str, **details: Any) -> Any:
    return audited(open_store(home()), action, right="override", what=what, reason=reason, **details)
