"""Whose signatures count: a file that names keys, what each may sign, and which are revoked. Without it, the home's own key.

A trust policy that others may write, or that is damaged, trusts nobody. A revoked key counts for nothing that it ever signed:
the time in a statement is the signer's own word, and whoever stole a key writes what they like. How signatures are checked is
tasks/signing; against what, signatures.py. See docs/trust.md.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import Field, ValidationError

from tasks.common.errors import IntegrityError, Refused, Unknown
from tasks.common.process import locked, write_text
from tasks.common.validation import explain
from tasks.config.base import Name, Settings, trust_file
from tasks.signing.keys import LocalKey, Signer, ensure_key, key_id, load_public_key, parse_public_key, pem_of
from tasks.storage.settings import Identity

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec


OWN = "home"
"""What the home's own key is called."""
HEAD = "# Whose signatures count: docs/trust.md. `headway trust` changes this file; comments below this line are lost then.\n"
Pattern = Annotated[str, Field(pattern=r"^(\*|model|checkpoint)/[a-z0-9*?._-]+$")]
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1)]


class Untrusted(IntegrityError):
    """A signature whose key the trust policy does not know, has revoked, or does not let sign this."""


class Revoked(Settings):
    """That a key counts no more."""

    reason: Annotated[str, Field(min_length=1)]
    since: date
    """When it became known. Nothing is decided by it: everything that the key signed is refused."""
    by: str | None = None
    """Who revoked it, as the audit log names them."""

    def __str__(self) -> str:
        return f"since {self.since}{f' by {self.by}' if self.by else ''}: {self.reason}"


class TrustedKey(Settings):
    """One key."""

    public_key: str
    """PEM text, or a path to it from the folder of this file."""
    may_sign: Patterns
    """KIND/NAME with * and ?: model/codeparrot*, checkpoint/*, */*."""
    revoked: Revoked | None = None


class SignWith(Identity):
    """The key that this home signs with."""

    key: str
    """A path to a private key (PEM) from the folder of this file, or https://VAULT.vault.azure.net/keys/NAME[/VERSION]."""


class TrustFile(Settings):
    """The file."""

    sign_with: SignWith | None = None
    """Without it, the home's own key."""
    keys: dict[Name, TrustedKey] = Field(default={})


@dataclass(frozen=True)
class Held:
    """A key of the policy."""

    name: str
    id: str
    key: ec.EllipticCurvePublicKey
    may_sign: tuple[str, ...]
    revoked: Revoked | None


def held_keys(home: Path) -> list[Held]:
    """Every key that the trust policy of a home names, revoked ones too. Raises Refused when the policy cannot be trusted."""
    path, _ = trust_file(home)
    file = load_or_none(home)
    if file is None:
        own = _own_key(home)
        return [Held(OWN, key_id(own), own, ("*/*",), None)] if own else []
    return [_held(path, name, entry) for name, entry in file.keys.items()]


def trusted_key(home: Path, wanted: str, artifact: str) -> ec.EllipticCurvePublicKey:
    """The key of this id, when it may sign `artifact` (KIND/NAME). Raises Untrusted when not, and Refused."""
    held = [one for one in held_keys(home) if one.id == wanted]
    if not held:
        raise Untrusted(
            f"the trust policy does not know the key {wanted[:16]}",
            remedy="`headway trust list` shows the keys that count, `headway trust add` lets one in.",
        )
    for one in held:
        if one.revoked:
            raise Untrusted(
                f"the key {one.name} ({wanted[:16]}) is revoked {one.revoked}",
                remedy="Sign what you vouch for again with another key: see sign_with in docs/trust.md.",
            )
    if not any(fnmatch.fnmatchcase(artifact, pattern) for one in held for pattern in one.may_sign):
        allowed = ", ".join(pattern for one in held for pattern in one.may_sign)
        raise Untrusted(
            f"the key {held[0].name} ({wanted[:16]}) may sign {allowed}, and not {artifact}",
            remedy="Have it signed by a key that may, or add to may_sign in the trust policy.",
        )
    return held[0].key


def signer_of(home: Path) -> Signer:
    """What this home signs with. Raises Missing, ValueError, and Refused when the trust policy cannot be trusted."""
    path, _ = trust_file(home)
    file = load_or_none(home)
    if file is None or file.sign_with is None:
        return LocalKey(ensure_key(home / "keys"))
    if file.sign_with.key.startswith("https://"):
        return vault_key(file.sign_with.key, file.sign_with)
    return LocalKey(path.parent / file.sign_with.key)


def vault_key(identifier: str, identity: Identity) -> Signer:
    """A key in Azure Key Vault, by the one credential that is named. Raises Missing, ValueError."""
    from tasks.signing.vault import VaultKey
    from tasks.storage.blob.credentials import token_credential

    return VaultKey(identifier, token_credential(identity, of=identifier))


