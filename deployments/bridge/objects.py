"""Which blobs an event may be about, and what such a blob is now, as storage says.

An address out of an event is compared and never asked: account, container and prefix must be those of our configuration, letter
for letter, and the address that is asked is made of our configuration. Its ETag and size are read again. Getting the bytes is
arrivals.py.
"""

from __future__ import annotations

import fnmatch
import os
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobProperties

from deployments.bridge.clients import container_of
from deployments.configuration.events import ContainerConfig, EventsConfig
from tasks.storage.blob import faults

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
    known = (listed or {}).get((container, name))
    return known or _read(container, name)


def list_many(urls: Iterable[str], config: EventsConfig) -> Places:
    """Look at many blobs by one listing a container, where they lie close together. Raises Missing while storage is away.

    What a page of the listing does not reach is left out, and so is what is not allowed.
    """
    wanted: dict[ContainerConfig, set[str]] = {}
    for url in urls:
        with suppress(NotAllowed):
            container, name = allowed(url, config)
            wanted.setdefault(container, set()).add(name)
    return {
        (container, blob.name): Blob(container, blob.name, blob.etag.strip('"'), blob.size, blob.version_id or "")
        for container, names in wanted.items()
        if len(names) >= WORTH_A_LISTING
        for blob in _page(container, os.path.commonprefix(sorted(names)))  # noqa: RUF071 - letters, not folders
        if blob.name in names
    }


def _page(container: ContainerConfig, prefix: str) -> list[BlobProperties]:
    with faults.told(container.url, container.credential):
        pages = container_of(container).list_blobs(name_starts_with=prefix, results_per_page=PAGE).by_page()
        return list(next(pages))


def _read(container: ContainerConfig, name: str) -> Blob:
    client = container_of(container).get_blob_client(name)
    with faults.told(f"{container.url}/{name}", container.credential):
        try:
            result = client.get_blob_properties()
        except ResourceNotFoundError as error:
            if faults.code_of(error) == "ContainerNotFound":
                raise
            raise NotAllowed(f"{container.url}/{name} is gone") from None
    return Blob(container, name, result.etag.strip('"'), result.size, result.version_id or "")


def allowed(url: str, config: EventsConfig) -> tuple[ContainerConfig, str]:
    """The container, and the name in it, that an address means. Raises NotAllowed; nothing is asked of anybody."""
    within = [container for container in config.containers if url.startswith(f"{container.url}/")]
    if not within:
        raise NotAllowed(f"{_short(url)} is in no container that events may be about")
    name = _name_in(url.removeprefix(f"{within[0].url}/"), url)
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


def _name_in(encoded: str, url: str) -> str:
    """The name of a blob, decoded once. Raises NotAllowed."""
    wrong = next((why for what, why in _NEVER.items() if what in encoded.lower()), "")
    try:
        name = unquote(encoded, errors="strict")
    except UnicodeDecodeError:
        raise NotAllowed(f"{_short(url)} holds bytes that are no UTF-8") from None
    if wrong := wrong or strange(name):
        raise NotAllowed(f"{_short(url)} holds {wrong}")
    return name


def _short(url: str) -> str:
    """An address from outside, as a log may have it."""
    return ascii(url[:200])
