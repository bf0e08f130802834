"""Blobs: which of them an event may be about, what such a blob is now, and a copy of those that a dataset is made of.

An address out of an event is compared and never asked: account, container and prefix must be those of our configuration, letter
for letter, and the address that is asked is made of our configuration, with the one credential that stands beside it. Etag and
size are read again. Publishing a copy is arrivals.py; what Azure's errors mean is tasks/storage/blob/faults.py."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from azure.core import MatchConditions
from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError
from azure.storage.blob import BlobProperties, ContainerClient

from deployments.bridge.folders import Changed
from deployments.configuration.events import ContainerConfig, EventsConfig, QueueConfig
from tasks.common.errors import Missing
from tasks.common.process import private_folder, read_json, write_json
from tasks.storage.blob import faults
from tasks.storage.blob.client import in_order
from tasks.storage.blob.credentials import access
from tasks.storage.blob.faults import CONNECT_SECONDS, READ_SECONDS, Retries
from tasks.storage.cache import require_room
from tasks.storage.settings import Identity, StoreConfig

if TYPE_CHECKING:
    from azure.storage.queue import QueueClient

    from tasks.storage.blob.client import Known

WORKERS = 8
"""Requests at once; the SDK keeps ten connections."""


def container_of(config: ContainerConfig) -> ContainerClient:
    """The client of a container; one a process. Raises Missing."""
    client: ContainerClient = _client(
        ContainerClient.from_container_url, config, config.url, _digest(config), os.getpid()
    )
    return client


def queue_of(config: QueueConfig, name: str = "") -> QueueClient:
    """The client of a queue, or of another one beside it; one a process. Raises Missing."""
    account, _, own = config.url.rpartition("/")
    url = f"{account}/{name or own}"
    from azure.storage.queue import QueueClient  # of the extra `azure`; webhooks need none

    client: QueueClient = _client(QueueClient.from_queue_url, config, url, _digest(config), os.getpid())
    return client


def credential_of(config: ContainerConfig | QueueConfig) -> Known:
    """What an account knows us by. Raises Missing without one, and for one of another account: no event is to blame for it."""
    address = urlsplit(config.url)
    first, *rest = address.path.strip("/").split("/")
    account = first if rest else (address.hostname or "").partition(".")[0]
    output = config.model_dump(include=set(Identity.model_fields))
    try:
        return access(StoreConfig(uri=f"az://{account}/{(first, *rest)[-1]}", **output)).credential
    except ValueError as error:
        raise Missing(f"{config.url}: {error}", remedy="Correct the settings of the platform.") from error


def _digest(config: Identity) -> str:
    return hashlib.sha256(config.secret_value().encode()).hexdigest() if config.secret else ""


@lru_cache(maxsize=128)
def _client(
    make: Callable[..., Any], config: ContainerConfig | QueueConfig, url: str, secret: str, process: int
) -> Any:
    """A client that nobody sends elsewhere, and that soon tells what does not answer. Secret and process are of the cache's
    key."""
    return make(
        url,
        credential_of(config),
        retry_policy=Retries(),
        connection_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        permit_redirects=False,
    )


WORTH_A_LISTING = 16
"""Blobs in one container from which on a listing of a page is less work than asking for each."""
PAGE = 5000
MOST_CHARACTERS = 1024
"""Of a blob's name, as Azure has it."""
_NEVER = {
    "%2f": "an encoded separator",
    "%5c": "an encoded separator",
    "%2e": "an encoded dot",
    "%00": "an encoded NUL",
    "%25": "something encoded twice",
    "\\": "a backslash",
    "?": "a query",
    "#": "a fragment",
}
"""What has no place in an address of a blob: it would mean one thing to us, and another to the next who reads it."""


class NotAllowed(ValueError):
    """An event that will never start anything, with the reason."""


class Blob(NamedTuple):
    """A blob, as storage knows it now."""

    container: ContainerConfig
    name: str
    etag: str
    size: int
    version: str
    """Its version id; empty where the account keeps none."""

    @property
    def url(self) -> str:
        return f"{self.container.url}/{self.name}"

    @property
    def object(self) -> str:
        """What is told of once: its address and what storage calls this content of it."""
        return f"{self.url}#{self.etag}"


Places = dict[tuple[ContainerConfig, str], Blob]
"""Blobs that a listing has just found, by container and name."""


def read_again(url: str, config: EventsConfig, listed: Places | None = None) -> Blob:
    """The blob that an address out of an event means, as storage has it: as it was `listed` just now, or read.

    Raises NotAllowed, and Missing while storage is away.
    """
    container, name = allowed(url, config)
    if known := (listed or {}).get((container, name)):
        return known
    client = container_of(container).get_blob_client(name)
    with faults.told(f"{container.url}/{name}", container.credential):
        try:
            result = client.get_blob_properties()
        except ResourceNotFoundError as error:
            if faults.code_of(error) == "ContainerNotFound":
                raise
            raise NotAllowed(f"{container.url}/{name} is gone") from None
    return Blob(container, name, result.etag.strip('"'), result.size, result.version_id or "")


