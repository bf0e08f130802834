"""Making an old version lie under the stable paths again: by copies inside the account, no byte passes through us."""

from __future__ import annotations

from tasks.common.errors import IntegrityError
from tasks.storage.blob import layout
from tasks.storage.blob.client import Container
from tasks.storage.blob.parallel import in_parallel
from tasks.storage.blob.versions import Mode, stored_sizes
from tasks.storage.manifest import FileEntry, Manifest, remake


def promote(container: Container, manifest: Manifest, mode: Mode) -> None:
    """Copy each file of a version over its stable path. Paths that the version does not have end there; old versions stay.

    On an emulator they do not end: a blob with snapshots cannot be deleted without them. Raises IntegrityError for bytes that
    are gone; nothing was moved then.
    """
    folder, named = layout.files_folder(manifest), manifest.provenance.blob_versions
    sizes = stored_sizes(container, manifest)
    gone = [file.path for file in manifest.content.files if sizes.get(file.path) != file.size]
    if gone:
        raise IntegrityError(
            f"{manifest.ref}: the stored version of {', '.join(gone[:5])} is gone: nothing was promoted",
            remedy=f"Restore it from a backup (headway restore), or: {remake(manifest)}",
        )

    def copy(file: FileEntry) -> None:
        now = container.head(folder + file.path)
        if not now or (now.metadata or {}).get("sha256") != file.sha256:
            container.copy(folder + file.path, named[file.path])

    in_parallel(copy, list(manifest.content.files))
    if mode == "versions":
        wanted = {folder + file.path for file in manifest.content.files}
        others = [blob.name for blob in container.listing(folder) if blob.name not in wanted]
        in_parallel(container.remove, others)
