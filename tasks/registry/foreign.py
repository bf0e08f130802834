"""Manifests without their bytes: of what a copied artifact was made from, and of what a restored home had and a backup left out.

`foreign/KIND/NAME/VERSION.json` in the store. Lineage tells them (ancestry.py); nothing can be fetched by them. The version of
each is the hash of what it says, so they hold together as manifests do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.storage.manifest import SCHEMA, Manifest
from tasks.storage.store import Listed, Store

FOLDER = "foreign"


def keep(store: Store, manifest: Manifest) -> bool:
    """Note a manifest whose bytes are not in this store; False when it is known already, with bytes or without."""
    kind, name, version = manifest.content.kind, manifest.provenance.name, manifest.version
    if store.manifest(kind, name, version):
        return False
    return store.create(_key(kind, name, version), to_json(manifest))


def listed(store: Store) -> Iterator[Listed]:
    """All of them by a listing alone, as `Store.versions` does it for those with bytes; what is in one may be in both."""
    for key in store.list(FOLDER):
        _, kind, name, version = key.removesuffix(".json").split("/")
        yield Listed(kind, name, version, FOLDER)


def manifest_of(store: Store, ref: str) -> Manifest | None:
    """The manifest of a whole reference, with its bytes or without; None when nobody knows it."""
    kind, name, version = parse_ref(ref)
    return store.manifest(kind, name, version) or _read(store, _key(kind, name, version))


def to_json(manifest: Manifest) -> bytes:
    parts = manifest.model_dump(mode="json", exclude={"schema_"})
    return json.dumps({"schema": SCHEMA, **parts}, ensure_ascii=False).encode()


def from_json(data: bytes, *, where: str) -> Manifest:
    """A manifest as `to_json` wrote it. Raises ValueError for one of a newer Headway, IntegrityError for what is none."""
    try:
        value = dict(json.loads(data))
        schema = value.pop("schema")
        if schema == SCHEMA:
            return Manifest.model_validate(value)
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{where} was edited: it is no manifest", remedy="Copy or restore again.") from error
    raise ValueError(f"{where} is of the schema {schema}; this Headway reads {SCHEMA}: upgrade Headway")


def _read(store: Store, key: str) -> Manifest | None:
    document = store.read(key)
    if not document:
        return None
    manifest = from_json(document.data, where=f"{key} in {store.uri}")
    if _key(manifest.content.kind, manifest.provenance.name, manifest.version) != key:
        raise IntegrityError(
            f"{key} in {store.uri} was edited: it says {manifest.ref}", remedy="Copy or restore again."
        )
    return manifest


def _key(kind: str, name: str, version: str) -> str:
    return f"{FOLDER}/{kind}/{name}/{version}.json"
