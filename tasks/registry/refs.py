"""Refs: names that move, by compare-and-set, each move in the audit log before it happens.

`refs/MODEL/champion` names the model version that serves as the measure for the next one.
"""

from __future__ import annotations

import json
import time

from tasks.errors import Conflict
from tasks.registry.audit import audited
from tasks.storage.store import Store


def read_ref(store: Store, name: str) -> str | None:
    """What a ref points to, for example model/NAME@VERSION."""
    document = store.read(f"refs/{name}.json")
    return str(json.loads(document.data)["target"]) if document else None


def made_from(store: Store, name: str) -> list[str]:
    """What the target of a ref was made from, as noted when the ref moved: known even when the target is deleted."""
    document = store.read(f"refs/{name}.json")
    return list(json.loads(document.data)["inputs"]) if document else []


def move_ref(store: Store, name: str, target: str, *, inputs: tuple[str, ...], reason: str) -> str | None:
    """Point a ref to another artifact, noting what that was made from; returns what it pointed to before.

    Raises Conflict when somebody else moved it at the same time: one of two promotions wins, and the other is told.
    """
    document = store.read(f"refs/{name}.json")
    before = str(json.loads(document.data)["target"]) if document else None
    if before == target:
        return before
    data = json.dumps({"target": target, "inputs": inputs, "before": before, "time": time.time()}).encode()
    what = f"refs/{name}"
    with audited(store, "move_ref", right="promote", what=what, ref=name, before=before, after=target, reason=reason):
        if not store.replace(f"refs/{name}.json", data, etag=document.etag if document else None):
            raise Conflict(
                f"refs/{name} was moved by somebody else at the same time, and stays where they put it",
                remedy=f"`headway audit-log --what {name}` says who and why; the same command again moves it from there.",
            )
    return before
