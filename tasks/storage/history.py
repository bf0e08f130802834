"""What became of the versions of a name: one numbered document a change, written only once, so the last one says what is current.

`history/KIND/NAME/NUMBER.json` in the store. Publishing does not live here (tasks/registry/versions.py), nor rolling back.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

Action = Literal["publish", "rollback", "copy", "restore", "delete"]


class Documents(Protocol):
    """The part of a store that keeps small documents; see store.py."""

    def read(self, key: str) -> Any: ...

    def create(self, key: str, data: bytes) -> bool: ...

    def list(self, prefix: str) -> list[str]: ...


class Change(BaseModel):
    """One change of a name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    number: int
    action: Action
    version: str
    current: bool = True
    """Whether the version became the current one; not so for a deletion, and for what validation leaves of a dataset."""
    before: str | None = None
    """The version that was current before."""
    time: float
    """Seconds since 1970, UTC."""
    who: str = ""
    host: str = ""
    flow_run: str | None = None
    reason: str = ""
    manifest: str = ""
    """Digest of the whole manifest that was published (`Manifest.digest`); empty where an older release wrote this."""
    entry: int | None = None
    """Number of the entry of the audit log that says so too."""
    entry_hash: str = ""
    """Hash of that entry."""


def changes(store: Documents, kind: str, name: str) -> list[Change]:
    """All changes of a name, oldest first."""
    return [change for key in store.list(_prefix(kind, name)) if (change := _read(store, key))]


def current(store: Documents, kind: str, name: str) -> str | None:
    """The version that is current after the newest change; None where no change is known."""
    keys = store.list(_prefix(kind, name))
    change = _read(store, keys[-1]) if keys else None
    return (change.version if change.current else change.before) if change else None


def published_as(store: Documents, kind: str, name: str, version: str) -> int:
    """Number of the newest change that published a version; 0 when none did: it was copied here, or is older than histories."""
    for key in reversed(store.list(_prefix(kind, name))):
        change = _read(store, key)
        if change and change.action == "publish" and change.version == version:
            return change.number
    return 0


def newest_publication(store: Documents, kind: str, name: str, version: str) -> Change | None:
    """The newest change that published a version."""
    result = (change for change in reversed(changes(store, kind, name)) if change.version == version)
    return next((change for change in result if change.action == "publish"), None)


def note_change(store: Documents, kind: str, name: str, *, action: Action, version: str, **output: Any) -> Change:
    """Write a change under the next number: of two that are made at once, one comes after the other."""
    while True:
        keys = store.list(_prefix(kind, name))
        number = int(keys[-1].rpartition("/")[2].removesuffix(".json")) + 1 if keys else 1
        before = current(store, kind, name)
        change = Change(number=number, action=action, version=version, before=before, time=time.time(), **output)
        if store.create(f"{_prefix(kind, name)}/{number:08d}.json", change.model_dump_json(indent=1).encode()):
            return change


def _read(store: Documents, key: str) -> Change | None:
    document = store.read(key)
    return Change.model_validate(json.loads(document.data)) if document else None


def _prefix(kind: str, name: str) -> str:
    return f"history/{kind}/{name}"
