"""Every byte of an artifact against its manifest, and a model's files against its signature."""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.errors import IntegrityError
from tasks.signing import SIGNATURE, ensure_key, public_key_of, verify_folder
from tasks.storage.manifest import Manifest, Problem
from tasks.storage.store import Store, find


def problems_of(store: Store, ref: str, *, keys: Path) -> tuple[Manifest, list[Problem]]:
    """The manifest that a reference means, and everything that is wrong with what it names."""
    manifest = find(store, *parse_ref(ref))
    problems = store.verify(manifest)
    if manifest.content.kind == "model" and not problems:
        problems = _signature_problems(store, manifest, keys)
    return manifest, problems


def _signature_problems(store: Store, manifest: Manifest, keys: Path) -> list[Problem]:
    signature = store.attachment(manifest, SIGNATURE)
    if signature is None:
        return [Problem(path=SIGNATURE, problem="signature", expected="a signature", actual="none")]
    try:
        verify_folder(store.fetch(manifest), signature, public_key_of(ensure_key(keys)))
    except IntegrityError as error:
        return [Problem(path=SIGNATURE, problem="signature", expected="valid", actual=error.message)]
    return []
