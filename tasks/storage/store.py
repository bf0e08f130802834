"""What every store can do: publish and fetch artifacts, and keep small documents with compare-and-set.

Stages never see a store: tasks/orchestration/stage.py hands them `publish` and `fetch`. Implementations: local.py (a folder),
blob/ (Azure Blob). See docs/DESIGN.md, "Artifact, store".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from tasks.common.claims import Claims
from tasks.common.errors import Unknown
from tasks.common.seal import opened
from tasks.storage.history import current
from tasks.storage.manifest import FileEntry, Manifest, Problem, Provenance


@dataclass(frozen=True)
class Document:
    """A small value under a key, and the tag that a compare-and-set names."""

    key: str
    written: bytes
    """As it lies in the store, with its seal."""
    etag: str

    @property
    def data(self) -> bytes:
        """What was to be kept. Raises IntegrityError when it is not what was written."""
        return opened(self.written, where=self.key)


class Listed(NamedTuple):
    """A published version, as a listing knows it. `stamp` changes whenever its manifest is written again."""

    kind: str
    name: str
    version: str
    stamp: str


class Store(Protocol):
    """Artifacts are immutable and appear with their manifest, which is written last; documents change by etag."""

    uri: str
    claims: Claims | None
    """What several hosts that work in the store claim from each other; None where only one does."""

    def publish(
        self, folder: Path, *, kind: str, inputs: tuple[str, ...], provenance: Provenance, link: bool = False
    ) -> Manifest:
        """Make an artifact of a folder. Equal content is the same version, and is stored once.

        With `link` the store may take the folder's own files instead of copies: the caller deletes the folder as soon as it
        has noted the version, and until then the artifact does not verify.
        """
        ...

    def fetch(self, manifest: Manifest) -> Path:
        """A folder with exactly the artifact's files, every byte checked. Raises IntegrityError."""
        ...

    def copy_files(self, manifest: Manifest, names: Collection[str], into: Path) -> None:
        """Only these files of an artifact, every byte checked; those that it lacks are left out. Raises IntegrityError."""
        ...

    def verify(self, manifest: Manifest) -> list[Problem]:
        """Every way in which the stored files differ from the manifest."""
        ...

    def present(self, manifest: Manifest) -> bool:
        """Whether all files are there with their sizes; bytes are not read."""
        ...

    def manifest(self, kind: str, name: str, version: str) -> Manifest | None: ...

    def manifests(self, kind: str = "", name: str = "") -> Iterator[Manifest]:
        """All published manifests of a kind and name, newest first within a name."""
        ...

    def versions(self) -> Iterator[Listed]:
        """Every published version, in no order, by a listing alone: no manifest is read."""
        ...

    def promote(self, manifest: Manifest) -> None:
        """Make the files of an older version the ones that lie under the stable paths again, without moving bytes through us.

        Only where there are stable paths (Azure Blob); which version is current is said by history.py.
        """
        ...

    def delete(self, manifest: Manifest) -> None:
        """Remove a version for good: its manifest first, then the files that no other version refers to."""
        ...

    def uri_of(self, manifest: Manifest) -> str: ...

    def location(self, manifest: Manifest, file: FileEntry) -> str:
        """Where one file lies, for people."""
        ...

    def attach(self, manifest: Manifest, name: str, data: bytes) -> None:
        """Put a file beside the manifest (a signature); it is not part of the version."""
        ...

    def attachment(self, manifest: Manifest, name: str) -> bytes | None: ...

    def read(self, key: str) -> Document | None: ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a document that must not exist yet; False when it does."""
        ...

    def replace(self, key: str, data: bytes, *, etag: str | None) -> bool:
        """Write a document if its tag is still `etag` (None: if it does not exist); False when it is not."""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys of all documents under a prefix, sorted."""
        ...


def find(store: Store, kind: str, name: str, version: str = "") -> Manifest:
    """The manifest that a reference means: a version by its first digits, or the current one.

    The current version is the one that was published last, or rolled back to; what validation left of a dataset counts only by
    its version. Raises Unknown when there is none, and ValueError when the digits fit several.
    """
    wanted = version or current(store, kind, name) or ""
    exact = store.manifest(kind, name, wanted) if len(wanted) == 64 else None
    if exact:
        return exact
    fitting = [
        m for m in store.manifests(kind, name) if m.version.startswith(version) and (version or counts_as_newest(m))
    ]
    if not fitting:
        known = sorted({m.provenance.name for m in store.manifests(kind)})
        hint = f"There are: {', '.join(f'{kind}/{each}' for each in known)}" if known else f"There is no {kind} yet"
        raise Unknown(
            f"{kind}/{name}{'@' + version if version else ''} is not in {store.uri}",
            remedy=f"{hint}. `headway artifacts {kind}` lists them with their versions.",
        )
    if version and len({m.version for m in fitting}) > 1:
        raise ValueError(f"{kind}/{name}@{version} fits {len(fitting)} versions; give more digits")
    return fitting[0]


def counts_as_newest(manifest: Manifest) -> bool:
    """Whether a name alone may mean this version: what validation left of a dataset is asked for by its version."""
    return manifest.content.kind != "dataset" or manifest.provenance.stage != "validate"
