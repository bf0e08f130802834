"""What a backup says of itself: which artifacts, which documents, of which home, when. Values only.

A backup is an artifact of the kind `backup` in a store that holds nothing but backups: `backup.json` (this), the home's documents
and small files, and the manifests of what was left out. So it appears with its manifest, last, and every byte of it is hashed.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.common.errors import IntegrityError, Unknown
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

SCHEMA = "headway/backup/1"
KIND = "backup"
NAME = "home"
CONTENTS = "backup.json"
DOCUMENTS = "documents.jsonl"
"""One line a document: its key, and its text."""
MANIFESTS = "manifests.jsonl"
"""One line a manifest whose bytes are not in the backup."""
FILES = "home"
"""Folder of the small files of the home, under the paths that they have there."""
NEWER = "restore it with the Headway that made it, or a newer one"


class Contents(BaseModel):
    """backup.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str
    """UTC, ISO 8601: when the documents were taken."""
    origin: str
    """Which home it is of: the digest of the first entry of its audit log, which a restored home has too."""
    home: str
    """Folder of that home then, as an URI."""
    headway: str
    artifacts: dict[str, dict[str, str]]
    """References of all artifacts whose bytes are in the backup; by name, sha256 of what lies beside each."""
    documents: dict[str, str]
    """sha256 by key."""
    damaged: tuple[str, ...] = ()
    """References of what was damaged in the home, and not in the backup from before."""

    @property
    def age_seconds(self) -> float:
        """Seconds since it was made: what is lost when the home is lost now."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def headway_version() -> str:
    try:
        return version("headway")
    except PackageNotFoundError:
        return "unknown"


def write(folder: Path, contents: Contents) -> None:
    output = {"schema": SCHEMA, **contents.model_dump(mode="json")}
    (folder / CONTENTS).write_text(json.dumps(output, indent=1, ensure_ascii=False), encoding="utf-8")


def read(folder: Path) -> Contents:
    """What a fetched backup says. Raises ValueError for one of a newer Headway."""
    value = json.loads((folder / CONTENTS).read_text(encoding="utf-8"))
    schema = value.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(
            f"this backup is of the schema {schema}, by Headway {value.get('headway')}; this one reads {SCHEMA}: {NEWER}"
        )
    return Contents.model_validate(value)


def backups(store: Store) -> list[Manifest]:
    """All backups of a store, newest first."""
    return sorted(store.manifests(KIND, NAME), key=lambda one: one.provenance.created, reverse=True)


def choose(store: Store, at: str = "") -> Manifest:
    """The newest backup, or the newest one that is not later than a time. Raises Unknown, ValueError."""
    result = backups(store)
    if not result:
        raise Unknown(f"there is no backup in {store.uri}", remedy="`headway backup --to STORE` makes one.")
    latest = _time(at) if at else None
    for one in result:
        if latest is None or datetime.fromisoformat(one.provenance.created) <= latest:
            return one
    hint = ", ".join(one.provenance.created for one in result[:5])
    raise Unknown(f"no backup in {store.uri} is as old as {at}", remedy=f"There are, newest first: {hint}.")


def fetch(store: Store, manifest: Manifest) -> Path:
    """The files of a backup, every byte checked. Raises IntegrityError that names each file."""
    try:
        return store.fetch(manifest)
    except IntegrityError as error:
        remedy = "Take an older one: `headway restore --at TIME`; or another copy of the store."
        raise IntegrityError(
            f"the backup of {manifest.provenance.created} in {store.uri} is damaged: {error.message}",
            problems=error.problems,
            remedy=remedy,
        ) from error


def _time(text: str) -> datetime:
    try:
        given = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"--at {text!r} is no time: write it as 2026-01-31 or 2026-01-31T12:00, in UTC") from error
    return given if given.tzinfo else given.replace(tzinfo=UTC)
