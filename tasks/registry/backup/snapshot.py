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
from pathlib import Path
from typing import IO

import yaml

from tasks.common.redaction import redact_value, secret_settings
from tasks.registry.backup.contents import DOCUMENTS, FILES
from tasks.storage.store import Document, Store

PLATFORM = "platform.yaml"
SETTINGS = (PLATFORM, "policy.yaml", "stores.yaml", "trust.yaml", "layout.json")
ENDPOINT = "endpoint.json"
ENDPOINTS = (f"endpoints/*/{ENDPOINT}", "endpoints/*/keys.json")
ACCESS = "access/*.jsonl"
MLFLOW = "mlflow/mlflow.db"
KEYS = "keys"
OF_APPROVALS = ("approvals.key", "decisions.jsonl")
"""In no backup: a home that is set back to an earlier day would count approvals again that were used after it."""
MOVING = ("refs/", "heads/")
READERS = 16
PAGES = 4096
"""Of a database, copied at once: whoever writes meanwhile waits for no longer."""


def is_taken(name: Path) -> bool:
    """Whether a backup may hold this file of a home; from one that somebody changed nothing else is restored."""
    if name.parent == Path(KEYS):
        return name.name not in OF_APPROVALS
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
    results += sorted(
        path for path in (home / KEYS).glob("*" if with_keys else "*.pub") if path.name not in OF_APPROVALS
    )
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
