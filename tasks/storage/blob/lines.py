"""Lines that only grow, in append blobs: for a copy of a log in a container whose policy lets nobody change or delete them.

Each append names the length that it follows, so what is sent twice, or by two at once, is written once. A blob takes 50,000
appends (https://learn.microsoft.com/rest/api/storageservices/append-block), so now and then a new one begins.
"""

from __future__ import annotations

from typing import NamedTuple

from azure.core import MatchConditions
from azure.core.exceptions import HttpResponseError, ResourceExistsError

from tasks.common.errors import Conflict
from tasks.storage.blob import faults
from tasks.storage.blob.client import open_container
from tasks.storage.settings import StoreConfig

MOST_APPENDS = 49_000
MOVED = 412
"""The status of an append whose length is not the blob's own."""
TAIL = 1 << 20
"""Bytes that are read to find the last line: none is longer."""
BLOCK = 4 << 20
"""Most bytes of one append."""


class End(NamedTuple):
    """Where the lines end: the newest blob and its length; and the last line, empty where there is none."""

    blob: str
    length: int
    appends: int
    line: bytes


class Lines:
    """The lines below a folder of a store's container."""

    def __init__(self, config: StoreConfig, folder: str) -> None:
        self._container, self._folder = open_container(config), folder
        self.uri = f"{self._container.uri}/{folder}"

    def end(self) -> End | None:
        """Where the lines end now; None where none was ever written."""
        newest: End | None = None
        for name in reversed([item.name for item in self._container.listing(f"{self._folder}/")]):
            known = self._container.head(name)
            length = known.size if known else 0
            line = self._last_line(name, length) if length else b""
            newest = newest or End(name, length, (known.append_blob_committed_block_count or 0) if known else 0, line)
            if line:
                return newest._replace(line=line)
        return newest

    def append(self, end: End | None, data: bytes, *, begins: str) -> End:
        """Write whole lines behind an end. Raises Conflict when they end elsewhere by now: ask for the end again.

        `begins` names a blob, where a new one is needed.
        """
        assert data.endswith(b"\n") and len(data) <= BLOCK
        if end is None or end.appends >= MOST_APPENDS:
            name = f"{self._folder}/{begins}"
            with faults.told(self.uri, self._container.config.credential):
                try:
                    self._container.blob(name).create_append_blob(match_condition=MatchConditions.IfMissing)
                except ResourceExistsError:
                    raise self._overtaken() from None
            end = End(name, 0, 0, b"")
        blob = self._container.blob(end.blob)
        with faults.told(self.uri, self._container.config.credential):
            try:
                blob.append_block(data, length=len(data), appendpos_condition=end.length, validate_content=True)
            except HttpResponseError as error:
                if error.status_code != MOVED:
                    raise
                raise self._overtaken() from None
        return End(end.blob, end.length + len(data), end.appends + 1, data[:-1].rpartition(b"\n")[2])

    def _overtaken(self) -> Conflict:
        return Conflict(
            f"{self.uri}: somebody else appended at the same time", remedy="Read where it ends now, and append again."
        )

    def _last_line(self, name: str, length: int) -> bytes:
        start = max(0, length - TAIL)
        stream = self._container.ask(
            lambda: self._container.blob(name).download_blob(offset=start, length=length - start)
        )
        return bytes(self._container.ask(stream.readall)).rstrip(b"\n").rpartition(b"\n")[2]
