"""What landed becomes a dataset version: all files of a watched folder, or all blobs below a prefix, once nothing more comes.

The events wait in the ledger until they name the event that they became, so a kill at any point does it again, and the same files
are the same version. What can never be published is noted on its events; what moves meanwhile is tried again. Watching is
folders.py and queues.py; fetching blobs is blob_copies.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.bridge.folders import UNFINISHED, Changed, look, place_of
from deployments.bridge.stores import published, read_change
from deployments.configuration.events import ContainerConfig, EventsConfig, FolderConfig
from deployments.publishing.datasets import make_dataset
from tasks.common.errors import HeadwayError
from tasks.common.redaction import redact
from tasks.events.ledger import Ledger
from tasks.security.audit import acting
from tasks.security.policy import require
from tasks.storage import open_store
from tasks.storage.history import published_as
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

ACTOR = "bridge"
"""Who publishes, in the audit log and for the policy."""
LONGEST_WAIT_SECONDS = 120.0
SHORTEST_WAIT_SECONDS = 0.5
NOTHING = 0
"""What events became that came to no version: the reason stands beside it."""
if TYPE_CHECKING:
    from deployments.bridge.blob_copies import BlobCopies

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
        for one in self._waiting():
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

    def _waiting(self) -> list[Waiting]:
        query = (
            "SELECT subject, MIN(received), MAX(received), MAX(number) FROM events"
            " WHERE name = 'data.arrived' AND status = 'accepted' AND became IS NULL GROUP BY subject"
        )
        with self.ledger.snapshot() as db:
            rows = db.execute(query).fetchall()
        return [Waiting(subject.removeprefix("dataset/"), *rest) for subject, *rest in rows]

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
    from deployments.bridge.blob_copies import BlobCopies, forget

    forget(home, config.containers)
    return {each: BlobCopies(home, each) for each in config.containers}
