"""The drill: the newest backup is restored into a scratch place, compared by hash with what it says, and removed again.

How long that took is what a restore would take here (the RTO), the backup's age is what would be lost now (the RPO).
"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.registry.backup import contents, snapshot
from tasks.registry.backup.contents import Contents
from tasks.registry.backup.restore import Tell, rebuild
from tasks.registry.transfer import beside_digests
from tasks.security import audit_chain
from tasks.storage.local import LocalStore
from tasks.storage.store import Store


@dataclass(frozen=True)
class Drill:
    """What a drill proved."""

    at: str
    artifacts: int
    documents: int
    files: int
    bytes: int
    audit_entries: int
    rto_seconds: float
    """Of the restore alone; the comparison comes on top."""
    rpo_seconds: float
    seconds: float


def drill(home: Path, source: Store, *, tell: Tell = lambda *_: None) -> Drill:
    """Restore the newest backup of a store into a scratch place below the home, compare, remove it.

    Raises IntegrityError that names everything that is not as it was backed up, Unknown when there is no backup, and Missing when
    there is no room.
    """
    began = time.monotonic()
    backup = contents.choose(source)
    (home / "work").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home / "work", prefix="drill-") as scratch:
        place = Path(scratch)
        store = LocalStore(place / "store")
        restored = rebuild(place, store, source, backup, tell=tell)
        seconds = time.monotonic() - began
        listing = restored.contents
        wrong = [*_artifacts(store, listing), *_documents(store, listing), *_database(place / snapshot.MLFLOW)]
        chain = audit_chain.check(store)
        if chain.broken:
            wrong.append({"path": f"audit/{chain.broken.number:08d}.json", "problem": "sha256"})
        if wrong:
            raise IntegrityError(
                f"the backup of {listing.at} does not restore what it says: {', '.join(one['path'] for one in wrong[:5])}",
                problems=wrong,
                remedy="Make a new one, and look at the disk that it lies on.",
            )
        return Drill(
            at=listing.at,
            artifacts=len(listing.artifacts),
            documents=len(listing.documents),
            files=restored.files,
            bytes=restored.bytes,
            audit_entries=chain.entries,
            rto_seconds=seconds,
            rpo_seconds=listing.age_seconds,
            seconds=time.monotonic() - began,
        )


def _artifacts(store: Store, output: Contents) -> Iterator[dict[str, str]]:
    for ref, digests in output.artifacts.items():
        manifest = store.manifest(*parse_ref(ref))
        if manifest is None:
            yield {"path": ref, "problem": "missing"}
        elif store.verify(manifest) or beside_digests(store, manifest) != digests:
            yield {"path": ref, "problem": "sha256"}


def _documents(store: Store, output: Contents) -> Iterator[dict[str, str]]:
    for key, expected in output.documents.items():
        document = store.read(key)
        if document is None or hashlib.sha256(document.data).hexdigest() != expected:
            yield {"path": key, "problem": "missing" if document is None else "sha256"}


def _database(path: Path) -> Iterator[dict[str, str]]:
    if not path.is_file():
        return
    with closing(sqlite3.connect(path)) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            yield {"path": snapshot.MLFLOW, "problem": "format"}
