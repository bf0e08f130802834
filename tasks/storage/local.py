"""A store in a folder: every version of an artifact is a folder of its own that a person can read.

`artifacts/KIND/NAME/VERSION/{manifest.json, files/...}` and `documents/KEY`. A version appears when its manifest does,
which is linked into place last and only once. See store.py for what the methods promise.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from tasks.common.claims import Claims
from tasks.common.errors import IntegrityError
from tasks.common.process import locked
from tasks.common.seal import sealed
from tasks.storage import cache
from tasks.storage.manifest import (
    Content,
    FileEntry,
    Manifest,
    Problem,
    Provenance,
    check,
    check_file,
    describe,
    manifest_bytes,
    parse_manifest,
    require_intact,
)
from tasks.storage.store import Document, Listed

# Reading and writing below a folder that others may write to as well: no link on the way is followed by a write.
#
# Each folder on the way is opened from the one above it, without following links (openat(2), O_NOFOLLOW), and what is
# written is written by that open folder. A look at the path before it is used would not do: a link can appear in
# between.


CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened(top: Path | int, *names: str) -> Iterator[int]:
    """The open folder below another one, made where it is not there. A path `top` may be a link itself.

    Raises IntegrityError for a link, or a file, on the way.
    """
    if isinstance(top, Path):
        top.mkdir(parents=True, exist_ok=True)
    folder = os.open(top, _FOLDER) if isinstance(top, Path) else os.dup(top)
    try:
        for depth, name in enumerate(names, 1):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
            try:
                below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise IntegrityError(
                    f"{'/'.join(names[:depth])} in the store is a link, which may lead out of it, or no folder",
                    remedy="Find out who made it, and remove it.",
                ) from error
            os.close(folder)
            folder = below
        yield folder
    finally:
        os.close(folder)


def read(path: Path) -> bytes:
    """Read a plain file. Raises IntegrityError for anything else in its place: whoever reads a FIFO waits for ever."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise IntegrityError(f"{path} is no plain file", remedy="Find out who made it, and remove it.")
        return file.read()


def write(folder: int, name: str, data: bytes) -> None:
    """Write a file whole, over the one of that name."""
    os.replace(_temporary(folder, name, data), name, src_dir_fd=folder, dst_dir_fd=folder)


def create(folder: int, name: str, data: bytes) -> bool:
    """Write a file whole or not at all, and only if it does not exist: link(2) fails where one is."""
    temporary = _temporary(folder, name, data)
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary, dir_fd=folder)
    return True


def link_or_copy(source: Path, folder: int, name: str, *, link: bool) -> None:
    """Have a file under a new name, read-only: by a second name of the same file, or as a copy. It is on the disk then."""
    if link:
        os.link(source, name, dst_dir_fd=folder)
        made = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    else:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with open(made, "rb" if link else "wb") as file:
        if not link:
            with open(source, "rb") as read:
                shutil.copyfileobj(read, file, CHUNK)
            file.flush()
        os.fsync(made)
        os.fchmod(made, 0o444)


