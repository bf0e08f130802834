"""Refs: names that move, by compare-and-set, each move in the audit log before it happens.

`refs/MODEL/champion` names the model version that serves as the measure for the next one; it also knows the champions before it,
so `previous` needs no ref of its own and is never wrong. `refs/MODEL/challenger` is what was exported last and not promoted.

Values in the store that outlive the process that wrote them: records of done stages, and the journal of their jobs.

`records/STAGE/KEY.json` says what a key gave, which decides what is reused; plain fields, no class names. What a key is made of:
docs/DESIGN.md, "Stage".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.common.claims import Claims
from tasks.common.errors import Conflict
from tasks.security.audit import audited, entries
from tasks.storage.store import Document, Store

SCHEMA = "headway/record/1"


class Record(BaseModel):
    """One finished stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    key: str
    arguments: dict[str, Any]
    """What the key is the digest of: stage, its version, positional arguments."""
    inputs: tuple[str, ...]
    context: tuple[str, ...]
    outputs: tuple[str, ...]
    value: dict[str, Any]
    """The returned artifact, gate or endpoint."""
    metrics: dict[str, float]
    seconds: float
    created: float
    """Seconds since 1970, UTC."""
    flow_run: str | None = None
    run: str | None = None
    """Identity of the stage run in the lineage spool; MLflow's run has it as tag `headway.run`."""
    job: dict[str, Any] | None = None


def load(store: Store, stage: str, key: str) -> Record | None:
    """The record of a key, when there is one that this Headway can read."""
    document = store.read(_path(stage, key))
    if not document:
        return None
    value = json.loads(document.data)
    return Record.model_validate(value) if value.pop("schema", None) == SCHEMA else None


def save(store: Store, record: Record) -> None:
    """Write a record; a second run of the same key replaces the first one's."""
    data = json.dumps({"schema": SCHEMA, **record.model_dump(mode="json")}, indent=1).encode()
    path = _path(record.stage, record.key)
    while True:
        now = store.read(path)
        if store.replace(path, data, etag=now.etag if now else None):
            return


def newest(store: Store, stage: str, *, of: Callable[[Record], bool] = lambda record: True) -> Record | None:
    """The record of a stage, of those that `of` takes, that was written last: for estimates, and to say what changed since."""
    keys = [path.rpartition("/")[2].removesuffix(".json") for path in store.list(f"records/{stage}")]
    results = [record for key in keys if (record := load(store, stage, key)) and of(record)]
    return max(results, key=lambda record: record.created, default=None)


def age_hours(record: Record) -> float:
    return (time.time() - record.created) / 3600


def _path(stage: str, key: str) -> str:
    return f"records/{stage}/{key}.json"


# A journal of JSON values in the store, create-only: intents, handles and ends outlive the process that wrote them.


class StoreJournal:
    """What tasks/compute and tasks/serving are handed to remember by."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.claims: Claims | None = store.claims

    def put(self, key: str, value: dict[str, Any]) -> bool:
        return self._store.create(f"journal/{key}.json", json.dumps(value, indent=1).encode())

    def get(self, key: str) -> dict[str, Any] | None:
        document = self._store.read(f"journal/{key}.json")
        return json.loads(document.data) if document else None

    def list(self, prefix: str) -> list[str]:
        results = self._store.list(f"journal/{prefix}")
        return [key.removeprefix("journal/").removesuffix(".json") for key in results]

    def append(self, prefix: str, value: dict[str, Any]) -> None:
        """Write a value under the next free number of a prefix."""
        number = len(self.list(prefix)) + 1
        while not self.put(f"{prefix}/{number:06d}", value):
            number += 1


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
    past = _past([*_earlier(payload), *([before] if before else ())], target, back=back)
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


def _past(past: list[str], target: str, *, back: bool) -> list[str]:
    """The champions before the target, oldest first. Going back takes off what is undone, so going back twice goes further."""
    if back:
        return past[: past.index(target)] if target in past else past[:-1]
    return [ref for ref in past if ref != target][-MOST_PAST:]


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
