"""Values in the store that outlive the process that wrote them: records of done stages, and the journal of their jobs.

`records/STAGE/KEY.json` says what a key gave, which decides what is reused; plain fields, no class names. What a key is made of:
docs/DESIGN.md, "Stage".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.common.claims import Claims
from tasks.storage.store import Store

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