def _temporary(folder: int, name: str, data: bytes) -> str:
    made = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(made, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return made


ABANDONED_SECONDS = 24 * 3600


class LocalStore:
    """A folder on one machine, safe for several processes at once.

    With a `home`, what is fetched is a copy below that home, and what is published a copy of what lies there: who may write to
    the store cannot change what is being read, nor, by a second name of the same file, what a job made.
    """

    def __init__(self, root: Path, *, home: Path | None = None) -> None:
        self.root, self.home = root, home
        self.uri = root.absolute().as_uri()
        self.claims: Claims | None = None

    def publish(
        self, folder: Path, *, kind: str, inputs: tuple[str, ...], provenance: Provenance, link: bool = False
    ) -> Manifest:
        files = describe(folder)
        if not files:
            raise ValueError(f"{folder} holds no file: an empty {kind} is not published")
        content = Content(kind=kind, files=files, inputs=tuple(sorted(inputs)))
        manifest = Manifest(content=content, provenance=provenance)
        if self._sound(manifest):
            with self._among_versions(manifest) as versions, opened(versions, manifest.version) as place:
                os.utime("manifest.json", dir_fd=place, follow_symlinks=False)
        else:
            self._bring_in(folder, manifest, link=link and self.home is None)
        return self.manifest(kind, provenance.name, manifest.version) or manifest

    def _sound(self, manifest: Manifest) -> bool:
        return (self._place(manifest) / "manifest.json").exists() and not self.verify(manifest)

    def _bring_in(self, folder: Path, manifest: Manifest, *, link: bool) -> None:
        """Put the files under a temporary name, and have them appear under a lock: folder first, manifest last."""
        place = self._place(manifest)
        with self._among_versions(manifest) as versions:
            if not link:
                cache.require_room(place.parent, manifest.bytes, what=manifest.ref)
            # Remove what publishers that were killed left behind, a day later.
            for path in place.parent.glob(".incoming-*"):
                if time.time() - _mtime(path) / 1e9 > ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            arriving = f".incoming-{secrets.token_hex(8)}"
            os.mkdir(arriving, 0o700, dir_fd=versions)
            try:
                for entry in manifest.content.files:
                    *above, name = PurePosixPath(entry.path).parts
                    with opened(versions, arriving, "files", *above) as target:
                        link_or_copy(folder / entry.path, target, name, link=link)
                if not link:
                    require_intact(manifest, check(place.parent / arriving / "files", manifest.content.files))
                with locked(Path(".lock"), folder=versions):
                    self._appear(versions, arriving, manifest)
            finally:
                shutil.rmtree(arriving, ignore_errors=True, dir_fd=versions)

    def _appear(self, versions: int, arriving: str, manifest: Manifest) -> None:
        """What was torn or damaged before goes away, its manifest first; what another process published stays."""
        if self._sound(manifest):
            return
        _remove(versions, manifest.version)
        os.rename(arriving, manifest.version, src_dir_fd=versions, dst_dir_fd=versions)
        with opened(versions, manifest.version) as place:
            create(place, "manifest.json", manifest_bytes(manifest))

    def _among_versions(self, manifest: Manifest) -> AbstractContextManager[int]:
        """The open folder of a name, in which each version has its own."""
        return self._opened("artifacts", manifest.content.kind, manifest.provenance.name)

    def fetch(self, manifest: Manifest) -> Path:
        files = self._place(manifest) / "files"
        if self.home is None:
            require_intact(manifest, self.verify(manifest))
            return files

        def copy(entries: list[FileEntry], into: Path) -> None:
            for entry in entries:
                (into / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (into / entry.path).touch()
            copies = {entry.path: partial(_append, into / entry.path) for entry in entries}
            require_intact(manifest, check(files, manifest.content.files, copies=copies))

        return cache.filled(cache.place_of(self.home, manifest), manifest, copy)

    def copy_files(self, manifest: Manifest, names: Collection[str], into: Path) -> None:
        files, problems = self._place(manifest) / "files", list[Problem]()
        for entry in (entry for entry in manifest.content.files if entry.path in names):
            (into / entry.path).parent.mkdir(parents=True, exist_ok=True)
            with open(into / entry.path, "wb") as copy:
                problems += check_file(files / entry.path, entry, copy_to=copy.write)
        require_intact(manifest, problems)

    def verify(self, manifest: Manifest) -> list[Problem]:
        return check(self._place(manifest) / "files", manifest.content.files)

    def present(self, manifest: Manifest) -> bool:
        files = self._place(manifest) / "files"
        sizes = ((files / entry.path, entry.size) for entry in manifest.content.files)
        return (self._place(manifest) / "manifest.json").exists() and all(
            path.is_file() and path.stat().st_size == size for path, size in sizes
        )

    def promote(self, manifest: Manifest) -> None:
        """Every version has a folder of its own here: there is nothing to move."""
        require_intact(manifest, self.verify(manifest))

    def delete(self, manifest: Manifest) -> None:
        with self._among_versions(manifest) as versions, locked(Path(".lock"), folder=versions):
            _remove(versions, manifest.version)
        if self.home is not None:
            cache.drop(cache.place_of(self.home, manifest))

    def manifest(self, kind: str, name: str, version: str) -> Manifest | None:
        return _read_manifest(self.root / "artifacts" / kind / name / version / "manifest.json")

    def manifests(self, kind: str = "", name: str = "") -> Iterator[Manifest]:
        """What may not be looked into is an error: a glob would pass it by, and say that nothing is there."""
        names = (each for above in _below(self.root / "artifacts", kind) for each in _below(above, name))
        results = [Path(version) / "manifest.json" for each in names for version in _folders(each) if version.is_dir()]
        for path in sorted(results, key=lambda p: (p.parts[-4], p.parts[-3], -_mtime(p))):
            manifest = _read_manifest(path)
            if manifest:
                yield manifest

    def versions(self) -> Iterator[Listed]:
        for kind in _folders(self.root / "artifacts"):
            for name in _folders(kind):
                for version in _folders(name):
                    if stamp := _stamp(f"{version.path}/manifest.json"):
                        yield Listed(kind.name, name.name, version.name, stamp)

    def uri_of(self, manifest: Manifest) -> str:
        return self._place(manifest).absolute().as_uri()

    def location(self, manifest: Manifest, file: FileEntry) -> str:
        return str(self._place(manifest).absolute() / "files" / file.path)

    def attach(self, manifest: Manifest, name: str, data: bytes) -> None:
        with self._among_versions(manifest) as versions, opened(versions, manifest.version) as place:
            write(place, name, data)

    def attachment(self, manifest: Manifest, name: str) -> bytes | None:
        path = self._place(manifest) / name
        return read(self._own(path)) if path.is_file() else None

    def read(self, key: str) -> Document | None:
        try:
            data = read(self._own(self._document(key)))
        except FileNotFoundError:
            return None
        return Document(key, data, hashlib.sha256(data).hexdigest())

    def create(self, key: str, data: bytes) -> bool:
        with self._beside(key) as (folder, name):
            return create(folder, name, sealed(data, key=key))

    def replace(self, key: str, data: bytes, *, etag: str | None) -> bool:
        with locked(self.root / ".lock"):
            now = self.read(key)
            if (now.etag if now else None) != etag:
                return False
            with self._beside(key) as (folder, name):
                write(folder, name, sealed(data, key=key))
            return True

    def list(self, prefix: str) -> list[str]:
        base = self._own(self.root / "documents")
        result = (p.relative_to(base).as_posix() for p in self._document(prefix).rglob("*") if p.is_file())
        return sorted(key for key in result if not Path(key).name.startswith("."))

    def _own(self, path: Path) -> Path:
        """A path of the store, if nothing on its way is a link; without a `home`, `documents` and `artifacts` may be links.

        Who can write to the store could have private files of the home read through a link. Raises IntegrityError.
        """
        top, *names = path.relative_to(self.root).parts
        place = str(self.root) if self.home is not None else f"{self.root}/{top}"
        for name in (top, *names) if self.home is not None else names:
            place = f"{place}/{name}"
            if os.path.islink(place):  # noqa: PTH114 - Path takes ten times as long, at every read
                raise IntegrityError(
                    f"{place} is a link, which may lead out of the store",
                    remedy="Find out who made it, and remove it.",
                )
        return path

    def _place(self, manifest: Manifest) -> Path:
        return self.root / "artifacts" / manifest.content.kind / manifest.provenance.name / manifest.version

    @contextmanager
    def _beside(self, key: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a document for writing; yields it and the document's name there."""
        *above, name = self._document(key).relative_to(self.root / "documents").parts
        with self._opened("documents", *above) as folder:
            yield folder, name

    def _opened(self, top: str, *names: str) -> AbstractContextManager[int]:
        """An open folder below `documents` or `artifacts`, which may be links themselves only without a `home`."""
        return opened(self.root / top, *names) if self.home is None else opened(self.root, top, *names)

    def _document(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise ValueError(f"{key!r} is not a document's key: no leading / and no ..")
        return self.root / "documents" / key


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def _remove(versions: int, version: str) -> None:
    """A version's folder, its manifest first; a link in its place raises IntegrityError."""
    with opened(versions, version) as place, suppress(FileNotFoundError):
        os.unlink("manifest.json", dir_fd=place)
    shutil.rmtree(version, ignore_errors=True, dir_fd=versions)


def _read_manifest(path: Path) -> Manifest | None:
    try:
        data = read(path)
    except FileNotFoundError:
        return None
    kind, name, version = path.parts[-4:-1]
    return parse_manifest(data, where=str(path), kind=kind, name=name, version=version)


def _folders(path: os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Folders below one, in no order, without those that are hidden; none where it is not there."""
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.name[0] != "."]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _below(folder: Path, name: str) -> list[Path]:
    """The folder of a name below another one; without a name, of all names."""
    return [folder / name] if name else [Path(each) for each in _folders(folder)]


def _stamp(path: str) -> str:
    """Changes with every write to a file, and every change of its times; empty when there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a hundred thousand of these are one listing
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return f"{status.st_ctime_ns}-{status.st_size}"


def _mtime(path: Path) -> int:
    """When a manifest was written, in nanoseconds; 0 when another process is replacing it right now."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
