"""What landed becomes a dataset version, and every new current version of a dataset becomes one event `dataset.published`.

A version is made of all files of a watched folder, or of all blobs below a prefix, once nothing more comes. The events wait in
the ledger until they name the event that they became, so a kill at any point does it again, and the same files are the same
version. What can never be published is noted on its events; what moves meanwhile is tried again. Watching is folders.py and
queues.py; fetching blobs is blobs.py.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.bridge.folders import UNFINISHED, Changed, look, place_of
from deployments.configuration.events import ContainerConfig, EventsConfig, FolderConfig
from deployments.publishing.datasets import make_dataset
from deployments.services.parts import bridge
from tasks.common.errors import HeadwayError
from tasks.common.process import read_json, write_text
from tasks.common.redaction import redact
from tasks.events.event import Event
from tasks.events.ledger import Ledger
from tasks.security.audit import acting
from tasks.security.policy import require
from tasks.storage import open_store
from tasks.storage.history import Change, published_as
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

if TYPE_CHECKING:
    from deployments.bridge.blobs import BlobCopies

ACTOR = "bridge"
"""Who publishes, in the audit log and for the policy."""
LONGEST_WAIT_SECONDS = 120.0
SHORTEST_WAIT_SECONDS = 0.5
NOTHING = 0
"""What events became that came to no version: the reason stands beside it."""

log = logging.getLogger("headway.arrivals")


class Waiting(NamedTuple):
    """The arrivals of a dataset that are in no version yet."""

    dataset: str
    first: float
    newest: float
    """Times at which the first and the newest was taken in."""
    last: int
    """Number of the newest."""


class _Never(Exception):
    """What arrived comes to no version, however often it is tried."""


class Arrivals:
    """Publishes for every dataset of a configuration. State: when each is tried again, and what was last said of it."""

    def __init__(self, home: Path, config: EventsConfig, ledger: Ledger) -> None:
        self.home, self.config, self.ledger = home, config, ledger
        self._copies = _copies(home, config)
        self._again: dict[str, tuple[float, int]] = {}
        self._said: dict[str, str] = {}

    def tick(self, now: float) -> None:
        """Publish each dataset whose newest arrival is old enough."""
        query = (
            "SELECT subject, MIN(received), MAX(received), MAX(number) FROM events"
            " WHERE name = 'data.arrived' AND status = 'accepted' AND became IS NULL GROUP BY subject"
        )
        with self.ledger.snapshot() as db:
            rows = db.execute(query).fetchall()
        for one in [Waiting(subject.removeprefix("dataset/"), *rest) for subject, *rest in rows]:
            due, tries = self._again.get(one.dataset, (0.0, 0))
            settling = 0 <= now - one.newest < self.config.settle_seconds
            if settling or 0 < due - now <= LONGEST_WAIT_SECONDS:
                continue
            try:
                watched: list[FolderConfig | ContainerConfig] = [*self.config.folders, *self.config.containers]
                source = next((each for each in watched if each.dataset == one.dataset), None)
                if source is None:
                    raise _Never(f"nothing that is watched makes dataset/{one.dataset} any more")
                store = open_store(self.home)
                with acting(ACTOR):
                    require(self.home, "publish", what=f"dataset/{one.dataset}", reason="events")
                    if isinstance(source, FolderConfig):
                        made = self._of_folder(store, source, now)
                    else:
                        copies = self._copies[source]
                        made = self._make(store, source.dataset, copies.update(), origin=copies.origin)
                number, reason = self._became(store, one, made)
                self._note(one, number, reason)
            except _Never as error:
                self._note(one, NOTHING, str(error))
            except (Changed, FileNotFoundError) as error:
                self._later(one.dataset, str(error), now + max(SHORTEST_WAIT_SECONDS, self.config.settle_seconds), 0)
            except (HeadwayError, OSError, ValueError) as error:
                self._later(one.dataset, str(error), now + min(LONGEST_WAIT_SECONDS, 2.0 ** min(tries, 10)), tries + 1)
            else:
                self._again.pop(one.dataset, None)
                self._said.pop(one.dataset, None)

    def _of_folder(self, store: Store, folder: FolderConfig, now: float) -> Manifest:
        root = place_of(folder)
        before = look(root, folder.include)
        if before.problems:
            path, why = next(iter(before.problems.items()))
            raise Changed(f"{path} cannot be looked at: {why}")
        newest, path = max(((stamp.changed / 1e9, path) for path, stamp in before.files.items()), default=(0.0, ""))
        if 0 <= now - newest < self.config.settle_seconds:
            raise Changed(f"{path} is still being written")

        def unchanged() -> None:
            if look(root, folder.include) != before:
                raise Changed(f"{root} changed while it was read")

        exclude = [f"*{end}" for end in UNFINISHED]
        return self._make(store, folder.dataset, root, include=folder.include, exclude=exclude, check=unchanged)

    def _make(self, store: Store, dataset: str, root: Path, **how: Any) -> Manifest:
        """Publish a folder. Raises _Never when what is in it can be no dataset: it is tried again when something else arrives."""
        try:
            made = make_dataset(store, self.home / "work", dataset, [root], **how)
        except ValueError as error:
            raise _Never(str(error)) from error
        except PermissionError as error:
            if Path(str(error.filename)).is_relative_to(root):
                raise _Never(f"{error.filename} may not be read") from error
            raise
        skipped = len(made.packed.skipped)
        left_out = f", {skipped} files left out" if skipped else ""
        log.info("%s: %s documents%s", made.manifest.ref, made.packed.documents, left_out)
        return made.manifest

    def _became(self, store: Store, one: Waiting, made: Manifest) -> tuple[int, str]:
        """The event that a version is told by; or that there is none, because it was current before anything arrived."""
        query = "SELECT number FROM events WHERE status = 'accepted' AND object <> '' AND name = ? AND object = ?"
        with self.ledger.snapshot() as db:
            result = db.execute(query, ("dataset.published", made.ref)).fetchone()
        known = int(result["number"]) if result else None
        if known:
            return known, ""
        number = published_as(store, "dataset", one.dataset, made.version)
        change = read_change(store, one.dataset, number) if number else None
        if change is None or change.time < one.first:
            return NOTHING, f"{made.ref} is what it was before"
        receipt = self.ledger.receive(published(store, one.dataset, change))
        return receipt.of or receipt.number, ""

    def _note(self, one: Waiting, number: int, reason: str) -> None:
        """Say of all that were waiting what they became. What came while it was published waits for the next turn."""
        if reason:
            log.warning("dataset/%s: nothing came of what arrived: %s", one.dataset, reason)
        change = (
            "UPDATE events SET became = ?, reason = ? WHERE name = 'data.arrived' AND status = 'accepted'"
            " AND became IS NULL AND subject = ? AND number <= ?"
        )
        with self.ledger.transaction() as db:
            db.execute(change, (number, redact(reason)[:2048], f"dataset/{one.dataset}", one.last))

    def _later(self, dataset: str, why: str, due: float, tries: int) -> None:
        """Try again; the reason is said once."""
        if self._said.get(dataset) != why:
            log.warning("dataset/%s is published later: %s", dataset, why)
            waits = (
                "UPDATE events SET reason = ? WHERE name = 'data.arrived' AND status = 'accepted' AND became IS NULL"
                " AND subject = ?"
            )
            with self.ledger.transaction() as db:
                db.execute(waits, (redact(f"not yet: {why}")[:2048], f"dataset/{dataset}"))
        self._said[dataset], self._again[dataset] = why, (due, tries)


def _copies(home: Path, config: EventsConfig) -> dict[ContainerConfig, BlobCopies]:
    """The copies of containers; those that no settings name any more are deleted. Only this needs Azure's packages."""
    if not config.containers and not (home / "events" / "blobs").exists():
        return {}
    from deployments.bridge.blobs import BlobCopies, forget

    forget(home, config.containers)
    return {each: BlobCopies(home, each) for each in config.containers}


