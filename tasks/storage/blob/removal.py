"""Removing a version for good: its manifest first, then the bytes that no other version of its name refers to.

Only what the version names goes away, and copies of it that a promotion made: what another publication has just uploaded stays.
A publication that was stopped before its manifest appeared, and whose lease ran out meanwhile, loses its draft first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from azure.storage.blob import BlobProperties

from tasks.storage.blob import layout, lease
from tasks.storage.blob.client import Container
from tasks.storage.blob.parallel import in_parallel
from tasks.storage.blob.versions import Mode, id_of
from tasks.storage.manifest import Manifest


def remove(container: Container, manifest: Manifest, mode: Mode, others: Callable[[], Iterable[Manifest]]) -> None:
    """Remove a version. `others` reads the manifests of its name that are left. Raises Lost, Missing, Refused."""
    place = layout.name_folder(manifest.content.kind, manifest.provenance.name)
    with lease.held(container, f"{place}lease") as require:

        def gone(blob: BlobProperties) -> None:
            require()
            _remove(container, blob)

        in_parallel(gone, list(container.listing(layout.drafts_folder(place), include=(mode,))))
        container.remove(layout.folder_of(manifest) + layout.MANIFEST)
        in_parallel(gone, list(container.listing(layout.folder_of(manifest), include=(mode,))))
        kept = _named(others())
        chosen = _chosen(container, manifest, mode, kept)
        in_parallel(gone, [blob for blob in chosen if blob.snapshot])
        in_parallel(gone, [blob for blob in chosen if not blob.snapshot])
        if mode == "snapshots":
            _cover(container, chosen, kept)


def _named(others: Iterable[Manifest]) -> set[tuple[str, str]]:
    return {
        (layout.files_folder(other) + path, blob_version)
        for other in others
        for path, blob_version in other.provenance.blob_versions.items()
    }


def _chosen(container: Container, manifest: Manifest, mode: Mode, kept: set[tuple[str, str]]) -> list[BlobProperties]:
    """The stored bytes that go: those that the manifest names, and unnamed copies of them under the same path."""
    folder = layout.files_folder(manifest)
    named = {folder + path: v for path, v in manifest.provenance.blob_versions.items()}
    ours = {path: version for path, version in named.items() if (path, version) not in kept}
    hashes = {folder + file.path: file.sha256 for file in manifest.content.files}
    found = [b for b in container.listing(folder, include=(mode, "metadata", "copy")) if b.name in ours]
    etags = {str(blob.etag) for blob in found if id_of(blob) == ours[blob.name]}

    def goes(blob: BlobProperties) -> bool:
        if (blob.name, id_of(blob)) in kept:
            return False
        copied = bool(blob.copy.id) and (blob.metadata or {}).get("sha256") == hashes[blob.name]
        return id_of(blob) == ours[blob.name] or copied or (not id_of(blob) and str(blob.etag) in etags)

    return [blob for blob in found if goes(blob)]


def _remove(container: Container, blob: BlobProperties) -> None:
    """The current blob goes by its etag; the service does not let go of it by its version id, before it is an old one."""
    if blob.is_current_version or not id_of(blob):
        container.remove(blob.name, etag=str(blob.etag))
    if id_of(blob):
        container.remove(blob.name, id_of(blob))


def _cover(container: Container, chosen: list[BlobProperties], kept: set[tuple[str, str]]) -> None:
    """A blob with snapshots cannot be deleted without them: what was to go is overwritten by one of those."""
    bases = {blob.name for blob in chosen if not blob.snapshot}
    for name, blob_version in {name: blob_version for name, blob_version in sorted(kept) if name in bases}.items():
        container.copy(name, blob_version)
