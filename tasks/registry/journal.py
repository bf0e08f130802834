"""A journal of JSON values in the store, create-only: intents, handles and ends outlive the process that wrote them."""

from __future__ import annotations

import json
from typing import Any

from tasks.storage.store import Store


class StoreJournal:
    """What tasks/compute and tasks/serving are handed to remember by."""

    def __init__(self, store: Store) -> None:
        self._store = store

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
