"""Refs: names that move, by compare-and-set, each move in the audit log before it happens.

`refs/MODEL/champion` names the model version that serves as the measure for the next one; it also knows the champions before it,
so `previous` needs no ref of its own and is never wrong. `refs/MODEL/challenger` is what was exported last and not promoted.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from tasks.common.errors import Conflict
from tasks.security.audit import audited, entries
from tasks.storage.store import Document, Store

MOST_PAST = 50
"""Champions that a champion's ref remembers."""
Alias = Literal["champion", "challenger", "previous"]


def read_ref(store: Store, name: str) -> str | None:
    """What a ref points to, for example model/NAME@VERSION."""
    return target_of(place_of(store, name))


def target_of(place: Document | None) -> str | None:
    """What a ref pointed to where it stood."""
    target = _told(place).get("target")
    return str(target) if target else None


def made_from(store: Store, name: str) -> list[str]:
    """What the target of a ref was made from, as noted when the ref moved: known even when the target is deleted."""
    return list(_told(place_of(store, name)).get("inputs", ()))


def place_of(store: Store, name: str) -> Document | None:
    """Where a ref stands now, for `move_ref` to move it from there and from nowhere else."""
    return store.read(f"refs/{name}.json")


def aliases(store: Store, model: str) -> dict[Alias, str]:
    """The references that a model's names stand for now; names that stand for nothing are left out.

    `previous` is the champion before, and after a rollback the one before that: it is what one would go back to.
    """
    champion, challenger = _told(place_of(store, f"{model}/champion")), read_ref(store, f"{model}/challenger")
    now, past = champion.get("target"), _earlier(champion)
    result: dict[Alias, str] = {"champion": str(now)} if now else {}
    if challenger and challenger != now:
        result["challenger"] = challenger
    return result | ({"previous": str(past[-1])} if past else {})


def champions(store: Store, model: str) -> set[str]:
    """Every version of a model that is or was its champion, by the ref and by the audit log."""
    ref = f"{model}/champion"
    payload = _told(place_of(store, ref))
    results = {payload.get("target"), *_earlier(payload)}
    moves = (one for one in entries(store) if one.action == "move_ref" and one.outcome == "done")
    for move in moves:
        if move.what == f"refs/{ref}":
            results |= {move.after, move.before}
    return {str(one) for one in results if one}


def move_ref(
    store: Store,
    name: str,
    target: str,
    *,
    inputs: tuple[str, ...],
    reason: str,
    back: bool = False,
    start: Document | Literal["now"] | None = "now",
) -> str | None:
    """Point a ref to another artifact, noting what that was made from; returns what it pointed to before.

    `back`: what it points to until now is taken back, and is no `previous` of anything. `start` is where the caller saw it stand
    (`place_of`), when something was decided on that.

    Raises Conflict when somebody else moved it since: one of two promotions wins, and the other is told.
    """
    document = place_of(store, name) if start == "now" else start
    payload = _told(document)
    before = str(payload["target"]) if payload.get("target") else None
    if before == target:
        return before
    past = [*_earlier(payload), *([before] if before else ())]
    if back:  # takes off what is undone, so going back twice goes further
        past = past[: past.index(target)] if target in past else past[:-1]
    else:
        past = [ref for ref in past if ref != target][-MOST_PAST:]
    output = {"target": target, "inputs": inputs, "before": before, "past": past, "time": time.time()}
    # Written down here; whether somebody has it was asked by whoever calls (docs/access.md).
    what, right = f"refs/{name}", "run" if name.endswith("/challenger") else "promote"
    with audited(store, "move_ref", right=right, what=what, ref=name, before=before, after=target, reason=reason):
        if not store.replace(
            f"refs/{name}.json", json.dumps(output).encode(), etag=document.etag if document else None
        ):
            raise Conflict(
                f"refs/{name} was moved by somebody else at the same time, and stays where they put it",
                remedy=f"`headway audit-log --what {name}` says who and why; the same command again moves it from there.",
            )
    if name.endswith("/champion"):
        _no_challenger(store, name.removesuffix("/champion"), target)
    return before


def _earlier(payload: dict[str, Any]) -> list[str]:
    """Of a ref that an older release moved, only what it pointed to before is known."""
    return list(payload["past"]) if "past" in payload else [payload["before"]] if payload.get("before") else []


def _no_challenger(store: Store, model: str, promoted: str) -> None:
    """What was promoted challenges nobody, also when it is taken back later. One that was exported meanwhile stays."""
    document = place_of(store, f"{model}/challenger")
    payload = _told(document)
    if document and payload.get("target") == promoted:
        data = json.dumps({**payload, "target": None, "inputs": [], "before": promoted, "time": time.time()}).encode()
        store.replace(f"refs/{model}/challenger.json", data, etag=document.etag)


def _told(document: Document | None) -> dict[str, Any]:
    return dict(json.loads(document.data)) if document else {}
