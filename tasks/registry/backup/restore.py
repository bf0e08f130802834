"""Rebuilding a home from a backup: artifacts first, documents next, settings last; every byte is checked on its way.

Documents are as they were, so history, lineage and the audit log's chain are; one entry then says that they were restored.
Where things lie is derived: URIs are the new store's, paths in endpoints and in MLflow's database the new home's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import yaml

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.process import read_json, write_json
from tasks.registry import foreign
from tasks.registry.backup import snapshot
from tasks.registry.backup.snapshot import FILES, MANIFESTS, Contents
from tasks.registry.transfer import beside_digests, bring, require_other, require_there
from tasks.registry.versions import note
from tasks.security import audit_chain, trust
from tasks.security.audit import audit
from tasks.signing.keys import load_public_key
from tasks.storage.cache import require_room
from tasks.storage.history import current
from tasks.storage.local import LocalStore
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store

RESTORED_KEY = "restored.pub"
MARK = "restoring.json"
"""In a home whose restore has not come to its end: the same restore goes on there, and nothing else does."""
ALLOWED = ("stores.yaml", ".gitignore", MARK)
"""What an empty home may hold: it must be able to say which store the backups are in."""
LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("datasets", "dataset_source"),
    ("tags", "value"),
    ("model_version_tags", "value"),
)
"""Columns of MLflow's database that say where files lie."""
Tell = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Restored:
    """A home that was rebuilt."""

    backup: Manifest
    contents: Contents
    files: int
    bytes: int


def restore(home: Path, store: Store, source: Store, *, at: str = "", tell: Tell = lambda *_: None) -> Restored:
    """Rebuild an empty home from the newest backup, or the newest one not later than a time (UTC).

    Raises ValueError for a home that is not empty, Unknown when there is no such backup, IntegrityError that names what is
    damaged in it, and Missing when there is no room. Who was killed in between does the same again.
    """
    require_other(source, store)
    require_there(source)
    backup = snapshot.choose(source, at)
    require_empty(home, store, backup.ref)
    write_json(home / MARK, {"backup": backup.ref, "from": source.uri})
    restored = rebuild(home, store, source, backup, tell=tell)
    _settle_key(home)
    # One entry in the audit log, and in the history of every name that its current version was restored.
    reason = f"backup of {restored.contents.at}"
    entry = audit(store, "restore", right="override", what=f"{source.uri} as of {restored.contents.at}", reason=reason)
    named = sorted({tuple(key.split("/")[1:3]) for key in restored.contents.documents if key.startswith("history/")})
    for kind, name in named:
        version = current(store, kind, name)
        if version:
            note(store, kind, name, action="restore", version=version, reason=reason, **entry.noted)
    (home / MARK).unlink()
    return restored


def rebuild(home: Path, store: Store, source: Store, backup: Manifest, *, tell: Tell = lambda *_: None) -> Restored:
    """Bring everything of a backup into a home and a store, without a word about it in the audit log."""
    folder = snapshot.fetch(source, backup)
    listing = snapshot.read(folder)
    manifests = [_named(source, ref) for ref in listing.artifacts]
    total, done = sum(one.bytes for one in manifests), 0
    if isinstance(store, LocalStore):
        require_room(home, total + backup.bytes, what=f"the backup of {listing.at}")
    for one in manifests:
        tell(done, total, one.ref.partition("@")[0])
        existing = store.manifest(one.content.kind, one.provenance.name, one.version)
        if existing is None or store.verify(existing):  # a restore that was killed may have brought it already
            bring(source, store, one)
        manifest = one
        digests = listing.artifacts[one.ref]
        result = beside_digests(store, manifest)
        for name in result.keys() | digests.keys():
            if result.get(name) != digests.get(name):
                raise IntegrityError(
                    f"{name} beside {manifest.ref} is not what was backed up",
                    problems=[
                        {"path": name, "problem": "sha256", "expected": digests.get(name), "actual": result.get(name)}
                    ],
                    remedy="Take an older backup with --at, or another copy of the store.",
                )
        done += one.bytes
    tell(total, total, "documents")
    _write_documents(store, folder, listing)
    for line in (folder / MANIFESTS).read_bytes().splitlines():
        foreign.keep(store, foreign.from_json(line, where=f"{MANIFESTS} of the backup"))
    _write_files(home, folder / FILES, listing)
    files = sum(len(one.content.files) for one in manifests)
    return Restored(backup=backup, contents=listing, files=files, bytes=total)


