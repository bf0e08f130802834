"""Claims as leases on small blobs below `claims/`: short ones, renewed by a thread while the process that holds them runs.

Two things fence a holder, and no clock of a host is one of them. The service refuses to renew a lease by the id of another. And
each holder writes a note into the blob, so that its ETag tells whether anybody held it in between: a lease that merely ran out,
because the store was away for everybody, is taken again by whoever had it, and the work goes on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from azure.core import MatchConditions
from azure.core.exceptions import AzureError, HttpResponseError
from azure.storage.blob import BlobLeaseClient

from tasks.common.errors import Superseded
from tasks.common.process import boot_id
from tasks.storage.blob.client import Container
from tasks.storage.blob.lease import FRESH_SECONDS

FOLDER = "claims/"
LEASE_SECONDS = 15
"""The shortest that Azure gives."""
RENEW_SECONDS = 4.0
AGAIN_SECONDS = 1.0
"""Until the next try, where the service gave no answer."""
ONE_TRY: dict[str, Any] = {"retry_total": 0, "connection_timeout": 3, "read_timeout": 3}
"""The thread tries again by itself."""
NOBODY = b"{}"
REFUSED = (404, 409, 412)
"""The service answers, and the lease is not ours."""


class BlobClaims:
    """Claims in a container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def take(self, name: str) -> BlobClaim | None:
        """The claim to a name; None while another holds it. Raises Missing."""
        path = FOLDER + name
        if self._container.head(path) is None:
            self._container.put(path, NOBODY, new=True)
        lease = BlobLeaseClient(self._container.blob(path))
        if not self._container.ask(lambda: _acquired(lease), path):
            return None
        claim = BlobClaim(self._container, path, lease)
        try:
            claim.begin()
        except BaseException:
            with suppress(AzureError):
                lease.release()
            raise
        return claim

    def held(self, name: str) -> bool:
        """Whether somebody holds it now. Raises Missing."""
        existing = self._container.head(FOLDER + name)
        return existing is not None and existing.lease.status == "locked"


class BlobClaim:
    """One lease. State: the ETag of our note, when the service last said that the lease is ours, and whether it no longer is."""

    def __init__(self, container: Container, path: str, lease: BlobLeaseClient) -> None:
        self._container, self._path, self._lease = container, path, lease
        self._blob, self._etag = container.blob(path), ""
        self._asked = time.monotonic()
        self._ended, self._one = threading.Event(), threading.Lock()
        self.lost = False
        self.before: dict[str, Any] = {}

    def begin(self) -> None:
        """Write our note over that of the holder before, and keep the lease from now on."""
        small = self._container.get(self._path)
        with suppress(ValueError):
            self.before = dict(json.loads(small.data)) if small else {}
        me = {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "time": time.time()}
        self._container.ask(lambda: self._write(json.dumps(me).encode()), self._path)
        threading.Thread(target=self._keep, daemon=True, name=f"claim {self._path}").start()

    def require(self) -> None:
        """Return when it is still ours. Raises Superseded; Missing while the service does not answer."""
        if not self.lost and time.monotonic() - self._asked < FRESH_SECONDS:
            return
        if not self.lost:
            self._container.ask(self._renew, self._path)
        if self.lost:
            raise Superseded(
                f"{self._container.uri}/{self._path} is another's now: this process was stopped or cut off for too long",
                remedy="Nothing was written after that. Whoever took it over continues the work.",
            )

    def give_back(self) -> None:
        """Let the next one have it at once, who need not wonder what became of us."""
        self._ended.set()
        with self._one, suppress(AzureError):  # a lease that stays runs out by itself
            if not self.lost:
                self._write(NOBODY, **ONE_TRY)
                self._lease.release(**ONE_TRY)

    def _write(self, note: bytes, **how: Any) -> None:
        """Write a note while the lease is ours. Raises AzureError."""
        done = self._blob.upload_blob(note, overwrite=True, lease=self._lease, **how)
        self._etag = str(done["etag"])

    def _keep(self) -> None:
        pause = RENEW_SECONDS
        while not self._ended.wait(pause) and not self.lost:
            try:
                self._renew(**ONE_TRY)
                pause = RENEW_SECONDS
            except AzureError:
                pause = AGAIN_SECONDS

    def _renew(self, **how: Any) -> None:
        """Ask the service; sets `lost` when it says so. Raises AzureError while it gives no answer."""
        with self._one:
            asked = time.monotonic()
            if self._ended.is_set() or self.lost:
                return
            try:
                self._lease.renew(**how)
            except HttpResponseError as error:
                if error.status_code not in REFUSED:
                    raise
                self.lost = not self._taken_again(**how)
            self._asked = asked

    def _taken_again(self, **how: Any) -> bool:
        """Take a lease that ran out, unless anybody held it since. Raises AzureError while the service gives no answer."""
        try:
            self._lease.acquire(LEASE_SECONDS, etag=self._etag, match_condition=MatchConditions.IfNotModified, **how)
        except HttpResponseError as error:
            if error.status_code not in REFUSED:
                raise
            return False
        return True


def _acquired(lease: BlobLeaseClient) -> bool:
    try:
        lease.acquire(LEASE_SECONDS)
    except HttpResponseError as error:
        if error.status_code != 409:
            raise
        return False
    return True
