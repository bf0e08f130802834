"""A copy, on this machine, of the blobs that a dataset is made of; brought up to date by ETag, so one more blob is one fetch.

`events/blobs/ID` of the home: `files/` with the blobs below the prefix, `etags.json` with what storage called each. Only blobs of
our own configuration are asked for, by names that can mean no other file. Publishing them is arrivals.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path

from azure.core import MatchConditions
from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError
from azure.storage.blob import BlobProperties

from deployments.bridge.clients import WORKERS, container_of
from deployments.bridge.folders import Changed
from deployments.bridge.objects import counts, strange
from deployments.configuration.events import ContainerConfig
from tasks.common.process import private_folder, read_json, write_json
from tasks.storage.blob import faults
from tasks.storage.blob.parallel import in_order
from tasks.storage.cache import require_room

LONGEST_PART = 240
"""Bytes of one part of a name: a file system takes 255."""
log = logging.getLogger("headway.blobs")


class BlobCopies:
    """The copy of what one container gives to a dataset."""

    def __init__(self, home: Path, container: ContainerConfig) -> None:
        self.container = container
        text = f"{container.url}/{container.prefix}#{container.dataset}"
        self.folder = home / "events" / "blobs" / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.files = self.folder / "files"
        self._left_out: set[str] = set()

    def update(self) -> Path:
        """Fetch what is new, remove what is gone; the folder of the files. Raises Changed, and Missing while storage is away."""
        existing = self._listing()
        etags: dict[str, str] = read_json(self.folder / "etags.json") or {}
        kept = {
            name: tag for name, tag in etags.items() if name in existing and self._is_here(name, existing[name], tag)
        }
        self._remove_all_but(kept)
        wanted = [blob for name, blob in existing.items() if name not in kept]
        private_folder(self.files)
        require_room(self.files, sum(blob.size for blob in wanted), what=self.container.url)
        try:
            for name, tag in in_order(self._fetch, wanted, workers=WORKERS, ahead=4 * WORKERS):
                kept[name] = tag
        finally:
            write_json(self.folder / "etags.json", kept)
        return self.files

    def origin(self, source: str) -> str:
        """Where a file of the copy came from, as provenance has it."""
        local = f"{self.files.resolve()}/"
        return (
            f"{self.container.url}/{self.container.prefix}{source.removeprefix(local)}"
            if source.startswith(local)
            else source
        )

    def _listing(self) -> dict[str, BlobProperties]:
        """Blobs that count, by their name below the prefix. One whose name cannot be a file's is left out, and said so once."""
        with faults.told(self.container.url, self.container.credential):
            results = list(container_of(self.container).list_blobs(name_starts_with=self.container.prefix or None))
        named = {
            blob.name.removeprefix(self.container.prefix): blob for blob in results if counts(blob.name, self.container)
        }
        folders = {parent for name in named for parent in _parents(name)}
        wrong = {name: why for name, blob in named.items() if (why := _unfit(name, folders)) and blob.size}
        for name in wrong.keys() - self._left_out:
            log.warning("%s/%r is left out: %s", self.container.url, name, wrong[name])
        self._left_out = set(wrong)
        return {name: blob for name, blob in named.items() if not _unfit(name, folders) and not _hidden(name)}

    def _is_here(self, name: str, blob: BlobProperties, tag: str) -> bool:
        path = self.files / name
        return tag == blob.etag and path.is_file() and path.stat().st_size == blob.size

    def _remove_all_but(self, kept: dict[str, str]) -> None:
        """What is gone from storage, and what a kill left half fetched."""
        for parent, folders, files in os.walk(self.files, topdown=False):
            local = Path(parent)
            for name in files:
                if (local / name).relative_to(self.files).as_posix() not in kept:
                    (local / name).unlink()
            for name in folders:
                if not any((local / name).iterdir()):
                    (local / name).rmdir()

    def _fetch(self, blob: BlobProperties) -> tuple[str, str]:
        """Fetch the blob that was listed, and no other; its name and what storage calls it."""
        name = blob.name.removeprefix(self.container.prefix)
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{hashlib.sha256(path.name.encode()).hexdigest()[:16]}.part")
        client = container_of(self.container).get_blob_client(blob.name)
        with faults.told(f"{self.container.url}/{blob.name}", self.container.credential):
            try:
                stream = client.download_blob(
                    etag=_quoted(blob.etag), match_condition=MatchConditions.IfNotModified, max_concurrency=1
                )
                with open(half, "wb") as file:
                    size = stream.readinto(file)
            except (ResourceModifiedError, ResourceNotFoundError) as error:
                if faults.code_of(error) == "ContainerNotFound":
                    raise
                raise Changed(f"{self.container.url}/{blob.name} was written or deleted meanwhile") from None
        if size != blob.size:
            raise Changed(f"{self.container.url}/{blob.name} has {blob.size} bytes, and {size} came")
        os.replace(half, path)
        return name, str(blob.etag)


def forget(home: Path, containers: tuple[ContainerConfig, ...]) -> None:
    """Remove the copies of containers that are no longer in the configuration."""
    kept = {BlobCopies(home, container).folder for container in containers}
    base = home / "events" / "blobs"
    for folder in base.iterdir() if base.is_dir() else ():
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _quoted(etag: str) -> str:
    """As a condition has it; a listing has it without quotes."""
    return f'"{etag.strip(chr(34))}"'


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _unfit(name: str, folders: set[str]) -> str:
    """Why a blob cannot be a file of this name; an empty blob that stands for a folder is none."""
    if name in folders:
        return "other blobs lie below it, as if it were a folder"
    if any(len(part.encode()) > LONGEST_PART for part in name.split("/")):
        return f"a part of its name is longer than {LONGEST_PART} bytes"
    return strange(name)


def _hidden(name: str) -> bool:
    """What packing leaves out is not fetched: tasks/data/corpus/packing.py."""
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))
