"""A model into an Azure ML registry, for teams that work in Azure ML: verified before it goes, and read back when it is there.

Into another store of ours it goes by transfer.py. What a registry gets is laid out by tasks/storage/azureml_registry.py.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.registry import foreign
from tasks.registry.transfer import ancestry, beside, sound
from tasks.security.access import note_access
from tasks.security.audit import audited
from tasks.storage import azureml_registry as registry
from tasks.storage.cache import require_room
from tasks.storage.manifest import Manifest
from tasks.storage.store import Store


@dataclass(frozen=True)
class Shared:
    """What became of it."""

    manifest: Manifest
    uri: str
    """What Azure ML calls it."""
    moved: bool
    """False when the registry had this version."""
    ancestors: tuple[str, ...]
    beside: tuple[str, ...]


def share_model(source: Store, client: Any, ref: str, *, name: str, home: Path, reason: str = "") -> Shared:
    """Register a model in the Azure ML registry `name`, which `client` reaches; what arrived is downloaded and compared.

    Raises ValueError for what is no model, IntegrityError when it is damaged, wrongly signed or not there as it was sent, and
    Missing when Azure is away or does not let us in.
    """
    require_model(ref)
    manifest = sound(source, ref, home)
    ancestors = list(ancestry(source, manifest))
    signatures = beside(source, manifest)
    uri = f"{registry.SCHEME}{name}/models/{manifest.provenance.name}/versions/{manifest.version[: registry.DIGITS]}"
    note_access(home, manifest.ref, bytes=manifest.bytes, what="copy")
    version = registry.registered(client, manifest)
    if version not in (None, manifest.version):
        raise ValueError(
            f"{uri} is there already and is another model ({version or 'not from Headway'}); nothing was sent"
        )
    if version is None:
        what = f"{manifest.ref} to {uri}"
        with audited(source, "copy model", right="publish", what=what, after=manifest.version, reason=reason):
            uri = _send(source, client, manifest, _told(manifest, ancestors, signatures), home / "work")
    return Shared(
        manifest=manifest,
        uri=uri,
        moved=version is None,
        ancestors=tuple(one.ref for one in ancestors),
        beside=tuple(signatures),
    )


def require_model(ref: str) -> None:
    """Raise ValueError for what an Azure ML registry does not take from here."""
    kind = parse_ref(ref)[0]
    if kind != "model":
        raise ValueError(f"{ref}: an Azure ML registry takes models from here; copy a {kind} to a store of Headway's")


def _send(source: Store, client: Any, manifest: Manifest, payload: dict[str, bytes], scratch: Path) -> str:
    scratch.mkdir(parents=True, exist_ok=True)
    require_room(scratch, 2 * manifest.bytes, what=manifest.ref)
    with tempfile.TemporaryDirectory(dir=scratch) as work:
        folder = Path(work) / manifest.provenance.name
        registry.stage(manifest, source.fetch(manifest), payload, folder)
        inputs = {"headway.inputs": " ".join(manifest.provenance.inputs)}
        uri = registry.submit(client, registry.render(manifest, folder, inputs))
        problems = registry.problems(client, manifest, Path(work) / "arrived")
    if problems:
        text = ", ".join(f"{one.path} ({one.problem})" for one in problems[:5])
        raise IntegrityError(
            f"{uri} is not what was sent: {text}",
            problems=[one.model_dump() for one in problems],
            remedy="Archive it there (`az ml model archive`); a registry lets nobody overwrite a version.",
        )
    return uri


def _told(manifest: Manifest, ancestors: list[Manifest], signatures: dict[str, bytes]) -> dict[str, bytes]:
    """What tells of a model where there is no store: its manifest, its signatures, what it was made from."""
    lineage = [json.loads(foreign.to_json(one)) for one in ancestors]
    return {
        "manifest.json": foreign.to_json(manifest),
        "ancestry.json": json.dumps(lineage, indent=1, ensure_ascii=False).encode(),
        **signatures,
    }
