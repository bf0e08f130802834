"""One artifact from a store into another, or a model into an Azure ML registry: verified before it goes, and when it is there.

The version stays: it is the content's. What arrives is verified, byte by byte and by its signature, before it becomes what its
name means; what is not as sent is removed again. Whole homes are backup/. See docs/backup.md.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from tasks.artifacts import parse_ref
from tasks.common.errors import HeadwayError, IntegrityError, Missing
from tasks.registry import foreign
from tasks.registry.verification import problems_of
from tasks.registry.versions import is_noted, note
from tasks.security.access import note_access
from tasks.security.audit import audit, audited
from tasks.signing.bundle import SIGNATURE, SIGNATURES
from tasks.signing.statement import STATEMENT
from tasks.storage import azureml_registry as registry
from tasks.storage.cache import require_room
from tasks.storage.history import current
from tasks.storage.manifest import Manifest, Problem
from tasks.storage.store import Store, counts_as_newest

BESIDE = (SIGNATURE, STATEMENT, SIGNATURES)
"""Files that may lie beside a manifest, and go where the artifact goes."""


@dataclass(frozen=True)
class Copied:
    """What became of a copy."""

    manifest: Manifest
    """As it is in the target."""
    moved: bool
    """Whether bytes were sent; False when the target had them."""
    ancestors: tuple[str, ...]
    """References of everything that it was made from, as far as anybody knows."""
    beside: tuple[str, ...]
    """Names of its signatures."""
    noted: bool
    """Whether the source's audit log could be told."""


def copy_artifact(source: Store, target: Store, ref: str, *, home: Path, reason: str = "") -> Copied:
    """Copy an artifact with its lineage and signatures; it becomes the current version of its name in the target.

    `home` knows whose signatures count. A copy that was killed is done again, and finds done what was done. Raises Unknown,
    IntegrityError when the artifact is damaged, wrongly signed or not there as it was sent, and ValueError when both are one.
    """
    require_other(source, target)
    require_there(target)
    manifest = sound(source, ref, home)
    existing = _there(target, manifest)
    moved = existing is None or bool(target.verify(existing))
    note_access(home, manifest.ref, bytes=manifest.bytes, what="copy")
    noted = True
    if moved:
        kind, what = manifest.content.kind, f"{manifest.ref} to {target.uri}"
        try:
            audit(source, f"copy {kind}", right="publish", what=what, after=manifest.version, reason=reason)
        except (OSError, HeadwayError):  # another team's store may be one that we can only read
            noted = False
    if moved or not is_noted(target, manifest):
        kind, name = manifest.content.kind, manifest.provenance.name
        what, before = f"{manifest.ref} from {source.uri}", current(target, kind, name)
        versions = {"before": before, "after": manifest.version}
        with audited(target, f"copy {kind}", right="publish", what=what, reason=reason, **versions) as entry:
            arrived = _arrive(source, target, manifest, home, existing=None if moved else existing)
            note(
                target,
                arrived.content.kind,
                arrived.provenance.name,
                action="copy",
                version=arrived.version,
                current=counts_as_newest(arrived),
                reason=reason,
                **entry.noted,
            )
    else:
        arrived = _arrive(source, target, manifest, home, existing=existing)
    ancestors = list(ancestry(source, manifest))
    for one in ancestors:
        foreign.keep(target, one)
    return Copied(
        manifest=arrived,
        moved=moved,
        ancestors=tuple(one.ref for one in ancestors),
        beside=tuple(beside(target, arrived)),
        noted=noted,
    )


def bring(source: Store, target: Store, manifest: Manifest, **provenance: str) -> Manifest:
    """Send an artifact's bytes, every one checked on both sides, and what lies beside it; returns it as it arrived.

    Raises IntegrityError when the bytes are not what the manifest says; then nothing new is visible in the target.
    """
    kind, name = manifest.content.kind, manifest.provenance.name
    folder = source.fetch(manifest)
    before = {one.version for one in target.manifests(kind, name)}
    made = manifest.provenance.model_copy(update={"blob_versions": {}, **provenance})
    arrived = target.publish(folder, kind=kind, inputs=manifest.content.inputs, provenance=made)
    if arrived.version != manifest.version:
        if arrived.version not in before:
            target.delete(arrived)
        raise IntegrityError(f"{manifest.ref} changed while it was sent to {target.uri}", remedy="Copy it again.")
    bring_beside(source, target, arrived)
    return arrived


