"""The store of the home: every new current version of a dataset becomes one event `dataset.published`.

Known by the numbered documents of tasks/storage/history.py, which are listed; only new ones are read. A version is told of once,
by its number in the history. A rollback tells nothing: the models were already held against that data when it was new. Nor does
what validation left of a dataset, which is asked for by its version only, nor a restored backup, nor a deletion.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from deployments.services import bridge
from tasks.common.process import read_json, write_text
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.storage import open_store
from tasks.storage.history import Change
from tasks.storage.store import Store

HISTORY = "history/dataset"
LOCAL_EVERY_SECONDS = 1.0
REMOTE_EVERY_SECONDS = 15.0
"""Time between two listings of a store in Azure: each is a request, or one for 5,000 changes."""


class StoreHistory:
    """Looks at the histories. State: when it last looked; how far it got is in `events/store.json` of the home."""

    def __init__(self, home: Path, ledger: Ledger) -> None:
        self.home, self.ledger = home, ledger
        self._last = float("-inf")

    def tick(self, now: float) -> None:
        """Tell of what is new since the last look, after a restart too. At the very first one, all is known that is older than
        this start of the bridge.

        Raises Missing while the store is away.
        """
        store = open_store(self.home)
        every = LOCAL_EVERY_SECONDS if store.uri.startswith("file:") else REMOTE_EVERY_SECONDS
        if 0 <= now - self._last < every:
            return
        self._last = now
        kept = read_json(self._book) or {}
        existing = numbers(store)
        known: dict[str, int] = kept[store.uri] if store.uri in kept else _older(store, existing, self._since())
        if news := [event for event in _news(store, known, existing) if not self.ledger.knows(event)]:
            self.ledger.receive_all(news)
        newest = {**known, **{name: item[-1] for name, item in existing.items()}}
        if newest != kept.get(store.uri):
            write_text(self._book, json.dumps({**kept, store.uri: newest}))

    def _since(self) -> float:
        """When this bridge was started: what is published while it still comes up is news."""
        part = bridge.status(self.home)
        return float(part["since"]) if part else math.inf

    @property
    def _book(self) -> Path:
        return self.home / "events" / "store.json"


def numbers(store: Store) -> dict[str, list[int]]:
    """The numbers of all changes of each dataset, in order; by a listing alone."""
    result: dict[str, list[int]] = {}
    for key in store.list(HISTORY):
        name, _, document = key.removeprefix(f"{HISTORY}/").partition("/")
        number = document.removesuffix(".json")
        if number.isdecimal():
            result.setdefault(name, []).append(int(number))
    return {name: sorted(each) for name, each in result.items()}


def read_change(store: Store, name: str, number: int) -> Change | None:
    """A change of a dataset by its number."""
    document = store.read(_key(name, number))
    return Change.model_validate_json(document.data) if document else None


def published(store: Store, name: str, change: Change) -> Event:
    """What a change that published a version is to the ledger, whoever tells of it."""
    return Event(
        name="dataset.published",
        subject=f"dataset/{name}",
        source=store.uri,
        identity=_key(name, change.number),
        object=f"dataset/{name}@{change.version}",
        occurred=change.time,
        channel="store",
        data={"action": change.action, "who": change.who},
    )


def _news(store: Store, known: dict[str, int], existing: dict[str, list[int]]) -> list[Event]:
    fresh = [(name, each) for name, item in existing.items() for each in item if each > known.get(name, 0)]
    changes = ((name, read_change(store, name, number)) for name, number in fresh)
    entries = [(name, change) for name, change in changes if change and _tells(change)]
    return [published(store, name, change) for name, change in entries]


def _older(store: Store, existing: dict[str, list[int]], since: float) -> dict[str, int]:
    """The last number of each dataset that was written before a time."""
    known = {}
    for name, item in existing.items():
        changes = ((number, read_change(store, name, number)) for number in reversed(item))
        known[name] = next((number for number, change in changes if change and change.time < since), 0)
    return known


def _tells(change: Change) -> bool:
    return change.current and change.action in ("publish", "copy")


def _key(name: str, number: int) -> str:
    return f"{HISTORY}/{name}/{number:08d}.json"
