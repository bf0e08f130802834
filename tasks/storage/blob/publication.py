"""One publication: what is there already is referred to, what is not is uploaded, and the manifest makes it appear.

A publication that is cut off leaves nothing that anybody sees, and the next one goes on where it stood. Bytes are transfer.py's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tasks.storage.blob import layout, lease, versions
from tasks.storage.blob.client import BLOCK, Container, Written
from tasks.storage.blob.transfer import over_files, upload
from tasks.storage.manifest import Content, FileEntry, Manifest, Provenance, hash_file, manifest_bytes, plain_files


class Kept(NamedTuple):
    """A file of a version that is there, and the name of its bytes."""

    size: int
    sha256: str
    blob_version: str
    etag: str = ""
    """Of the blob as it was looked at, where it has no name yet."""


class Brought(NamedTuple):
    """A file that is in the store now."""

    entry: FileEntry
    blob_version: str
    reused: bool


class Publication:
    """A folder on its way into a container, under one name."""

    def __init__(self, container: Container, folder: Path, *, kind: str, provenance: Provenance) -> None:
        self.container, self.folder = container, folder
        self.kind, self.provenance = kind, provenance
        self.place = layout.name_folder(kind, provenance.name)
        self.reused: set[str] = set()

    def bring(self, known: Iterable[Manifest], inputs: tuple[str, ...]) -> Manifest:
        """Have all bytes in the store; what is made of them is visible only after `appear`.

        Raises ValueError for a folder that cannot be an artifact, Missing for an account that cannot keep it.
        """
        files = plain_files(self.folder)
        if not files:
            raise ValueError(f"{self.folder} holds no file: an empty {self.kind} is not published")
        layout.require_blob_names(self.container.prefix + self.place + "files/", files)
        sizes = {path: where.stat().st_size for path, where in files.items()}
        mode(self.container)
        kept = _kept(known, sizes)
        brought = over_files(lambda path: self._bring(path, kept.get(path, [])), list(files), size_of=sizes.__getitem__)
        self.reused = {each.entry.path for each in brought if each.reused}
        content = Content(kind=self.kind, files=tuple(each.entry for each in brought), inputs=tuple(sorted(inputs)))
        return Manifest(
            content=content, provenance=_with(self.provenance, {each.entry.path: each.blob_version for each in brought})
        )

    def appear(self, manifest: Manifest) -> Manifest | None:
        """Write the manifest; None when another wrote one for the same content first."""
        if not self.reused:
            return self._write(manifest)
        with lease.held(self.container, f"{self.place}lease") as require:
            gone = self.reused - versions.stored_sizes(self.container, manifest).keys()
            if gone:
                manifest = self._again(manifest, sorted(gone))
            # Make a manifest that stands on files of others appear, but not when a deletion began after `require` was
            # asked. A deletion removes all drafts before it looks what is needed (store.py); the service then refuses
            # to copy this one.
            draft = layout.drafts_folder(self.place) + uuid.uuid4().hex
            written = self.container.put(draft, manifest_bytes(manifest), metadata=_published())
            try:
                require()
                appeared = self.container.appear(draft, layout.folder_of(manifest) + layout.MANIFEST)
            finally:
                self.container.remove(draft)
                if written and written.version:
                    self.container.remove(draft, written.version)
            if appeared is None:
                raise lease.lost(self.container, f"{self.place}lease")
            return manifest if appeared else None

    def replace(self, existing: Manifest, damaged: set[str]) -> Manifest:
        """Upload what is damaged of a version, and have its manifest name the new bytes. Nobody deletes it meanwhile.

        Raises Lost when somebody did all the same, because we were stopped for longer than a lease lasts.
        """
        key = layout.folder_of(existing) + layout.MANIFEST
        with lease.held(self.container, f"{self.place}lease") as require:
            before = self.container.head(key)
            gone = {file.path for file in existing.content.files} - versions.stored_sizes(
                self.container, existing
            ).keys()
            mended = self._again(existing, sorted(damaged | gone))
            require()
            etag = str(before.etag) if before else ""
            if not etag or not self.container.put(key, manifest_bytes(mended), etag=etag, metadata=_published()):
                raise lease.lost(self.container, f"{self.place}lease")
        return mended

    def _bring(self, path: str, kept: list[Kept]) -> Brought:
        source = self.folder / path
        size = source.stat().st_size
        same_size = [each for each in kept if each.size == size]
        if size > BLOCK and (left := self._left_by_a_killed_one(path, size)):
            same_size.append(left)
        if same_size:
            size, sha256 = hash_file(source)
            result = next((each for each in same_size if each.sha256 == sha256), None)
            name = result and (result.blob_version or self._snapshot(path, result.etag))
            if name:
                return Brought(FileEntry(path=path, size=size, sha256=sha256), name, reused=True)
        entry, blob_version = self._upload(path)
        return Brought(entry, blob_version, reused=False)

    def _left_by_a_killed_one(self, path: str, size: int) -> Kept | None:
        """A large file that was uploaded whole, by a publication that came to no manifest."""
        head = self.container.head(f"{self.place}files/{path}")
        sha256 = (head.metadata or {}).get("sha256") if head and head.size == size else None
        return Kept(size, sha256, head.version_id or "", str(head.etag)) if head and sha256 else None

    def _snapshot(self, path: str, etag: str) -> str:
        """Empty when somebody has written over it since it was looked at."""
        return versions.snapshot(self.container, f"{self.place}files/{path}", etag) or ""

    def _upload(self, path: str) -> tuple[FileEntry, str]:
        """The last try is what counts: a file that is written to while it is published is taken as it was read then."""
        name, entries = f"{self.place}files/{path}", list[FileEntry]()

        def once() -> Written:
            done = upload(self.container, name, self.folder / path)
            entries.append(FileEntry(path=path, size=done.size, sha256=done.sha256))
            return done.written

        blob_version = versions.seal(self.container, mode(self.container), name, once)
        return entries[-1], blob_version

    def _again(self, manifest: Manifest, paths: Iterable[str]) -> Manifest:
        named, expected = dict(manifest.provenance.blob_versions), {e.path: e for e in manifest.content.files}
        for path in paths:
            entry, named[path] = self._upload(path)
            if entry != expected[path]:
                raise ValueError(f"{path} was changed while it was published; publish again when nobody writes to it")
        return manifest.model_copy(update={"provenance": _with(manifest.provenance, named)})

    def _write(self, manifest: Manifest) -> Manifest | None:
        key = layout.folder_of(manifest) + layout.MANIFEST
        written = self.container.put(key, manifest_bytes(manifest), new=True, metadata=_published())
        return manifest if written else None


@lru_cache(maxsize=8)
def mode(container: Container) -> versions.Mode:
    """Found once a process: it costs a request, and is the same for all names."""
    return versions.detect(container)


def _kept(known: Iterable[Manifest], sizes: dict[str, int]) -> dict[str, list[Kept]]:
    """What versions of the name have under the same paths; older ones are read only where the current one has not all."""
    kept: dict[str, list[Kept]] = {}
    for manifest in known:
        named = manifest.provenance.blob_versions
        for file in manifest.content.files:
            if sizes.get(file.path) == file.size and file.path in named:
                kept.setdefault(file.path, []).append(Kept(file.size, file.sha256, named[file.path]))
        if kept.keys() == sizes.keys():
            break
    return kept


def _with(provenance: Provenance, named: dict[str, str]) -> Provenance:
    return provenance.model_copy(update={"blob_versions": named})


def _published() -> dict[str, str]:
    return {"published": str(time.time_ns())}
