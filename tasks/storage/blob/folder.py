"""A folder on this machine and a prefix of a container, kept in step: for the folders of jobs that share no file system.

What changed here since it last went or came goes up; what changed there comes down. Neither overwrites what the other side
changed: what is newer here stays, and goes up. Files that only grow lie in segments, so that a long log is not sent again and
again. What a job's folder holds, and who writes what of it, is for its users: tasks/jobs/node/mirror.py and tasks/compute.

With a key, each file carries a code (HMAC-SHA256 of its name and content), and only files with a right code come. Whoever may
write to the container, and does not have the key, cannot pass a file off as one of the job's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from azure.storage.blob import BlobProperties

from tasks.artifacts import parse_ref
from tasks.common.errors import IntegrityError
from tasks.common.process import whole
from tasks.storage.blob import layout
from tasks.storage.blob.client import BLOCK, Container, Small, in_parallel, open_container
from tasks.storage.blob.credentials import token_credential
from tasks.storage.blob.store import BlobStore
from tasks.storage.blob.transfer import check_stored, upload
from tasks.storage.manifest import FileEntry, require_inside
from tasks.storage.settings import Identity, StoreConfig
from tasks.storage.store import Store, find

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential

SEGMENT = 1 << 20
"""Bytes of one segment of a file that grows: what is sent at most again when a line is added."""
PAGE = 5000
"""Blobs of one page of a listing."""
GROWING = (".log", ".jsonl")
_SEGMENT = re.compile(r"(.+\.(?:log|jsonl))@(\d{6,})", re.DOTALL)
"""The second segment of a file that grows, and those after it."""
LAST = ("receipt", "manifest", "LATEST", "output.json", "result", "exit")
"""Beginnings of names that tell of others, in the order in which they move: each after all that it tells of."""
Wanted = Callable[[str], bool]


class Seen(NamedTuple):
    """A file here, as it was when it last went or came."""

    changed: int
    size: int
    inode: int


def everything(name: str) -> bool:
    return True


class _Changed(Exception):
    """A file that was written anew while it came."""


class BlobFolder:
    """State: what was last seen of each file here, and the etag of each blob there."""

    def __init__(
        self,
        container: Container,
        prefix: str,
        local: Path,
        *,
        theirs: bool = False,
        key: bytes = b"",
        only: str = "",
        but: str = "",
    ) -> None:
        """`theirs`: nothing here is newer than what is there, whatever it looks like. Without a key, files carry no code.

        `only` and `but` are folders right below, with `/`: the one that is kept in step, or one that is passed over on both
        sides, at a cost that does not grow with what it holds.
        """
        self.container, self.prefix, self.local = container, prefix.rstrip("/") + "/", local
        self._only, self._but, self._much_there = only, but, False
        self.theirs, self._key = theirs, key
        self.arriving: Callable[[str, bytes], bytes] = lambda name, data: data
        """What is made of a small file before it is written here."""
        self._here: dict[str, Seen] = {}
        self._there: dict[str, str] = {}
        self._before: dict[str, Seen] = {}

    def pull(self, wanted: Wanted = everything) -> None:
        """Bring what changed there, and delete what is gone there. Raises Missing, IntegrityError.

        Nothing is brought while a name that is wanted leads out of the folder.
        """
        listed = self._listed()
        news = [name for name, blob in listed.items() if self._there.get(name) != blob.etag and self._may(name, wanted)]
        self._require_inside(news)
        for group in _in_order(news):
            in_parallel(lambda name: self._receive(name, listed[name]), group)
        for name in [name for name in self._there if name not in listed and self._may(name, wanted)]:
            del self._there[name]
            if _file_of(name) == name:
                (self.local / name).unlink(missing_ok=True)
                self._here.pop(name, None)

    def bring(self, etags: Mapping[str, str]) -> None:
        """Bring files by their names, without a listing: each that is not here as of its etag; one without an etag is gone there.

        Raises Missing, IntegrityError.
        """
        self._require_inside(etags)
        news = [name for name, etag in etags.items() if etag and self._may(name, everything)]
        # Of a file that grows, the etag is that of its first segment alone.
        news = [name for name in news if name.endswith(GROWING) or self._there.get(name) != etags[name]]
        for group in _in_order(news):
            in_parallel(self._bring, group)
        for name in (name for name, etag in etags.items() if not etag and self._may(name, everything)):
            (self.local / name).unlink(missing_ok=True)
            self._here.pop(name, None)
            for known in [name, *(self._segments(name) if name.endswith(GROWING) else ())]:
                self._there.pop(known, None)

    def push(self, wanted: Wanted = everything, *, settled: bool = False) -> list[str]:
        """Send what changed here, and remove what was here and is gone; returns the names of both. Raises Missing.

        A large file waits until it has not changed between two looks, and what tells of others waits for its folder;
        `settled` says that nothing writes any more.
        """
        result = {name: seen for name, seen in self._look() if wanted(name)}
        changed = [name for name, seen in result.items() if self._here.get(name) != seen]
        large = [name for name in changed if result[name].size > BLOCK and not name.endswith(GROWING)]
        growing = [name for name in large if self._before.get(name) != result[name]]
        waiting = set() if settled else {_folder(name) for name in growing}
        self._before = result
        sent = [name for name in changed if not _waits(name, waiting)]
        for group in _in_order(sent):
            in_parallel(lambda name: self._send(name, result[name]), group)
        gone = [name for name in self._here if name not in result and wanted(name)]
        for group in reversed(_in_order(gone)):
            in_parallel(self._remove, group)
        return [*sent, *gone]

    def ignore_what_lies_there(self, wanted: Wanted) -> None:
        """Take what is there now as known, without bringing it: only what changes from now on comes."""
        listed = {name: str(blob.etag) for name, blob in self._listed().items() if wanted(name)}
        self._require_inside(listed)
        self._there |= listed

    def has(self, name: str) -> bool:
        """Whether a file lies there."""
        return self.container.head(self.prefix + name) is not None

    def knows(self, name: str) -> bool:
        """Whether a file lies there as it is here, as far as was seen: it was sent, or it came."""
        return name in self._there

    def etag(self, name: str) -> str:
        """Of a file as it was last sent, or came; empty when it is not there."""
        return self._there.get(name, "")

    def read(self, name: str) -> bytes | None:
        """A small file that lies there; None when there is none. Raises IntegrityError, as `pull` does."""
        small = self._small(name)
        return small.data if small else None

    def put_first(self, name: str, data: bytes) -> bytes:
        """Write a small file where none lies; what lies there now, of whoever was the first. Raises Missing, IntegrityError."""
        marks = self._marks(name, hashlib.sha256(data).hexdigest())
        self.container.put(self.prefix + name, data, new=True, metadata=marks)
        return self.read(name) or b""

    def clear(self, wanted: Wanted) -> None:
        """Remove what lies there."""
        names = [blob.name.removeprefix(self.prefix) for blob in self.container.listing(self.prefix)]
        for group in reversed(_in_order(name for name in names if wanted(_file_of(name)))):
            in_parallel(lambda name: self.container.remove(self.prefix + name), group)
            for name in group:
                self._there.pop(name, None)

    def _may(self, name: str, wanted: Wanted) -> bool:
        """Whether a blob may come: it is asked for, and the file here is as it was when it last went or came."""
        name = _file_of(name)
        return wanted(name) and (self.theirs or self._here.get(name) == _seen(self.local / name))

    def _require_inside(self, names: Iterable[str]) -> None:
        require_inside(names, where=f"{self.container.uri}/{self.prefix}")

    def _listed(self) -> dict[str, BlobProperties]:
        """What lies there, by name. A folder that is passed over is listed only until it proves to hold more than a page."""
        if self._much_there:
            blobs = self.container.listing_but(self.prefix, self._but)
            return {blob.name.removeprefix(self.prefix): blob for blob in blobs}
        listed, passed_over = dict[str, BlobProperties](), 0
        for blob in self.container.listing(self.prefix + self._only):
            name = blob.name.removeprefix(self.prefix)
            if self._but and name.startswith(self._but):
                passed_over += 1
            else:
                listed[name] = blob
        self._much_there = passed_over > PAGE
        return listed

    def _look(self) -> Iterable[tuple[str, Seen]]:
        for parent, folders, files in os.walk(self.local / self._only):
            if self._but and parent == str(self.local):
                folders[:] = [folder for folder in folders if f"{folder}/" != self._but]
            for file in files:
                seen = None if file.startswith(".") else _seen(Path(parent) / file)
                if seen:
                    yield (Path(parent) / file).relative_to(self.local).as_posix(), seen

    def _bring(self, name: str) -> None:
        """Bring one file, with all of its segments where it grows; nothing where it is gone by now."""
        number, blob = 0, self.container.head(self.prefix + name)
        while blob:
            self._receive(f"{name}@{number:06d}" if number else name, blob)
            number += 1
            more = name.endswith(GROWING) and blob.size == SEGMENT
            blob = self.container.head(f"{self.prefix}{name}@{number:06d}") if more else None

    def _receive(self, name: str, blob: BlobProperties) -> None:
        path = self.local / _file_of(name)
        try:
            came = self._received(path, name, blob)
        except FileNotFoundError:  # its folder was deleted here meanwhile, as retention does
            return
        if came:
            self._there[name] = came
            if seen := _seen(path):
                self._here[_file_of(name)] = seen

    def _received(self, path: Path, name: str, blob: BlobProperties) -> str | None:
        if path.name.endswith(GROWING):
            if blob.size > SEGMENT:
                raise self._not_ours(name, f"it has {blob.size:,} bytes, more than a segment")
            result = self._small(name)
            if result is None:
                return None
            start = _number_of(name) * SEGMENT
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(result.data)
                if len(result.data) < SEGMENT:
                    file.truncate()
            return result.etag
        return self._receive_large(path, name) if blob.size > BLOCK else self._receive_small(path, name)

    def _receive_small(self, path: Path, name: str) -> str | None:
        result = self._small(name)
        if result is None:
            return None
        with whole(path) as file:
            file.write(self.arriving(name, result.data))
        return result.etag

    def _small(self, name: str) -> Small | None:
        result = self.container.get(self.prefix + name)
        if result:
            self._require_ours(name, hashlib.sha256(result.data).hexdigest(), result.metadata)
        return result

    def _marks(self, name: str, sha256: str) -> dict[str, str]:
        """Metadata of a file: the code by which who has the key knows it."""
        made = hmac.new(self._key, f"{name}\0{sha256}".encode(), "sha256").hexdigest()
        return {"code": made} if self._key else {}

    def _require_ours(self, name: str, sha256: str, metadata: Mapping[str, str]) -> None:
        expected = self._marks(name, sha256).get("code", "")
        actual = metadata.get("code", "") if self._key else ""
        if not hmac.compare_digest(expected.encode(), actual.encode()):
            raise self._not_ours(name, f"its code is {'wrong' if 'code' in metadata else 'missing'}")

    def _not_ours(self, name: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"{self.container.uri}/{self.prefix}{name} is not from the job or from who submitted it: {why}",
            remedy="See who may write to this container, delete that folder there, and run the same command again.",
        )

    def _receive_large(self, path: Path, name: str) -> str | None:
        """A file of many ranges, whole and with the sha256 that it was sent with; None when it changed on the way."""
        head = self.container.head(self.prefix + name)
        if head is None:
            return None
        metadata = head.metadata or {}
        entry = FileEntry(path=name, size=head.size, sha256=metadata.get("sha256", ""))
        self._require_ours(name, entry.sha256, metadata)
        try:
            with whole(path) as file:
                if check_stored(self.container, self.prefix + name, entry, "", file.write):
                    raise _Changed
        except _Changed:
            now = self.container.head(self.prefix + name)
            if now and now.etag == head.etag:
                raise self._not_ours(name, "its bytes are not those of its sha256") from None
            return None
        return str(head.etag)

    def _send(self, name: str, seen: Seen) -> None:
        path = self.local / name
        try:
            if name.endswith(GROWING):
                # Send a grown file from the segment on in which it ended; one that became shorter, whole.
                before = self._here.get(name)
                first = before.size // SEGMENT if before and before.size <= seen.size else 0
                with open(path, "rb") as file:
                    for number in range(first, seen.size // SEGMENT + 1):
                        file.seek(number * SEGMENT)
                        data = file.read(min(SEGMENT, seen.size - number * SEGMENT))
                        hint = f"{name}@{number:06d}" if number else name
                        marks = self._marks(hint, hashlib.sha256(data).hexdigest())
                        if written := self.container.put(self.prefix + hint, data, metadata=marks):
                            self._there[hint] = written.etag
                for hint in self._segments(name):
                    if _number_of(hint) > seen.size // SEGMENT:
                        self.container.remove(self.prefix + hint)
                        del self._there[hint]
            else:
                sent = upload(self.container, self.prefix + name, path, lambda sha256: self._marks(name, sha256))
                self._there[name] = sent.written.etag
        except FileNotFoundError:  # deleted since we looked: the next look finds that
            return
        self._here[name] = seen

    def _remove(self, name: str) -> None:
        for existing in self._segments(name) if name.endswith(GROWING) else (name,):
            if existing in self._there:
                self.container.remove(self.prefix + existing)
                del self._there[existing]
        self._here.pop(name, None)

    def _segments(self, name: str) -> list[str]:
        """The blobs of a file that grows, as far as was seen: one after the other, from the first."""
        names = (f"{name}@{number:06d}" if number else name for number in count())
        return list(takewhile(self._there.__contains__, names))


def _seen(path: Path) -> Seen | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return Seen(status.st_mtime_ns, status.st_size, status.st_ino)


def _file_of(name: str) -> str:
    """The file that a blob is, or is a segment of."""
    segment = _SEGMENT.fullmatch(name)
    return segment[1] if segment else name


def _number_of(name: str) -> int:
    """Which segment of its file a blob is."""
    segment = _SEGMENT.fullmatch(name)
    return int(segment[2]) if segment else 0


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _waits(name: str, waiting: set[str]) -> bool:
    """Whether a file is held back: its folder has one that grows, or one below it has, and it tells of others."""
    folder = _folder(name)
    if folder in waiting:
        return True
    tells = name.rpartition("/")[2].startswith(LAST)
    return tells and any(each.startswith(f"{folder}/") for each in waiting)


def _in_order(names: Iterable[str]) -> list[list[str]]:
    """Names in groups that move one after the other; segments of one file in the order that they have in it."""
    groups: dict[int, list[str]] = {}
    for name in sorted(names):
        base = name.rpartition("/")[2]
        place = next((n for n, start in enumerate(LAST, start=1) if base.startswith(start)), 0)
        groups.setdefault(place, []).append(name)
    return [groups[place] for place in sorted(groups)]


# Where jobs on machines without a shared folder find their files: a store's container, as a value that is handed to who
# submits.
#
# A job's folder lies below `jobs/`, what jobs start from below `code/`, both beside the store's artifacts (layout.py).


class BlobFiles:
    """A store's container for jobs. Nothing is asked of Azure before a method needs it."""

    def __init__(self, config: StoreConfig, home: Path, own: Store, *, jobs: StoreConfig | None = None) -> None:
        """`own` is the store that the home works in, which may be another one; `jobs` where folders of jobs lie, if elsewhere."""
        self.config, self._home, self._own = config, home, own
        self.uri = config.uri.rstrip("/")
        self.credential, self.secret = str(config.credential), config.secret
        self.jobs: BlobFiles = BlobFiles(jobs, home, own) if jobs else self

    def folder(self, prefix: str, local: Path, key: bytes, *, but: str = "") -> BlobFolder:
        """A job's folder, of which this side only reads what the job changes, and nothing of the folder `but`."""
        return BlobFolder(self._container, prefix, local, theirs=True, key=key, but=but)

    def place(self, ref: str) -> str:
        """The folder of an artifact's version, where its manifest lies. Raises ValueError for a reference that is none."""
        kind, name, version = parse_ref(ref)
        return layout.version_folder(kind, name, version)

    def have(self, ref: str) -> None:
        """See to it that an artifact is in this store; one of another store is copied. Raises Missing, IntegrityError."""
        kind, name, version = parse_ref(ref)
        store = BlobStore(self._container, self._home)
        if store.manifest(kind, name, version):
            return
        manifest = find(self._own, kind, name, version)
        provenance = manifest.provenance.model_copy(update={"blob_versions": {}})
        files = self._own.fetch(manifest)
        store.publish(files, kind=kind, inputs=manifest.content.inputs, provenance=provenance)

    def put_once(self, name: str, write: Callable[[Path], None]) -> None:
        """Have a file lie under a name that tells its content; it is made only where it is not there."""
        if self._container.head(name):
            return
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "made"
            write(made)
            upload(self._container, name, made)

    def keeps_versions(self) -> bool:
        """Whether what is overwritten or deleted there stays, and is paid for; a small blob is written. Raises Missing."""
        return bool((written := self._container.put(layout.PROBE, layout.PROBE_TEXT)) and written.version)

    def token(self) -> TokenCredential:
        """What other services of Azure know us by: as the store does; with a connection string, who is logged in.

        Raises Missing.
        """
        kind = self.config if self.config.credential != "connection_string" else Identity()
        return token_credential(kind, of=self.uri)

    @property
    def _container(self) -> Container:
        return open_container(self.config)
