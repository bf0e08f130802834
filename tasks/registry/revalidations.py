"""When champions were measured again on new data, and with which verdict: kept in the store, asked by alerts."""

from __future__ import annotations

import json
import time
from typing import Any

from tasks.registry.journal import StoreJournal
from tasks.storage.store import Store


def note_revalidation(journal: StoreJournal, model: str, verdict: dict[str, Any]) -> None:
    """Note what became of a revalidation. `verdict` has at least `champion`, its reference, and `passed`."""
    journal.append(f"revalidations/{model}", {**verdict, "time": time.time()})


def last_revalidated(store: Store, model: str) -> float | None:
    """When the champion of a model last passed, else when it became champion, in seconds since the epoch; None without one."""
    document = store.read(f"refs/{model}/champion.json")
    if document is None:
        return None
    champion = json.loads(document.data)
    journal = StoreJournal(store)
    for key in reversed(journal.list(f"revalidations/{model}")):
        verdict = journal.get(key)
        if verdict and verdict["passed"] and verdict["champion"] == champion["target"]:
            return float(verdict["time"])
    return float(champion["time"])


def champions(store: Store) -> list[str]:
    """Names of all models that have a champion."""
    keys = store.list("refs")
    return [key.removeprefix("refs/").removesuffix("/champion.json") for key in keys if key.endswith("/champion.json")]
