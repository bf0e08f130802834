"""A manifest: what an artifact is made of, and the check of a folder against it. Pure: folders in, values out.

The version of an artifact is the sha256 of the content part. What may differ between two equal artifacts (where, when,
by whom) is provenance. See docs/DESIGN.md, "Artifact, store".

Names of files that somebody else chose, in a manifest or in a listing of another machine, are judged here too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from tasks.common.errors import IntegrityError
from tasks.common.seal import has_seal, opened, sealed
from tasks.config.base import digest

_NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f\\]")


def is_plain(path: str) -> bool:
    """Whether a path stays inside the folder that it is joined to, and means one file on every file system."""
    return not _NOT_PLAIN.search(path) and not any(part in ("", ".", "..") for part in path.split("/"))


def require_inside(names: Iterable[str], *, where: str) -> None:
    """Raise IntegrityError when a name that was listed somewhere must not be joined to a folder of ours."""
    strange = [name for name in names if not is_plain(name)]
    if strange:
        raise IntegrityError(
            f"{where} holds {strange[0]!r}, which is no name of a file below it: no leading /, no .., no \\, no control sign",
            problems=[{"path": name, "problem": "name"} for name in strange],
            remedy="Nothing of it was brought. Find out who wrote it, and remove it there.",
        )


SCHEMA = "headway/manifest/1"
CHUNK = 4 << 20
THREADS, AT_ONCE = 16, 1000
"""Files that are hashed at once, and files that wait for it."""
A = TypeVar("A")
R = TypeVar("R")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """One file: its path inside the artifact, with `/`, and what its bytes must be."""

    path: str
    size: int
    sha256: str


class Content(_Part):
    """What the version is the hash of."""

    kind: str
    files: tuple[FileEntry, ...]
    inputs: tuple[str, ...] = ()
    """Versions of the artifacts that this one was made from, sorted."""


class Provenance(_Part):
    """What two equal artifacts may differ in."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    created: str = ""
    """UTC, ISO 8601."""
    inputs: tuple[str, ...] = ()
    """References of the artifacts in the version."""
    context: tuple[str, ...] = ()
    """References of what the stage ran on or under: a qualification, a plan."""
    stage: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    config_digest: str | None = None
    config: dict[str, Any] | None = None
    metrics: dict[str, float] = {}
    blob_versions: dict[str, str] = {}
    """Blob version id by file, where the store is Azure Blob; `snapshot:TIME` where the account has no versions."""
    who: str | None = None
    host: str | None = None
    flow: str | None = None
    flow_run: str | None = None
    key: str | None = None
    """Of the stage's record, with `stage`: records/STAGE/KEY.json."""
    environment: str | None = None
    """Digest of the installed packages, or of the image."""
    sku: str | None = None
    """What the machine is: the size of its VM, else its processor."""


class Manifest(_Part):
    content: Content
    provenance: Provenance
    schema_: str = SCHEMA
    _sealed: bool = PrivateAttr(default=True)

    @property
    def sealed(self) -> bool:
        """Whether it was read with a seal; what an older release wrote has none."""
        return self._sealed

    @property
    def version(self) -> str:
        return digest(self.content.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """sha256 of all that it says, but for where the store put the bytes: that changes when an older version is promoted."""
        output = self.model_dump(mode="json", exclude={"schema_": True, "provenance": {"blob_versions"}})
        return digest(output)

    @property
    def ref(self) -> str:
        return f"{self.content.kind}/{self.provenance.name}@{self.version}"

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.content.files)


class Problem(_Part):
    """One way in which a folder is not what its manifest says."""

    path: str
    problem: Literal["missing", "extra", "size", "sha256", "link", "signature", "format"]
    expected: str | int | None = None
    actual: str | int | None = None


def describe(folder: Path) -> tuple[FileEntry, ...]:
    """Every file below a folder with size and sha256, in the order of their paths.

    Raises ValueError for links and special files: what is published is bytes, and nothing else.
    """
    files = plain_files(folder)
    hashed = _by_threads(hash_file, list(files.values()))
    return tuple(
        FileEntry(path=path, size=size, sha256=sha256) for path, (size, sha256) in zip(files, hashed, strict=True)
    )


def plain_files(folder: Path) -> dict[str, Path]:
    """Every file below a folder by its path inside the artifact, in the order of a manifest. Raises ValueError as `describe`."""
    result = {path.relative_to(folder).as_posix(): path for path in _walk(folder)}
    for relative, path in result.items():
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{relative} is a link or a special file; only plain files can be published")
    require_plain_paths(result)
    return result


def require_plain_paths(paths: Iterable[str]) -> None:
    """Raise ValueError unless every path stays inside the artifact, and means one file on every file system."""
    seen: dict[str, str] = {}
    for path in paths:
        if not is_plain(path):
            raise ValueError(f"{path!r} is no path inside an artifact: no leading /, no .., no \\, no control sign")
        other = seen.setdefault(path.casefold(), path)
        if other != path:
            raise ValueError(f"{path!r} and {other!r} differ in case only: they are one file on some systems")


