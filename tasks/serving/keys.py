"""The API keys of an endpoint: make, list, revoke. A key is shown once; `keys.json` in the endpoint's folder keeps hashes only.

Whoever stands before the model reads that file again when it changes: tasks/jobs/serving/keys.py. Headway's own commands have a
key of their own, `own.key`, made with the first one. How keys look is tasks/formats/api_keys.py.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tasks.common.errors import Unknown
from tasks.common.process import locked, write_text
from tasks.config.access import LOOPBACK, AccessConfig, require_asked
from tasks.formats import api_keys
from tasks.formats.api_keys import OWN, Key, Keys


def keys_file(folder: Path) -> Path:
    """Where an endpoint's keys are kept; it is not there before the first one."""
    return folder / "keys.json"


def require_guarded(access: AccessConfig, folder: Path) -> None:
    """Raise ValueError for an address that others reach, and where an endpoint's gateway would ask nothing of them."""
    require_asked(access, access.host not in LOOPBACK and bool(read_keys(folder).keys))


def read_keys(folder: Path) -> Keys:
    """The keys of an endpoint. Raises ValueError for a file that is damaged: it is not made anew, for that let nobody out."""
    try:
        return api_keys.read(keys_file(folder).read_text(encoding="utf-8"))
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
    shown = api_keys.new_key()
    key = Key(id=f"key-{secrets.token_hex(4)}", caller=caller, sha256=api_keys.hashed(shown), created=time.time())
    _change(folder, lambda keys: Keys((*keys.keys, key)))
    return key, shown


def _change(folder: Path, change: Callable[[Keys], Keys]) -> None:
    with locked(folder / "keys.lock"):
        write_text(keys_file(folder), api_keys.written(change(read_keys(folder))))