def add_key(home: Path, name: str, key: ec.EllipticCurvePublicKey, may_sign: tuple[str, ...]) -> None:
    """Let a key in. The first one makes the policy, in which the home's own key stays trusted for everything."""

    def change(file: TrustFile) -> TrustFile:
        path, _ = trust_file(home)
        known = [held.name for held in (_held(path, *each) for each in file.keys.items()) if held.id == key_id(key)]
        if name in file.keys or known:
            raise ValueError(f"the trust policy has this already: {', '.join({name} & set(file.keys) | set(known))}")
        return _with(file, name, {"public_key": pem_of(key).decode(), "may_sign": may_sign})

    _change(home, change)


def revoke_key(home: Path, name: str, reason: str, *, by: str | None = None) -> None:
    """Let a key count for nothing any more. Raises Unknown."""

    def change(file: TrustFile) -> TrustFile:
        if name not in file.keys:
            raise Unknown(f"the trust policy knows no key {name!r}", remedy=f"There are: {', '.join(file.keys)}.")
        revoked = file.keys[name].revoked or Revoked(reason=reason, since=datetime.now(UTC).date(), by=by)
        return _with(file, name, {**file.keys[name].model_dump(), "revoked": revoked.model_dump()})

    _change(home, change)


def load_or_none(home: Path) -> TrustFile | None:
    """The trust policy of a home; None where there is none. Raises Refused."""
    path, named = trust_file(home)
    try:
        return _parse(path, _read_private(path))
    except FileNotFoundError:
        if named:
            raise Refused(
                f"HEADWAY_TRUST names {path}, and there is no such file: no signature counts",
                remedy="Correct or unset HEADWAY_TRUST; `headway trust add` makes a trust policy.",
            ) from None
        return None
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}): no signature counts") from error


def _read_private(path: Path) -> bytes:
    """What others may write is no policy, and no key."""
    with open(path, "rb") as file:
        result = os.fstat(file.fileno())
        if result.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(result.st_mode) & 0o022:
            raise Refused(
                f"{path} can be written by others than you, so no signature counts",
                remedy=f"See who changed it, then: chmod go-w {path}",
            )
        return file.read()


class _Loader(yaml.SafeLoader):
    """A name that is written twice is an error: the second entry would undo the first one's revocation."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise yaml.YAMLError(f"{', '.join(map(str, twice))} is written twice")
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """A key is written as it looks in its own file."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _parse(path: Path, data: bytes) -> TrustFile:
    try:
        file = TrustFile.model_validate(yaml.load(data.decode(), _Loader) or {})
        for name, entry in file.keys.items():
            _held(path, name, entry)
    except ValidationError as error:
        output = explain(error, TrustFile)
    except (yaml.YAMLError, ValueError, OSError) as error:
        output = str(error)
    else:
        return file
    raise Refused(
        f"the trust policy {path} is damaged, so no signature counts: {output}",
        remedy="Correct the file, or restore it from a backup; its format is in docs/trust.md.",
    )


def _held(path: Path, name: str, entry: TrustedKey) -> Held:
    text = entry.public_key
    data = text.encode() if "-----BEGIN" in text else _read_private(path.parent / text)
    key = parse_public_key(data, f"the key {name}")
    return Held(name, key_id(key), key, entry.may_sign, entry.revoked)


def _own_key(home: Path) -> ec.EllipticCurvePublicKey | None:
    """By the private key where it is: its public half beside it could have been put there by anybody."""
    private, public = home / "keys" / "signing.pem", home / "keys" / "signing.pub"
    if private.exists():
        return LocalKey(private).public_key()
    return load_public_key(public) if public.exists() else None


def _with(file: TrustFile, name: str, entry: dict[str, Any]) -> TrustFile:
    try:
        return TrustFile.model_validate({**file.model_dump(), "keys": {**file.model_dump()["keys"], name: entry}})
    except ValidationError as error:
        raise ValueError(explain(error, TrustFile)) from error


def _change(home: Path, change: Callable[[TrustFile], TrustFile]) -> None:
    """Write the policy anew, whole or not at all; two changes at once happen one after the other."""
    path, _ = trust_file(home)
    with locked(home / "locks" / "trust"):
        before = load_or_none(home) if path.exists() else None
        if before is None:
            own = LocalKey(ensure_key(home / "keys")).public_key()
            before = TrustFile(keys={OWN: TrustedKey(public_key=pem_of(own).decode(), may_sign=("*/*",))})
        changed = change(before)
        text = HEAD + yaml.dump(changed.model_dump(mode="json", exclude_none=True), Dumper=_Dumper, sort_keys=False)
        write_text(path, text)
