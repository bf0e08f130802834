"""Publishing: bytes into the store, an entry in the audit log, and a change of the name's history; in that order.

Who is killed in between publishes again, and finds done what was done: the version is the content's. Bytes are tasks/storage.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common.errors import IntegrityError
from tasks.config.environment import surroundings
from tasks.registry.versions import is_noted, note
from tasks.security.audit import actor, audited
from tasks.security.signatures import KINDS, is_signed, lineage_digest
from tasks.storage.history import current, newest_publication
from tasks.storage.manifest import Manifest, Provenance
from tasks.storage.store import Store, counts_as_newest


def publish(
    store: Store,
    folder: Path,
    *,
    kind: str,
    inputs: tuple[str, ...],
    provenance: Provenance,
    link: bool = False,
) -> Manifest:
    """Make an artifact of a folder, and the version that its name means; see `Store.publish`."""
    signed = provenance.model_copy(update={"who": actor().name, **surroundings()})
    manifest = store.publish(folder, kind=kind, inputs=inputs, provenance=signed, link=link)
    name = provenance.name
    before, becomes_current = current(store, kind, name), counts_as_newest(manifest)
    output = {"what": manifest.ref, "before": before, "after": manifest.version, "manifest": manifest.digest}
    with audited(store, f"publish {kind}", right="publish", **output) as entry:
        known = newest_publication(store, kind, name, manifest.version)
        as_known = known is None or known.manifest in ("", manifest.digest)  # what was damaged is published anew
        if as_known and (before == manifest.version or (not becomes_current and is_noted(store, manifest))):
            return manifest
        note(
            store,
            kind,
            name,
            action="publish",
            version=manifest.version,
            current=becomes_current,
            flow_run=provenance.flow_run,
            manifest=manifest.digest,
            **entry.noted,
        )
    return manifest


def publish_for_signing(
    store: Store,
    home: Path,
    folder: Path,
    *,
    kind: str,
    inputs: tuple[str, ...],
    provenance: Provenance,
    link: bool = False,
) -> Manifest:
    """Publish what is to be signed: the store must not say that it was made of something else, nor otherwise.

    The same bytes may be there already, with the lineage of whoever made them first: it stays if somebody trusted signed it.
    Kinds that are not signed are published as ever. Raises IntegrityError.
    """
    for _ in range(2):
        manifest = publish(store, folder, kind=kind, inputs=inputs, provenance=provenance, link=link)
        ours = lineage_digest(manifest.provenance) == lineage_digest(provenance)
        if ours or kind not in KINDS or is_signed(store, home, manifest):
            return manifest
        store.delete(manifest)
    raise lineage_conflict(manifest)


def lineage_conflict(manifest: Manifest) -> IntegrityError:
    """What to raise for an artifact of which the store says something else than who made it."""
    return IntegrityError(
        f"{manifest.ref} has another lineage in the store than whoever made it gave it, and nobody trusted signed it",
        remedy="Find out who writes to the store. Then make it again; a stage of a run by --from.",
    )
