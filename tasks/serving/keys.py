"""The API keys of an endpoint: make, list, revoke. A key is shown once; `keys.json` in the endpoint's folder keeps hashes only.

Whoever stands before the model reads that file again when it changes: tasks/jobs/serving/api_middleware.py. Headway's own
commands have a key of their own, `own.key`, made with the first one. A key is 256 random bits, so one sha256 of it says as little
as a slow hash would, and is looked up in no time.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tasks.common.errors import IntegrityError, Unknown
from tasks.common.process import locked, write_text
from tasks.common.seal import opened, sealed
from tasks.config.access import LOOPBACK, AccessConfig, require_asked

SCHEMA = "headway/keys/1"
PREFIX = "hwk_"
OWN = "headway"
"""The caller that Headway's own commands are, where keys are asked for."""


@dataclass(frozen=True)
class Key:
    """One key, as far as it is kept."""

    id: str
    """By which it is named and revoked; no secret."""
    caller: str
    """Whose it is: limits are counted by this name, over all keys of it."""
    sha256: str
    created: float
    """Seconds since the epoch."""
    revoked: float | None = None


@dataclass(frozen=True)
class Keys:
    """The keys of one endpoint. Once there was one, every caller must show one: also when all are revoked."""

    keys: tuple[Key, ...] = ()
    by_hash: dict[str, Key] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_hash", {key.sha256: key for key in self.keys if key.revoked is None})

    def caller(self, shown: str) -> str | None:
        """Whose key was shown; None for one that is unknown or revoked."""
        result = self.by_hash.get(hashed(shown))
        return result.caller if result else None


def new_key() -> str:
    """A key, to be shown once."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def read(text: str) -> Keys:
    """The keys of a file's text. Raises ValueError for what is no such file, and for a damaged one."""
    try:
        output = json.loads(opened(text.encode(), where="it"))
        if output["schema"] != SCHEMA:
            raise ValueError(f"its schema is {output['schema']!r}, and this release reads {SCHEMA!r}")
        return Keys(tuple(Key(**one) for one in output["keys"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no file of keys: {error!r}") from error
    except IntegrityError as error:
        raise ValueError(error.message) from error


def written(keys: Keys) -> str:
    """The text of the file."""
    text = json.dumps({"schema": SCHEMA, "keys": [asdict(key) for key in keys.keys]}, indent=1)
    return sealed(text.encode()).decode()


def keys_file(folder: Path) -> Path:
    """Where an endpoint's keys are kept; it is not there before the first one."""
    return folder / "keys.json"


def require_guarded(access: AccessConfig, folder: Path) -> None:
    """Raise ValueError for an address that others reach, and where an endpoint's gateway would ask nothing of them."""
    require_asked(access, access.host not in LOOPBACK and bool(read_keys(folder).keys))


def read_keys(folder: Path) -> Keys:
    """The keys of an endpoint. Raises ValueError for a file that is damaged: it is not made anew, for that let nobody out."""
    try:
        return read(keys_file(folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Keys()
    except ValueError as error:
        raise ValueError(
            f"{keys_file(folder)} cannot be read: {error}; correct it, or restore it from a backup"
        ) from error


def add_key(folder: Path, caller: str) -> tuple[Key, str]:
    """A new key for a caller: what is kept of it, and the key itself, which nobody can show again."""
    if caller == OWN:
        raise ValueError(f"the caller {OWN!r} is Headway itself: name whose key it is")
    own_key(folder, always=True)
    return _add(folder, caller)


def revoke_key(folder: Path, key_id: str) -> Key:
    """End a key, within a second. Raises Unknown for one that is not there, or ended before."""
    results: list[Key] = []

    def change(keys: Keys) -> Keys:
        results.extend(key for key in keys.keys if key.id == key_id and key.revoked is None)
        if not results:
            raise Unknown(
                f"there is no key {key_id!r}", remedy="`headway endpoint key list NAME` shows those there are."
            )
        ended = {key.id: replace(key, revoked=time.time()) for key in results}
        return Keys(tuple(ended.get(key.id, key) for key in keys.keys))

    _change(folder, change)
    return results[0]


def own_key(folder: Path, *, always: bool = False) -> str:
    """The key of Headway's own commands; empty where none is asked for, unless one is wanted `always`."""
    path = folder / "own.key"
    keys = read_keys(folder)
    kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if kept and keys.caller(kept) == OWN:
        return kept
    if not keys.keys and not always:
        return ""
    _, made = _add(folder, OWN)
    write_text(path, made)
    return made


def _add(folder: Path, caller: str) -> tuple[Key, str]:
    shown = new_key()
    key = Key(id=f"key-{secrets.token_hex(4)}", caller=caller, sha256=hashed(shown), created=time.time())
    _change(folder, lambda keys: Keys((*keys.keys, key)))
    return key, shown


def _change(folder: Path, change: Callable[[Keys], Keys]) -> None:
    with locked(folder / "keys.lock"):
        write_text(keys_file(folder), written(change(read_keys(folder))))
