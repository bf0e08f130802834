"""A store in Azure Blob storage. See tasks/storage/store.py for what the methods promise, layout.py for what lies where.

Files have stable paths that are overwritten; the manifest, written last and only once, names what each was at that moment.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from azure.storage.blob import BlobProperties

from tasks.common.claims import Claims
from tasks.common.errors import IntegrityError
from tasks.common.seal import sealed
from tasks.storage import cache
from tasks.storage.blob import layout, lease, versions
from tasks.storage.blob.claims import BlobClaims
from tasks.storage.blob.client import BLOCK, Container, Written, in_parallel
from tasks.storage.blob.transfer import check_stored, over_files, upload
from tasks.storage.blob.versions import Mode, id_of, stored_sizes
from tasks.storage.history import current
from tasks.storage.manifest import (
    Content,
    FileEntry,
    Manifest,
    Problem,
    Provenance,
    hash_file,
    manifest_bytes,
    parse_manifest,
    plain_files,
    remake,
    require_intact,
)
from tasks.storage.store import Document, Listed

# One publication: what is there already is referred to, what is not is uploaded, and the manifest makes it appear.
#
# A publication that is cut off leaves nothing that anybody sees, and the next one goes on where it stood. Bytes are
# transfer.py's.


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
        # What versions of the name have under the same paths; older ones are read only where the current one has not
        # all.
        kept: dict[str, list[Kept]] = {}
        for manifest in known:
            named = manifest.provenance.blob_versions
            for file in manifest.content.files:
                if sizes.get(file.path) == file.size and file.path in named:
                    kept.setdefault(file.path, []).append(Kept(file.size, file.sha256, named[file.path]))
            if kept.keys() == sizes.keys():
                break
        brought = over_files(lambda path: self._bring(path, kept.get(path, [])), list(files), size_of=sizes.__getitem__)
        self.reused = {each.entry.path for each in brought if each.reused}
        content = Content(kind=self.kind, files=tuple(each.entry for each in brought), inputs=tuple(sorted(inputs)))
        return Manifest(
            content=content, provenance=_with(self.provenance, {each.entry.path: each.blob_version for each in brought})
        )

    def appear(self, manifest: Manifest) -> Manifest | None:
        """Write the manifest; None when another wrote one for the same content first."""
        if not self.reused:
            key = layout.folder_of(manifest) + layout.MANIFEST
            new = self.container.put(key, manifest_bytes(manifest), new=True, metadata=_published())
            return manifest if new else None
        with lease.held(self.container, f"{self.place}lease") as require:
            gone = self.reused - versions.stored_sizes(self.container, manifest).keys()
            if gone:
                manifest = self._again(manifest, sorted(gone))
            # Make a manifest that stands on files of others appear, but not when a deletion began after `require` was
            # asked. A deletion removes all drafts before it looks what is needed; the service then refuses
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
            # Empty when somebody has written over it since it was looked at.
            name = result and (
                result.blob_version
                or (versions.snapshot(self.container, f"{self.place}files/{path}", result.etag) or "")
            )
            if name:
                return Brought(FileEntry(path=path, size=size, sha256=sha256), name, reused=True)
        entry, blob_version = self._upload(path)
        return Brought(entry, blob_version, reused=False)

    def _left_by_a_killed_one(self, path: str, size: int) -> Kept | None:
        """A large file that was uploaded whole, by a publication that came to no manifest."""
        head = self.container.head(f"{self.place}files/{path}")
        sha256 = (head.metadata or {}).get("sha256") if head and head.size == size else None
        return Kept(size, sha256, head.version_id or "", str(head.etag)) if head and sha256 else None

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


@lru_cache(maxsize=8)
def mode(container: Container) -> versions.Mode:
    """Found once a process: it costs a request, and is the same for all names."""
    return versions.detect(container)


def _with(provenance: Provenance, named: dict[str, str]) -> Provenance:
    return provenance.model_copy(update={"blob_versions": named})


def _published() -> dict[str, str]:
    return {"published": str(time.time_ns())}


# Making an old version lie under the stable paths again: by copies inside the account, no byte passes through us.


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


# Removing a version for good: its manifest first, then the bytes that no other version of its name refers to.
#
# Only what the version names goes away, and copies of it that a promotion made: what another publication has just
# uploaded stays. A publication that was stopped before its manifest appeared, and whose lease ran out meanwhile, loses
# its draft first.


def remove(container: Container, manifest: Manifest, mode: Mode, others: Callable[[], Iterable[Manifest]]) -> None:
    """Remove a version. `others` reads the manifests of its name that are left. Raises Lost, Missing, Refused."""
    place = layout.name_folder(manifest.content.kind, manifest.provenance.name)
    with lease.held(container, f"{place}lease") as require:

        def gone(blob: BlobProperties) -> None:
            require()
            # The current blob goes by its etag; the service does not let go of it by its version id, before it is an
            # old one.
            if blob.is_current_version or not id_of(blob):
                container.remove(blob.name, etag=str(blob.etag))
            if id_of(blob):
                container.remove(blob.name, id_of(blob))

        in_parallel(gone, list(container.listing(layout.drafts_folder(place), include=(mode,))))
        container.remove(layout.folder_of(manifest) + layout.MANIFEST)
        in_parallel(gone, list(container.listing(layout.folder_of(manifest), include=(mode,))))
        kept = {
            (layout.files_folder(other) + path, blob_version)
            for other in others()
            for path, blob_version in other.provenance.blob_versions.items()
        }
        chosen = _chosen(container, manifest, mode, kept)
        in_parallel(gone, [blob for blob in chosen if blob.snapshot])
        in_parallel(gone, [blob for blob in chosen if not blob.snapshot])
        if mode == "snapshots":
            # A blob with snapshots cannot be deleted without them: what was to go is overwritten by one of those.
            bases = {blob.name for blob in chosen if not blob.snapshot}
            for name, blob_version in {
                name: blob_version for name, blob_version in sorted(kept) if name in bases
            }.items():
                container.copy(name, blob_version)


def _chosen(container: Container, manifest: Manifest, mode: Mode, kept: set[tuple[str, str]]) -> list[BlobProperties]:
    """The stored bytes that go: those that the manifest names, and unnamed copies of them under the same path."""
    folder = layout.files_folder(manifest)
    named = {folder + path: v for path, v in manifest.provenance.blob_versions.items()}
    ours = {path: version for path, version in named.items() if (path, version) not in kept}
    hashes = {folder + file.path: file.sha256 for file in manifest.content.files}
    results = [b for b in container.listing(folder, include=(mode, "metadata", "copy")) if b.name in ours]
    etags = {str(blob.etag) for blob in results if id_of(blob) == ours[blob.name]}

    def goes(blob: BlobProperties) -> bool:
        if (blob.name, id_of(blob)) in kept:
            return False
        copied = bool(blob.copy.id) and (blob.metadata or {}).get("sha256") == hashes[blob.name]
        return id_of(blob) == ours[blob.name] or copied or (not id_of(blob) and str(blob.etag) in etags)

    return [blob for blob in results if goes(blob)]


READ_TRIES = 3
PAGE = 32
Names = list[tuple[str, str]]
Problems = list[Problem]
"""Aliases, because a store has a method of that name."""


class BlobStore:
    """A prefix of a container, safe for several writers at once; fetched files are kept below the home."""

    def __init__(self, container: Container, home: Path) -> None:
        self.container, self.home = container, home
        self.uri = container.uri
        self.claims: Claims | None = BlobClaims(container)

    def publish(
        self, folder: Path, *, kind: str, inputs: tuple[str, ...], provenance: Provenance, link: bool = False
    ) -> Manifest:
        layout.name_folder(kind, provenance.name)
        publication = Publication(self.container, folder, kind=kind, provenance=provenance)
        made = publication.bring(self._known(kind, provenance.name), inputs)
        existing = self.manifest(kind, provenance.name, made.version)
        published = self._mended(existing, publication) if existing else publication.appear(made)
        if published is None:  # somebody else made the same version at the same time
            published = self.manifest(kind, provenance.name, made.version) or made
        if link:
            cache.keep(cache.place_of(self.home, published), published, folder)
        return published

    def _known(self, kind: str, name: str) -> Iterator[Manifest]:
        """Versions of a name whose files need not be uploaded again, the current one first."""
        version = current(self, kind, name)
        if version and (now := self.manifest(kind, name, version)):
            yield now
        yield from itertools.islice(self.manifests(kind, name), PAGE)

    def _mended(self, existing: Manifest, publication: Publication) -> Manifest:
        """What is published again is the newest again; what was damaged meanwhile is uploaded again."""
        problems = self.verify(existing)
        if problems:
            return publication.replace(existing, {problem.path for problem in problems})
        key = layout.folder_of(existing) + layout.MANIFEST
        head = self.container.head(key)
        if head:
            self.container.touch(key, {**(head.metadata or {}), "published": str(time.time_ns())})
        return existing

    def fetch(self, manifest: Manifest) -> Path:
        def download(entries: list[FileEntry], into: Path) -> None:
            self._download_all(manifest, entries, into)

        return cache.filled(cache.place_of(self.home, manifest), manifest, download)

    def copy_files(self, manifest: Manifest, names: Collection[str], into: Path) -> None:
        self._download_all(manifest, [entry for entry in manifest.content.files if entry.path in names], into)

    def _download_all(self, manifest: Manifest, entries: list[FileEntry], into: Path) -> None:
        result = over_files(lambda e: self._download(manifest, e, into / e.path), entries, size_of=_size)
        problems = [problem for problem in result if problem]
        # A version whose bytes the account no longer has is told as that: it is not damage on the way.
        gone = [problem.path for problem in problems if problem.problem == "missing"]
        if gone:
            raise IntegrityError(
                f"{manifest.ref}: the stored version of {', '.join(gone[:5])} is gone: deleted, or expired by a lifecycle rule",
                problems=[problem.model_dump() for problem in problems],
                remedy="Undelete it while the account keeps it (soft delete: az storage blob undelete), restore it from a backup "
                f"(headway restore), or: {remake(manifest)}",
            )
        require_intact(manifest, problems)

    def _download(self, manifest: Manifest, entry: FileEntry, target: Path) -> Problem | None:
        target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(READ_TRIES):
            with open(target, "wb") as file:
                problem = self._check(manifest, entry, file.write)
            if not problem or problem.problem == "missing":
                break
        return problem

    def verify(self, manifest: Manifest) -> list[Problem]:
        # What was flipped on the way is whole the next time; what is damaged there is not.
        result = over_files(
            lambda entry: self._check(manifest, entry) and self._check(manifest, entry),
            list(manifest.content.files),
            size_of=_size,
        )
        return [problem for problem in result if problem]

    def _check(
        self, manifest: Manifest, entry: FileEntry, write: Callable[[bytes], object] | None = None
    ) -> Problem | None:
        version = manifest.provenance.blob_versions.get(entry.path)
        if not version:
            return Problem(path=entry.path, problem="missing", expected=entry.size)
        return check_stored(self.container, layout.files_folder(manifest) + entry.path, entry, version, write)

    def present(self, manifest: Manifest) -> bool:
        if not self.container.head(layout.folder_of(manifest) + layout.MANIFEST):
            return False
        sizes = stored_sizes(self.container, manifest)
        return all(sizes.get(entry.path) == entry.size for entry in manifest.content.files)

    def manifest(self, kind: str, name: str, version: str) -> Manifest | None:
        key = layout.version_folder(kind, name, version) + layout.MANIFEST
        result = self.container.get(key)
        where = f"{self.uri}/{key}"
        return parse_manifest(result.data, where=where, kind=kind, name=name, version=version) if result else None

    def manifests(self, kind: str = "", name: str = "") -> Iterator[Manifest]:
        for each_kind, each_name in self._names(kind, name):
            results = sorted(self._versions(each_kind, each_name), key=_age)
            read = partial(self.manifest, each_kind, each_name)
            for start in range(0, len(results), PAGE):
                page = in_parallel(read, [version for version, _ in results[start : start + PAGE]])
                yield from (manifest for manifest in page if manifest)

    def versions(self) -> Iterator[Listed]:
        names = self._names("", "")
        for (kind, name), item in zip(names, in_parallel(lambda n: list(self._versions(*n)), names), strict=True):
            for version, blob in item:
                yield Listed(kind, name, version, str(blob.etag))

    def promote(self, manifest: Manifest) -> None:
        promote(self.container, manifest, mode(self.container))

    def delete(self, manifest: Manifest) -> None:
        kind, name = manifest.content.kind, manifest.provenance.name
        remove(self.container, manifest, mode(self.container), lambda: self.manifests(kind, name))
        cache.drop(cache.place_of(self.home, manifest))

    def uri_of(self, manifest: Manifest) -> str:
        return f"{self.uri}/{layout.folder_of(manifest)}".rstrip("/")

    def location(self, manifest: Manifest, file: FileEntry) -> str:
        version = manifest.provenance.blob_versions.get(file.path, "")
        kind = "snapshot" if version.startswith("snapshot:") else "versionid"
        named = version.removeprefix("snapshot:")
        return f"{self.uri}/{layout.files_folder(manifest)}{file.path}" + (f"?{kind}={named}" if named else "")

    def attach(self, manifest: Manifest, name: str, data: bytes) -> None:
        self.container.put(layout.folder_of(manifest) + layout.attachment_name(name), data)

    def attachment(self, manifest: Manifest, name: str) -> bytes | None:
        result = self.container.get(layout.folder_of(manifest) + layout.attachment_name(name))
        return result.data if result else None

    def read(self, key: str) -> Document | None:
        result = self.container.get(layout.document_key(key))
        return Document(key, result.data, result.etag) if result else None

    def create(self, key: str, data: bytes) -> bool:
        return self.container.put(layout.document_key(key), sealed(data, key=key), new=True) is not None

    def replace(self, key: str, data: bytes, *, etag: str | None) -> bool:
        if etag is None:
            return self.create(key, data)
        return self.container.put(layout.document_key(key), sealed(data, key=key), etag=etag) is not None

    def list(self, prefix: str) -> list[str]:
        folder = layout.document_key(prefix).rstrip("/") + "/"
        return sorted(blob.name.removeprefix("documents/") for blob in self.container.listing(folder))

    def _names(self, kind: str, name: str) -> Names:
        """Kinds and names that match, sorted; an empty word matches all."""
        kinds = [kind] if kind else self.container.folders("artifacts/")
        if name:
            return [(each, name) for each in kinds]
        result = in_parallel(lambda each: self.container.folders(f"artifacts/{each}/"), kinds)
        return sorted((each, inside) for each, names in zip(kinds, result, strict=True) for inside in names)

    def _versions(self, kind: str, name: str) -> Iterator[tuple[str, BlobProperties]]:
        folder = f"{layout.name_folder(kind, name)}versions/"
        for blob in self.container.listing(folder, include=("metadata",)):
            version, _, rest = blob.name.removeprefix(folder).partition("/")
            if rest == layout.MANIFEST:
                yield version, blob


def _age(listed: tuple[str, BlobProperties]) -> tuple[float, int]:
    """Newest first: by the service's clock, which counts seconds; within a second by that of who published."""
    _, blob = listed
    return -blob.last_modified.timestamp(), -int((blob.metadata or {}).get("published", 0))


def _size(entry: FileEntry) -> int:
    return entry.size
