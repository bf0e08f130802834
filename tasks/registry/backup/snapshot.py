"""The documents and small files of a home, as they are at one moment, into the folder that becomes the backup.

Left out: jobs, logs, reports, Prefect's own database, a tracking server's; and what is secret: private keys, unless asked for,
and what stands in the platform's settings where its name should. Of an endpoint's keys the home itself has digests only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import yaml
from pydantic import BaseModel, ConfigDict

from tasks.common.errors import IntegrityError, Unknown
from tasks.common.redaction import redact_value, secret_settings
from tasks.storage.manifest import Manifest
from tasks.storage.store import Document, Store

# What a backup says of itself: which artifacts, which documents, of which home, when. Values only.
#
# A backup is an artifact of the kind `backup` in a store that holds nothing but backups: `backup.json` (this), the
# home's documents and small files, and the manifests of what was left out. So it appears with its manifest, last, and
# every byte of it is hashed.


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
    latest = None
    if at:
        try:
            latest = datetime.fromisoformat(at)
        except ValueError as error:
            raise ValueError(f"--at {at!r} is no time: write it as 2026-01-31 or 2026-01-31T12:00, in UTC") from error
        latest = latest if latest.tzinfo else latest.replace(tzinfo=UTC)
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


PLATFORM = "platform.yaml"
SETTINGS = (PLATFORM, "policy.yaml", "stores.yaml", "trust.yaml", "layout.json")
ENDPOINT = "endpoint.json"
ENDPOINTS = (f"endpoints/*/{ENDPOINT}", "endpoints/*/keys.json")
ACCESS = "access/*.jsonl"
MLFLOW = "mlflow/mlflow.db"
KEYS = "keys"
NEVER = ("approvals.key", "decisions.jsonl", "jobs.key")
"""In no backup: a home that is set back to an earlier day would count approvals again that were used after it. And the key of
the jobs' folders must lie in no store."""
MOVING = ("refs/", "heads/")
READERS = 16
PAGES = 4096
"""Of a database, copied at once: whoever writes meanwhile waits for no longer."""


def is_taken(name: Path) -> bool:
    """Whether a backup may hold this file of a home; from one that somebody changed nothing else is restored."""
    if name.parent == Path(KEYS):
        return name.name not in NEVER
    exact = name.as_posix() in (*SETTINGS, MLFLOW)
    return exact or any(
        len(name.parts) == pattern.count("/") + 1 and name.match(pattern) for pattern in (ACCESS, *ENDPOINTS)
    )


def take_documents(store: Store, folder: Path) -> dict[str, str]:
    """Write all documents of a store into a file of one line each; returns sha256 by key.

    What moves is read last, and again when another document came meanwhile: every move leaves an entry in the audit log, and a
    ref that is ahead of its log is in no backup.
    """
    result: dict[str, str] = {}
    with open(folder / DOCUMENTS, "w", encoding="utf-8") as file:
        while True:
            keys = store.list("")
            new = [key for key in keys if key not in result and not key.startswith(MOVING)]
            result |= dict(_written(file, key, document) for key, document in _read_all(store, new))
            moving = list(_read_all(store, [key for key in keys if key.startswith(MOVING)]))
            if store.list("") == keys:
                break
        return result | dict(_written(file, key, document) for key, document in moving)


def documents_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All documents of a fetched backup: key and bytes."""
    with open(folder / DOCUMENTS, encoding="utf-8") as file:
        for line in file:
            output = json.loads(line)
            yield str(output["key"]), output["text"].encode("utf-8", "surrogateescape")


def take_files(home: Path, folder: Path, *, with_keys: bool) -> tuple[str, ...]:
    """Copy settings, public keys, what each endpoint serves and to whom, who read what, and MLflow's database into the folder.

    Returns the names of the settings of the platform that were secrets, and did not come along.
    """
    results = [home / name for name in SETTINGS] + sorted(home.glob(ACCESS))
    results += [path for pattern in ENDPOINTS for path in sorted(home.glob(pattern))]
    results += sorted(path for path in (home / KEYS).glob("*" if with_keys else "*.pub") if path.name not in NEVER)
    for path in results:
        if path.is_file():
            target = folder / FILES / path.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if (home / MLFLOW).is_file():
        (folder / FILES / MLFLOW).parent.mkdir(parents=True, exist_ok=True)
        copy_database(home / MLFLOW, folder / FILES / MLFLOW)
    platform = folder / FILES / PLATFORM
    return _without_secrets(platform) if platform.is_file() else ()


def _without_secrets(path: Path) -> tuple[str, ...]:
    """Take what is secret out of a copy of the platform's settings; returns the names of what went.

    The address of a channel is secret whatever its form (docs/notifications.md), and becomes a name of a variable; `env:NAME`
    stays as it is.
    """
    try:
        payload, gone = dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {}), []
        for channel in payload.get("notifications") or ():
            if not str(channel["url"]).startswith("env:"):
                channel["url"] = "env:ADDRESS_OF_" + str(channel["name"]).upper().replace("-", "_")
                gone.append(f"notifications.{channel['name']}.url")
    except (yaml.YAMLError, TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{PLATFORM} of the home holds no settings of the platform ({type(error).__name__}): give them again with "
            "`headway up --config FILE`"
        ) from error
    gone += secret_settings(payload)
    if gone:
        path.write_text(yaml.safe_dump(redact_value(payload), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return tuple(gone)


def copy_database(source: Path, target: Path) -> None:
    """A copy of a SQLite database as it is at one moment, also while somebody writes. See https://sqlite.org/backup.html."""
    reading, writing = sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True), sqlite3.connect(target)
    try:
        reading.backup(writing, pages=PAGES)
    finally:
        reading.close()
        writing.close()


def _read_all(store: Store, keys: list[str]) -> Iterator[tuple[str, Document]]:
    """Documents in the order of their keys, some at once: a service takes its time for each. What is gone is left out."""
    with ThreadPoolExecutor(READERS) as pool:
        for key, document in zip(keys, pool.map(store.read, keys), strict=True):
            if document:
                yield key, document


def _written(file: IO[str], key: str, document: Document) -> tuple[str, str]:
    text = document.data.decode("utf-8", "surrogateescape")
    file.write(json.dumps({"key": key, "text": text}) + "\n")
    return key, hashlib.sha256(document.data).hexdigest()