def check(
    folder: Path, files: Iterable[FileEntry], *, copies: Mapping[str, Callable[[bytes], object]] | None = None
) -> list[Problem]:
    """Compare every byte of a folder with a manifest's files; files that it does not name are problems too.

    The bytes that were compared also go to the file's entry in `copies`, by path.
    """
    if folder.is_symlink():
        return [Problem(path=".", problem="link", expected="a folder")]
    expected = {entry.path: entry for entry in files}
    result = {path.relative_to(folder).as_posix(): path for path in _walk(folder)} if folder.is_dir() else {}
    problems = [Problem(path=path, problem="extra") for path in sorted(result.keys() - expected.keys())]
    checked = _by_threads(
        lambda entry: check_file(result.get(entry.path), entry, copy_to=(copies or {}).get(entry.path)),
        list(expected.values()),
    )
    return problems + [problem for each in checked for problem in each]


def check_file(
    path: Path | None, entry: FileEntry, *, copy_to: Callable[[bytes], object] | None = None
) -> list[Problem]:
    """Compare every byte of one file with its entry; the bytes also go to `copy_to`."""
    if path is None or not (path.exists() or path.is_symlink()):
        return [Problem(path=entry.path, problem="missing", expected=entry.size)]
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return [Problem(path=entry.path, problem="link", expected="a plain file with one name")]
    if status.st_size != entry.size:
        return [Problem(path=entry.path, problem="size", expected=entry.size, actual=status.st_size)]
    _, actual = hash_file(path, copy_to)
    if actual != entry.sha256:
        return [Problem(path=entry.path, problem="sha256", expected=entry.sha256, actual=actual)]
    return []


def remake(manifest: Manifest) -> str:
    """How a person gets a damaged artifact back: equal content is the same version, and mends what is there."""
    if manifest.content.kind == "dataset" and manifest.provenance.stage != "validate":
        return "Publish the same files again: `headway dataset publish`."
    return f"Make it again: `headway retrain --from {manifest.provenance.stage}`, with the same -c and --set."


def require_intact(manifest: Manifest, problems: list[Problem]) -> None:
    """Raise IntegrityError that names each file, when there are problems."""
    if not problems:
        return
    text = ", ".join(f"{p.path} ({p.problem})" for p in problems[:5])
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    raise IntegrityError(
        f"{manifest.ref} is not what its manifest says: {text}{more}",
        problems=[p.model_dump() for p in problems],
        remedy=f"Nothing was run on it. {remake(manifest)}",
    )


def hash_file(path: Path, copy_to: Callable[[bytes], object] | None = None) -> tuple[int, str]:
    """Size and sha256 of a file, read once; each chunk also goes to `copy_to`."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            size += len(chunk)
            if copy_to:
                copy_to(chunk)
    return size, sha256.hexdigest()


def manifest_bytes(manifest: Manifest) -> bytes:
    """A manifest as it is written into a store."""
    parts = manifest.model_dump(mode="json", exclude={"schema_"})
    return sealed(json.dumps({"schema": SCHEMA, **parts}, indent=1, ensure_ascii=False).encode())


def parse_manifest(data: bytes, *, where: str, kind: str, name: str, version: str) -> Manifest:
    """A manifest as it was read, which must be the one that its place says.

    Raises ValueError for one of a schema that this Headway does not know, IntegrityError for one that was edited.
    """
    try:
        value = dict(json.loads(opened(data, where=where)))
        schema = value.pop("schema")
        manifest = Manifest.model_validate(value) if schema == SCHEMA else None
        if manifest:
            manifest._sealed = has_seal(data)
            require_plain_paths(file.path for file in manifest.content.files)
    except (ValueError, TypeError, KeyError) as error:
        raise _edited(where, "it is no manifest") from error
    if manifest is None:
        raise ValueError(f"{where} is of a schema that this Headway does not know; it reads {SCHEMA}: upgrade Headway")
    if (manifest.content.kind, manifest.provenance.name, manifest.version) != (kind, name, version):
        raise _edited(where, f"it says {manifest.ref}")
    return manifest


def _edited(where: str, how: str) -> IntegrityError:
    return IntegrityError(
        f"{where} was edited: {how}",
        remedy="Restore the manifest, or delete the version's folder and run the stage again.",
    )


def _by_threads(do: Callable[[A], R], items: Sequence[A]) -> Iterator[R]:
    """What comes of each item, in order. Hashing leaves the interpreter to other threads, so several files are read at once."""
    workers = min(THREADS, os.cpu_count() or 1, len(items))
    if workers < 2:
        yield from map(do, items)
        return
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(items), AT_ONCE):
            yield from pool.map(do, items[start : start + AT_ONCE])


def _walk(folder: Path) -> list[Path]:
    """Everything below a folder that is not a folder itself; links are listed, never followed."""
    results = []
    for parent, folders, files in os.walk(folder, followlinks=False):
        base = Path(parent)
        results += [base / name for name in files]
        results += [base / name for name in folders if (base / name).is_symlink()]
    return sorted(results, key=lambda path: path.relative_to(folder).as_posix())
