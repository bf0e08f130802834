"""Files of an artifact that stay in the store while a job reads parts of them: each part is verified by itself.

`fetch_but` brings all other files of an artifact and describes those that stay in `remote.json` beside them; `open_remote` opens
them there. What verifies a part are the digests of the file's blocks (tasks/formats/mmididx.py), which are brought.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path

from azure.core.exceptions import ResourceNotFoundError

from tasks.common.errors import IntegrityError
from tasks.common.process import read_json, write_json
from tasks.formats.mmididx import BLOCK, REMOTE, Blocks, Remote, remote_files
from tasks.storage.blob import layout
from tasks.storage.blob.client import READ_TRIES, Container, open_container
from tasks.storage.blob.store import BlobStore
from tasks.storage.manifest import Manifest, remake
from tasks.storage.settings import StoreConfig


def fetch_but(store: BlobStore, manifest: Manifest, stay: Collection[str], into: Path) -> Path:
    """An artifact's files in a folder, every byte verified, but for those that stay where they are.

    Raises Missing, IntegrityError.
    """
    left = [entry for entry in manifest.content.files if entry.path in stay]
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    store.copy_files(manifest, [entry.path for entry in manifest.content.files if entry.path not in stay], into)
    folder, versions = layout.files_folder(manifest), manifest.provenance.blob_versions
    files = {e.path: Remote(e.size, folder + e.path, versions[e.path], remake(manifest))._asdict() for e in left}
    write_json(into / REMOTE, {"store": store.container.config.model_dump(mode="json"), "files": files})
    return into


class RemoteTokens:
    """`.bin` files of an artifact that were left in the store, one after the other as one. Any thread may read."""

    def __init__(self, container: Container, folder: Path, names: Sequence[str]) -> None:
        """`folder` is where `fetch_but` brought the rest. Raises IntegrityError for digests that do not fit their file."""
        known = remote_files(folder)
        self._container, self._files = container, [known[f"{name}.bin"] for name in names]
        self._blocks = [Blocks(folder / name, file.size) for name, file in zip(names, self._files, strict=True)]
        self._begins = [0, *accumulate(file.size for file in self._files)]
        self.size = self._begins[-1]

    def read(self, start: int, length: int) -> bytes:
        """These bytes; fewer only at the end. Raises IntegrityError for bytes that are not those that were published, Missing
        for a store that does not answer."""
        parts, end = [], min(start + length, self.size)
        while start < end:
            number = bisect_right(self._begins, start) - 1
            inside, stop = start - self._begins[number], min(end, self._begins[number + 1])
            parts.append(self._verified(number, inside, stop - start))
            start = stop
        return b"".join(parts)

    def _verified(self, number: int, start: int, length: int) -> bytes:
        file, blocks = self._files[number], self._blocks[number]
        first = start // BLOCK
        size = min(-(-(start + length) // BLOCK) * BLOCK, file.size) - first * BLOCK
        damaged: list[int] = []
        for _ in range(READ_TRIES):  # what was flipped on the way is whole the next time
            data = self._part(file, first * BLOCK, size)
            if len(data) == size and not (damaged := blocks.damaged(first, data)):
                skipped = start - first * BLOCK
                return data[skipped : skipped + length]
        how = f"is not what was published from byte {damaged[0] * BLOCK} on" if damaged else "is shorter than it was"
        raise self._damaged(file, how)

    def _part(self, file: Remote, start: int, length: int) -> bytes:
        blob = self._container.blob(file.blob, file.version)
        with self._container.told(file.blob):
            try:
                stream = blob.download_blob(offset=start, length=length, max_concurrency=1, decompress=False)
                return stream.readall()
            except ResourceNotFoundError:
                raise self._damaged(file, "is gone") from None

    def _damaged(self, file: Remote, how: str) -> IntegrityError:
        return IntegrityError(f"{self._container.uri}/{file.blob} {how}", remedy=file.remedy)


def open_remote(folder: Path, names: Sequence[str]) -> RemoteTokens:
    """The files of tokens of an artifact whose `.bin` were left in the store. Raises Missing for a credential that this machine
    lacks, IntegrityError."""
    config = StoreConfig.model_validate((read_json(folder / REMOTE) or {})["store"])
    return RemoteTokens(open_container(config), folder, names)