def bring_beside(source: Store, target: Store, manifest: Manifest) -> bool:
    """Make what lies beside an artifact in the target the same as in the source; whether anything had to be done."""
    existing, changed = beside(target, manifest), False
    for name, data in beside(source, manifest).items():
        if existing.get(name) != data:
            target.attach(manifest, name, data)
            changed = True
    return changed


def beside(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """What lies beside an artifact, by name."""
    result = ((name, store.attachment(manifest, name)) for name in BESIDE)
    return {name: data for name, data in result if data is not None}


def beside_digests(store: Store, manifest: Manifest) -> dict[str, str]:
    """sha256 of what lies beside an artifact, by name."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in beside(store, manifest).items()}


def ancestry(store: Store, manifest: Manifest) -> Iterator[Manifest]:
    """Everything that an artifact was made from or under, nearest first, each once."""
    queue, seen = [manifest], {manifest.ref}
    while queue:
        made = queue.pop(0).provenance
        for ref in dict.fromkeys((*made.inputs, *made.context)):
            if ref in seen:
                continue
            seen.add(ref)
            result = foreign.manifest_of(store, ref)
            if result:
                queue.append(result)
                yield result


def sound(source: Store, ref: str, home: Path) -> Manifest:
    """The artifact of a reference, every byte and signature of it verified. Raises Unknown, IntegrityError."""
    manifest, problems = problems_of(source, ref, keys=home / "keys")
    if problems:
        raise _refused(manifest, problems, f"in {source.uri}", "Nothing was sent. `headway verify` names every file.")
    return manifest


def require_other(source: Store, target: Store) -> None:
    """Raise ValueError when both stores are one, or one lies within the other."""
    ours, theirs = source.uri.rstrip("/"), target.uri.rstrip("/")
    if f"{ours}/".startswith(f"{theirs}/") or f"{theirs}/".startswith(f"{ours}/"):
        raise ValueError(f"{target.uri} is where it comes from ({source.uri}); name another store")


def require_there(target: Store) -> None:
    """Raise Missing when the folder that a store would be made in is not there: a disk that is not mounted, a typing mistake."""
    if not target.uri.startswith("file://"):
        return
    folder = Path(unquote(urlparse(target.uri).path))
    if not folder.parent.is_dir():
        raise Missing(
            f"there is no folder {folder.parent}, which the store {folder.name} would lie in",
            remedy="Mount the disk, or make the folder; or name another store: stores.yaml names them.",
        )


def _there(target: Store, manifest: Manifest) -> Manifest | None:
    return target.manifest(manifest.content.kind, manifest.provenance.name, manifest.version)


def _arrive(source: Store, target: Store, manifest: Manifest, home: Path, *, existing: Manifest | None) -> Manifest:
    """The artifact in the target, verified there; `there` when its bytes need not be sent. What is not sound is removed again."""
    new = _there(target, manifest) is None
    arrived = existing or bring(source, target, manifest, copied_from=source.uri)
    if existing:
        bring_beside(source, target, arrived)
    problems = problems_of(target, arrived.ref, keys=home / "keys")[1]
    if problems:
        if new:
            target.delete(arrived)
        left = "It was removed there again; copy it again." if new else "Copy it again."
        raise _refused(arrived, problems, f"as it arrived in {target.uri}", left)
    return arrived


def _refused(manifest: Manifest, problems: list[Problem], where: str, remedy: str) -> IntegrityError:
    text = ", ".join(
        str(one.actual) if one.problem == "signature" else f"{one.path} ({one.problem})" for one in problems[:5]
    )
    entries = [one.model_dump() for one in problems]
    return IntegrityError(f"{manifest.ref} is not copied: {where}, {text}", problems=entries, remedy=remedy)


# A model into an Azure ML registry, for teams that work in Azure ML: verified before it goes, and read back when it is
# there.
#
# What a registry gets is laid out by tasks/storage/azureml_registry.py.


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
        # What tells of the model where there is no store: its manifest, its signatures, what it was made from.
        lineage = [json.loads(foreign.to_json(one)) for one in ancestors]
        about = {
            "manifest.json": foreign.to_json(manifest),
            "ancestry.json": json.dumps(lineage, indent=1, ensure_ascii=False).encode(),
            **signatures,
        }
        what = f"{manifest.ref} to {uri}"
        with audited(source, "copy model", right="publish", what=what, after=manifest.version, reason=reason):
            uri = _send(source, client, manifest, about, home / "work")
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