HISTORY = "history/dataset"
LOCAL_EVERY_SECONDS = 1.0
REMOTE_EVERY_SECONDS = 15.0
"""Time between two listings of a store in Azure: each is a request, or one for 5,000 changes."""


class StoreHistory:
    """Tells of every new current version of a dataset of the store, by its number in the history (tasks/storage/history.py).

    The numbered documents are listed, and only new ones are read. A rollback tells nothing: the models were already held
    against that data when it was new. Nor does what validation left of a dataset, which is asked for by its version only, nor a
    restored backup, nor a deletion. State: when it last looked; how far it got is in `events/store.json` of the home.
    """

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
        known: dict[str, int] = kept.get(store.uri, {})
        if store.uri not in kept:
            # What is published while this bridge still comes up is news; what was written before that is not.
            since = float((bridge.status(self.home) or {}).get("since", math.inf))
            for name, item in existing.items():
                changes = ((number, read_change(store, name, number)) for number in reversed(item))
                known[name] = next((number for number, change in changes if change and change.time < since), 0)
        fresh = [(name, each) for name, item in existing.items() for each in item if each > known.get(name, 0)]
        entries = [(name, read_change(store, name, number)) for name, number in fresh]
        events = [
            published(store, name, change)
            for name, change in entries
            if change and change.current and change.action in ("publish", "copy")
        ]
        if news := [event for event in events if not self.ledger.knows(event)]:
            self.ledger.receive_all(news)
        newest = {**known, **{name: item[-1] for name, item in existing.items()}}
        if newest != kept.get(store.uri):
            write_text(self._book, json.dumps({**kept, store.uri: newest}))

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


def _key(name: str, number: int) -> str:
    return f"{HISTORY}/{name}/{number:08d}.json"
