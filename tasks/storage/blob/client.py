"""The door to a container: small objects whole and checked, heads, listings, copies; all below one prefix.

Every call ends with its answer or with an error that a person can act on (faults.py). Large files are transfer.py's.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from azure.core import MatchConditions
from azure.core.credentials import AzureSasCredential
from azure.core.exceptions import (
    HttpResponseError,
    ResourceExistsError,
    ResourceModifiedError,
    ResourceNotFoundError,
)
from azure.core.pipeline.transport import RequestsTransport
from azure.storage.blob import BlobClient, BlobProperties, BlobServiceClient
from requests import Session
from requests.adapters import HTTPAdapter

from tasks.common.errors import IntegrityError
from tasks.storage.blob import faults
from tasks.storage.blob.credentials import access
from tasks.storage.blob.faults import CONNECT_SECONDS, READ_SECONDS, Retries
from tasks.storage.settings import StoreConfig

A = TypeVar("A")
R = TypeVar("R")
WORKERS = 16
"""Requests at once for what is small."""


def in_order(work: Callable[[A], R], items: Iterable[A], *, workers: int, ahead: int) -> Iterator[R]:
    """Results one by one; at most `ahead` and one more are under way or wait to be taken. The first error ends it."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def in_parallel(work: Callable[[A], R], items: Iterable[A]) -> list[R]:
    """The results of many small requests."""
    return list(in_order(work, items, workers=WORKERS, ahead=4 * WORKERS))


if TYPE_CHECKING:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential, TokenCredential

    Known = TokenCredential | AzureNamedKeyCredential | AzureSasCredential


T = TypeVar("T")
BLOCK = 8 << 20
"""Bytes of one block or range."""
LARGEST_WHOLE = 1 << 30
"""Bytes of a small object, which is written by one request: a manifest of a million files has about 200 MB."""
SEND_BYTES = 1 << 18
"""Bytes that are handed to the network at once; each must leave within READ_SECONDS, however slow the line is."""
RECEIVE_BYTES = 2 << 20
"""Bytes that are taken from the network at once: with fewer, more time goes into handing them on than into reading them."""
COPY_POLL_SECONDS = 0.2
CORRUPT_TRIES = 4
READ_TRIES = 3


class Written(NamedTuple):
    """What the service says of a blob that it took."""

    etag: str
    version: str | None
    """None where the account keeps no versions."""


class Small(NamedTuple):
    """A small blob."""

    data: bytes
    etag: str
    metadata: dict[str, str]