def list_many(urls: Iterable[str], config: EventsConfig) -> Places:
    """Look at many blobs by one listing a container, where they lie close together. Raises Missing while storage is away.

    What a page of the listing does not reach is left out, and so is what is not allowed.
    """
    wanted: dict[ContainerConfig, set[str]] = {}
    for url in urls:
        with suppress(NotAllowed):
            container, name = allowed(url, config)
            wanted.setdefault(container, set()).add(name)
    result: Places = {}
    for container, names in wanted.items():
        if len(names) < WORTH_A_LISTING:
            continue
        prefix = os.path.commonprefix(sorted(names))  # noqa: RUF071 - letters, not folders
        with faults.told(container.url, container.credential):
            pages = container_of(container).list_blobs(name_starts_with=prefix, results_per_page=PAGE).by_page()
            for blob in next(pages):
                if blob.name in names:
                    etag = blob.etag.strip('"')
                    result[container, blob.name] = Blob(container, blob.name, etag, blob.size, blob.version_id or "")
    return result


def allowed(url: str, config: EventsConfig) -> tuple[ContainerConfig, str]:
    """The container, and the name in it, that an address means. Raises NotAllowed; nothing is asked of anybody."""
    within = [container for container in config.containers if url.startswith(f"{container.url}/")]
    if not within:
        raise NotAllowed(f"{_short(url)} is in no container that events may be about")
    encoded = url.removeprefix(f"{within[0].url}/")
    wrong = next((why for what, why in _NEVER.items() if what in encoded.lower()), "")
    try:
        name = unquote(encoded, errors="strict")  # once
    except UnicodeDecodeError:
        raise NotAllowed(f"{_short(url)} holds bytes that are no UTF-8") from None
    if wrong := wrong or strange(name):
        raise NotAllowed(f"{_short(url)} holds {wrong}")
    below = [container for container in within if name.startswith(container.prefix)]
    if not below:
        raise NotAllowed(f"{_short(url)} is below no prefix that events may be about")
    for container in below:
        if counts(name, container):
            return container, name
    raise NotAllowed(f"{_short(url)} is not of {', '.join(container.include for container in below)}")


def counts(name: str, container: ContainerConfig) -> bool:
    """Whether a blob is one of those that a dataset is made of."""
    last = name.rpartition("/")[2]
    return name.startswith(container.prefix) and bool(last) and fnmatch.fnmatchcase(last, container.include)


def strange(name: str) -> str:
    """What is wrong with the name of a blob, so that it could mean another file than it seems; empty for nothing."""
    if not name or len(name) > MOST_CHARACTERS:
        return f"a name of {len(name)} characters"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "an empty part, . or .."
    if "\\" in name:
        return "a backslash"
    if not name.isprintable():
        return "a character that cannot be shown"
    if unicodedata.normalize("NFC", name) != name:
        return "a character that is written in two ways"
    if any(set(unicodedata.normalize("NFKC", each)) & set("./\\%:@?#") for each in name if not each.isascii()):
        return "a character that looks like a separator"
    return ""


def _short(url: str) -> str:
    """An address from outside, as a log may have it."""
    return ascii(url[:200])


LONGEST_PART = 240
"""Bytes of one part of a name: a file system takes 255."""
log = logging.getLogger("headway.blobs")


class BlobCopies:
    """The copy, on this machine, of what one container gives to a dataset; brought up to date by ETag, so one more blob is
    one fetch.

    It is `events/blobs/ID` of the home: `files/` with the blobs below the prefix, `etags.json` with what storage called each.
    """

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
        kept: dict[str, str] = {}
        for name, tag in etags.items():
            blob, path = existing.get(name), self.files / name
            if blob and tag == blob.etag and path.is_file() and path.stat().st_size == blob.size:
                kept[name] = tag
        # What is gone from storage, and what a kill left half fetched.
        for parent, folders, files in os.walk(self.files, topdown=False):
            local = Path(parent)
            for name in files:
                if (local / name).relative_to(self.files).as_posix() not in kept:
                    (local / name).unlink()
            for name in folders:
                if not any((local / name).iterdir()):
                    (local / name).rmdir()
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
        folders = {name[:end] for name in named for end in range(len(name)) if name[end] == "/"}
        wrong = {name: why for name, blob in named.items() if (why := _unfit(name, folders)) and blob.size}
        for name in wrong.keys() - self._left_out:
            log.warning("%s/%r is left out: %s", self.container.url, name, wrong[name])
        self._left_out = set(wrong)
        # What packing leaves out is not fetched: tasks/data/corpus/packing.py.
        hidden = {name for name in named for part in name.split("/") if part.startswith(".") or part == "__pycache__"}
        return {name: blob for name, blob in named.items() if not _unfit(name, folders) and name not in hidden}

    def _fetch(self, blob: BlobProperties) -> tuple[str, str]:
        """Fetch the blob that was listed, and no other; its name and what storage calls it."""
        name = blob.name.removeprefix(self.container.prefix)
        path = self.files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{hashlib.sha256(path.name.encode()).hexdigest()[:16]}.part")
        client = container_of(self.container).get_blob_client(blob.name)
        with faults.told(f"{self.container.url}/{blob.name}", self.container.credential):
            try:
                etag = f'"{blob.etag.strip(chr(34))}"'  # a listing has it without quotes, a condition with them
                stream = client.download_blob(
                    etag=etag, match_condition=MatchConditions.IfNotModified, max_concurrency=1
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


def _unfit(name: str, folders: set[str]) -> str:
    """Why a blob cannot be a file of this name; an empty blob that stands for a folder is none."""
    if name in folders:
        return "other blobs lie below it, as if it were a folder"
    if any(len(part.encode()) > LONGEST_PART for part in name.split("/")):
        return f"a part of its name is longer than {LONGEST_PART} bytes"
    return strange(name)
