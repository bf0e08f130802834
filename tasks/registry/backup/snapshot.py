"""The documents and small files of a home, as they are at one moment, into the folder that becomes the backup.

Left out: jobs, logs, reports, Prefect's own database, a tracking server's, and, unless asked for, private keys.
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

from tasks.registry.backup.contents import DOCUMENTS, FILES
from tasks.storage.store import Document, Store

SETTINGS = ("platform.yaml", "policy.yaml", "stores.yaml", "trust.yaml", "layout.json")
ENDPOINTS = "endpoints/*/endpoint.json"
ACCESS = "access/*.jsonl"
MLFLOW = "mlflow/mlflow.db"
KEYS = "keys"
MOVING = ("refs/", "heads/")
READERS = 16
PAGES = 4096
"""Of a database, copied at once: whoever writes meanwhile waits for no longer."""


def take_documents(store: Store, folder: Path) -> dict[str, str]:
    """Write all documents of a store into a file of one line each; returns sha256 by key.

    What moves is read last, and again when another document came meanwhile: every move leaves an entry in the audit log, and a
    ref that is ahead of its log is in no backup.
    """
    found: dict[str, str] = {}
    with open(folder / DOCUMENTS, "w", encoding="utf-8") as file:
        while True:
            keys = store.list("")
            new = [key for key in keys if key not in found and not key.startswith(MOVING)]
            found |= dict(_written(file, key, document) for key, document in _read_all(store, new))
            moving = list(_read_all(store, [key for key in keys if key.startswith(MOVING)]))
            if store.list("") == keys:
                break
        return found | dict(_written(file, key, document) for key, document in moving)


def documents_in(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All documents of a fetched backup: key and bytes."""
    with open(folder / DOCUMENTS, encoding="utf-8") as file:
        for line in file:
            said = json.loads(line)
            yield str(said["key"]), said["text"].encode("utf-8", "surrogateescape")


def take_files(home: Path, folder: Path, *, with_keys: bool) -> None:
    """Copy settings, public keys, what each endpoint serves, who read what, and MLflow's database to below the folder."""
    found = [home / name for name in SETTINGS] + sorted(home.glob(ENDPOINTS)) + sorted(home.glob(ACCESS))
    found += sorted((home / KEYS).glob("*" if with_keys else "*.pub"))
    for path in found:
        if path.is_file():
            target = folder / FILES / path.relative_to(home)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if (home / MLFLOW).is_file():
        (folder / FILES / MLFLOW).parent.mkdir(parents=True, exist_ok=True)
        copy_database(home / MLFLOW, folder / FILES / MLFLOW)


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