class Container:
    """The blobs below a prefix of a container."""

    def __init__(self, config: StoreConfig) -> None:
        _account, container, *rest = config.uri.removeprefix("az://").rstrip("/").split("/", 2)
        known = access(config)
        self.uri = config.uri.rstrip("/")
        self.config, self.emulator, self._credential = config, known.emulator, known.credential
        self.prefix = f"{rest[0]}/" if rest else ""
        session = Session()
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter(pool_maxsize=2 * WORKERS, max_retries=0))
        self.service = BlobServiceClient(
            known.url,
            known.credential,
            transport=RequestsTransport(
                session=session,
                session_owner=False,
                connection_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                connection_data_block_size=RECEIVE_BYTES,
            ),
            retry_policy=Retries(),
            max_single_get_size=BLOCK,
            max_single_put_size=LARGEST_WHOLE,
        )
        self._container = self.service.get_container_client(container)

    def blob(self, name: str, version: str = "") -> BlobClient:
        """A blob, or what it was: by version id, or by `snapshot:TIME`."""
        snapshot = version.removeprefix("snapshot:") if version.startswith("snapshot:") else None
        return self._container.get_blob_client(
            self.prefix + name, snapshot=snapshot, version_id=None if snapshot else version or None
        )

    def ask(self, work: Callable[[], T], name: str = "") -> T:
        """Do something with the SDK, with a blob where one is named; what goes wrong is raised in words."""
        with self.told(name):
            return work()

    def told(self, name: str = "") -> AbstractContextManager[None]:
        return faults.told(f"{self.uri}/{name}".rstrip("/"), self.config.credential)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        new: bool = False,
        etag: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Written | None:
        """Write a small blob whole; with `new` only where none is, with `etag` only over that one. None when it is not so.

        A request that is sent twice because its answer was lost finds its own writing there, and knows it by its mark.
        """
        mark = uuid.uuid4().hex
        output = {"sha256": hashlib.sha256(data).hexdigest(), "writer": mark, **(metadata or {})}
        conditions: dict[str, Any] = {"overwrite": not new}
        if etag:
            conditions |= {"etag": etag, "match_condition": MatchConditions.IfNotModified}

        def write() -> Written:
            headers = {"Content-MD5": base64.b64encode(md5(data)).decode()}
            done = self.blob(name).upload_blob(data, length=len(data), metadata=output, headers=headers, **conditions)
            return Written(str(done["etag"]), done.get("version_id"))

        with suppress(_Unmet):
            if done := self._found(name, lambda: until_whole(write)):
                return done
        existing = self.head(name)
        ours = existing is not None and (existing.metadata or {}).get("writer") == mark
        return Written(str(existing.etag), existing.version_id) if existing and ours else None

    def get(self, name: str) -> Small | None:
        """A small blob; None when there is none. Raises IntegrityError when it is not what was written."""
        for _ in range(READ_TRIES):
            stream = self._found(name, lambda: self.blob(name).download_blob(max_concurrency=1, decompress=False))
            if stream is None:
                return None
            if stream.size > LARGEST_WHOLE:
                raise IntegrityError(
                    f"{self.uri}/{name} is not what was written: it has {stream.size:,} bytes",
                    remedy="Find out who wrote it, and delete it.",
                )
            data = self.ask(stream.readall, name)
            written = (stream.properties.metadata or {}).get("sha256")
            if len(data) == stream.size and written in (None, hashlib.sha256(data).hexdigest()):
                return Small(data, str(stream.properties.etag), stream.properties.metadata or {})
        raise IntegrityError(
            f"{self.uri}/{name} is not what was written: its sha256 is another",
            remedy="Restore an older version of this blob in the portal, or delete it and do again what wrote it.",
        )

    def head(self, name: str, version: str = "") -> BlobProperties | None:
        """What is known of a blob or an old version of it; None when it is not there."""
        return self._found(name, self.blob(name, version).get_blob_properties)

    def listing(self, prefix: str, include: tuple[str, ...] = ()) -> Iterator[BlobProperties]:
        """Blobs below a prefix, in the order of their names; each name is without the store's own prefix."""
        with self.told(prefix):
            for item in self._container.list_blobs(name_starts_with=self.prefix + prefix, include=list(include)):
                item.name = item.name.removeprefix(self.prefix)
                yield item

    def listing_but(self, prefix: str, passed_over: str) -> Iterator[BlobProperties]:
        """The same without a folder right below the prefix, whatever it holds; the others are asked for one by one."""
        start = self.prefix + prefix
        with self.told(prefix):
            for item in self._container.walk_blobs(name_starts_with=start, delimiter="/"):
                if isinstance(item, BlobProperties):
                    item.name = item.name.removeprefix(self.prefix)
                    yield item
                elif item.name != start + passed_over:
                    yield from self.listing(item.name.removeprefix(self.prefix))

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders right below a prefix, which ends with `/`."""
        start = self.prefix + prefix
        with self.told(prefix):
            below = self._container.walk_blobs(name_starts_with=start, delimiter="/")
            return [item.name.removeprefix(start)[:-1] for item in below if item.name.endswith("/")]

    def touch(self, name: str, metadata: dict[str, str]) -> None:
        self.ask(lambda: self.blob(name).set_blob_metadata(metadata), name)

    def remove(self, name: str, version: str = "", *, etag: str | None = None) -> bool:
        """Remove a blob, or one old version of it; False when it is not there, or no longer the one of that etag."""
        conditions: dict[str, Any] = {"etag": etag, "match_condition": MatchConditions.IfNotModified} if etag else {}
        try:
            return self._found(name, lambda: self.blob(name, version).delete_blob(**conditions) or True) is not None
        except _Unmet:
            return False

    def copy(self, name: str, version: str) -> None:
        """Make an old version the current one again, by a copy inside the account. Raises Missing when it comes to no end."""
        url = self._source(name, version)
        self._copied(name, self.ask(lambda: self.blob(name).start_copy_from_url(url), name))

    def appear(self, draft: str, name: str) -> bool | None:
        """Have what was `put` under one name appear under another that nothing has; False when something has it by now.

        None when the draft is gone: the service itself reads it, so whoever removes it has fenced off whoever wrote it.
        """
        known = self.head(draft)
        url = self._source(draft, "")
        try:
            begun = self._found(
                name, lambda: self.blob(name).start_copy_from_url(url, match_condition=MatchConditions.IfMissing)
            )
        except _Unmet:
            existing = self.head(name)
            mark = (known.metadata or {}).get("writer") if known else None
            return existing is not None and mark is not None and (existing.metadata or {}).get("writer") == mark
        if begun is None:
            return None
        self._copied(name, begun)
        return True

    def _copied(self, name: str, begun: dict[str, Any]) -> None:
        """Wait for the end of a copy. Raises IntegrityError when it comes to none."""
        status = begun["copy_status"]
        while status == "pending":
            time.sleep(COPY_POLL_SECONDS)
            status = self.ask(self.blob(name).get_blob_properties, name).copy.status
        if status != "success":
            raise IntegrityError(f"{self.uri}/{name} was not copied: {status}", remedy="Run it again.")

    def _source(self, name: str, version: str) -> str:
        """The address of a blob or an old version, which the service reads in its own name: a signature goes with it.

        The SDK puts a snapshot into the address of its client, but no version id.
        """
        url = self.blob(name, version).url
        messages = [] if version.startswith("snapshot:") or not version else [f"versionid={quote(version, safe='')}"]
        if isinstance(self._credential, AzureSasCredential):
            messages.append(self._credential.signature.lstrip("?"))
        return "&".join([url + ("" if "?" in url or not messages else "?" + messages.pop(0)), *messages])

    def _found(self, name: str, work: Callable[[], T]) -> T | None:
        """What an operation gives; None for a blob that is not there. Raises _Unmet for a condition that does not hold."""
        with self.told(name):
            try:
                return work()
            except ResourceNotFoundError as error:
                if faults.code_of(error) == "ContainerNotFound":
                    raise
                return None
            except (ResourceModifiedError, ResourceExistsError) as error:
                if faults.code_of(error) in faults.ARCHIVED:
                    raise
                raise _Unmet(faults.code_of(error)) from error
            except HttpResponseError as error:
                if error.status_code == 400 and faults.code_of(error) in ("InvalidQueryParameterValue", ""):
                    return None  # a version id, or the time of a snapshot, that is none
                raise


class _Unmet(Exception):
    """A condition of a request does not hold."""


def open_container(config: StoreConfig) -> Container:
    """The container of a store; one a process, because connections and tokens are worth keeping."""
    secret = config.secret_value() if config.secret else ""
    return _open(config, hashlib.sha256(secret.encode()).hexdigest(), os.getpid())


@lru_cache(maxsize=8)
def _open(config: StoreConfig, secret: str, process: int) -> Container:
    """A child process makes its own: two that write into one connection hear each other's answers."""
    return Container(config)


class _Adapter(HTTPAdapter):
    """Connections enough for all workers."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs, blocksize=SEND_BYTES)


def md5(data: bytes) -> bytes:
    """For the service, which checks what arrives by it; nothing is trusted because of it."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def until_whole(send: Callable[[], T]) -> T:
    """Send again what the service says did not arrive as it left."""
    for _ in range(CORRUPT_TRIES - 1):
        try:
            return send()
        except HttpResponseError as error:
            if not faults.corrupted(error):
                raise
    return send()