def require_empty(home: Path, store: Store, backup: str) -> None:
    """Raise ValueError unless nothing is in a home and its store but what a restore of the same backup left there."""
    if (read_json(home / MARK) or {}).get("backup") == backup:
        return
    held = sorted(path.name for path in home.iterdir() if path.name not in ALLOWED) if home.is_dir() else []
    if held or store.list("") or any(store.manifests()):
        what = f"it holds {', '.join(held[:5])}" if held else f"its store {store.uri} is not"
        raise ValueError(
            f"the home {home} is not empty ({what}): a backup is restored into an empty one, never over work. Set HEADWAY_HOME "
            "to a new folder"
        )
    home.mkdir(parents=True, exist_ok=True)


def relocate_database(database: Path, before: str, after: str) -> None:
    """Have MLflow's database point to files of the new home where it pointed to the old one's; both are URIs of folders."""
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, column in LOCATIONS:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            if column in columns:
                connection.execute(
                    f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)",
                    (f"{before}/", f"{after}/", f"{before}/"),
                )


def _named(source: Store, ref: str) -> Manifest:
    manifest = source.manifest(*parse_ref(ref))
    if manifest is None:
        raise IntegrityError(
            f"{ref}, which the backup names, is not in {source.uri}",
            problems=[{"path": ref, "problem": "missing"}],
            remedy="Take an older backup with --at, or another copy of the store.",
        )
    return manifest


def _write_documents(store: Store, folder: Path, output: Contents) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(snapshot.READERS) as pool:
        for _ in pool.map(lambda each: _write_document(store, output, *each), snapshot.documents_in(folder)):
            pass


def _write_document(store: Store, output: Contents, key: str, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != output.documents[key]:
        raise IntegrityError(f"the document {key} is not what was backed up", remedy="Take an older backup with --at.")
    if not store.create(key, data):
        existing = store.read(key)
        if existing is None or existing.data != data:
            raise IntegrityError(
                f"the document {key} is there already, and is another one: somebody works in this home",
                remedy="Restore into an empty home that nobody uses meanwhile.",
            )


def _write_files(home: Path, files: Path, output: Contents) -> None:
    """Settings, keys, endpoints and MLflow's database, under the paths of this home."""
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        target = home / path.relative_to(files)
        if (target.name == "stores.yaml" and target.exists()) or not snapshot.is_taken(path.relative_to(files)):
            continue
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if target.parent.name == snapshot.KEYS else 0o777)
        partial = target.with_name(f".{target.name}.restoring")
        partial.unlink(missing_ok=True)
        partial.touch(mode=0o600)  # as they were in the old home: nobody else's to read
        shutil.copyfile(path, partial)
        name = path.relative_to(files)
        if name.as_posix() == snapshot.MLFLOW:
            relocate_database(partial, output.home, home.as_uri())
        elif name.name == snapshot.ENDPOINT:
            # The server that it names is the old home's: this home has none until the next deploy.
            record: dict[str, Any] = json.loads(partial.read_bytes())
            old = Path(unquote(urlparse(output.home).path))
            if "folder" in record and Path(record["folder"]).is_relative_to(old):
                record["folder"] = str(home / Path(record["folder"]).relative_to(old))
            record.pop(
                "previous", None
            )  # whose server is the old home's too: nothing is started from what a backup says
            partial.write_text(json.dumps(record, indent=1))
        elif name.name == "stores.yaml":
            # The artifacts were restored into the folder of this home, so that is where it works; the other stores
            # stay named.
            payload = yaml.safe_load(partial.read_text(encoding="utf-8")) or {}
            if payload.pop("use", "local") != "local":
                partial.write_text(yaml.safe_dump(payload, sort_keys=False), encoding="utf-8")
        partial.replace(target)


def _settle_key(home: Path) -> None:
    """The old home's key without its private half signs no more; what it signed still counts, by the trust policy."""
    public = home / snapshot.KEYS / "signing.pub"
    if not public.exists() or public.with_suffix(".pem").exists():
        return
    kept = public.with_name(RESTORED_KEY)
    public.rename(kept)
    if trust.load_or_none(home) is None:
        trust.add_key(home, "restored", load_public_key(kept), ("*/*",))


# The drill: the newest backup is restored into a scratch place, compared by hash with what it says, and removed again.
#
# How long that took is what a restore would take here (the RTO), the backup's age is what would be lost now (the RPO).


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
    backup = snapshot.choose(source)
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
