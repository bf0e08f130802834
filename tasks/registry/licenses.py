"""The licences of what a model is made from, as the store knows them: datasets and base models, down to where they came in.

What a licence says is tasks/data/licenses.py. A dataset's is in its provenance (`headway dataset publish`), a base model's there
or in the card that it came with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from tasks.artifacts import parse_ref
from tasks.data.licenses import Terms
from tasks.formats.model_card import front_matter, license_in
from tasks.registry.transfer import ancestry
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store, find

CARD = "README.md"


def licenses_of(store: Store, refs: Iterable[str]) -> dict[str, Terms]:
    """The licence of each dataset and base model from outside, among these artifacts and all that they were made from."""
    result: dict[str, Terms] = {}
    for ref in refs:
        manifest = find(store, *parse_ref(ref))
        for one in (manifest, *ancestry(store, manifest)):
            if one.content.kind in ("dataset", "checkpoint") and one.provenance.stage == "publish":
                result[one.ref] = terms_of(store, one)
    return result


def terms_of(store: Store, manifest: Manifest) -> Terms:
    """What the provenance of an artifact from outside says, or else its card."""
    config = manifest.provenance.config or {}
    origins = config.get("origins", [])
    named = [str(one["license"]) for one in origins if one.get("license")]
    if config.get("license"):
        named = [str(config["license"])]
    elif len(named) < len(origins):
        named = []  # of a part nobody says it, so nobody says it of the whole
    elif not origins:
        named = [name] if (name := _by_card(store, manifest)) else []
    return Terms(", ".join(dict.fromkeys(named)), ", ".join(str(one["uri"]) for one in origins))


def _by_card(store: Store, manifest: Manifest) -> str:
    if CARD not in {entry.path for entry in manifest.content.files} or manifest.content.kind != "checkpoint":
        return ""
    with tempfile.TemporaryDirectory() as folder:
        store.copy_files(manifest, (CARD,), Path(folder))
        text = (Path(folder) / CARD).read_text(encoding="utf-8", errors="replace")
    return license_in(front_matter(text)[0])
