"""A lease on a name: who deletes versions holds it, and who publishes one that stands on files of older ones.

Without it a deletion could take a file away between the look at it and the manifest that names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from azure.core.exceptions import AzureError, ResourceExistsError
from azure.storage.blob import BlobLeaseClient

from tasks.errors import Missing
from tasks.storage.blob.client import Container

LEASE_SECONDS = 30
RENEW_SECONDS = 8.0
FRESH_SECONDS = 0.5
"""For so long after the service said that the lease is ours it is not asked again."""
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 0.5


class Lost(Missing):
    """The lease ran out, or somebody broke it, before the work was done."""


@contextmanager
def held(container: Container, name: str) -> Iterator[Callable[[], None]]:
    """Hold a name's lease; what is yielded raises Lost once it is not ours any more, and is called before each last step."""
    lease = _acquire(container, name)
    ended, alive = threading.Event(), [time.monotonic()]

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                lease.renew()
            except AzureError:
                return
            alive[0] = time.monotonic()

    def require() -> None:
        if time.monotonic() - alive[0] < FRESH_SECONDS:
            return
        try:
            lease.renew()  # who was stopped for long, or whose lease was broken, learns it here and not from its own clock
            alive[0] = time.monotonic()
        except AzureError as error:
            raise Lost(
                f"{container.uri}/{name}: the lease on it was lost before the work was done",
                remedy="Nothing was published or removed after that: run the same command again.",
            ) from error

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield require
    finally:
        ended.set()
        thread.join()
        with suppress(AzureError):  # it runs out by itself
            lease.release()


def _acquire(container: Container, name: str) -> BlobLeaseClient:
    """Wait for a lease that another holds. Raises Missing when it is held for too long."""
    container.put(name, b"", new=True)
    lease, until = BlobLeaseClient(container.blob(name)), time.monotonic() + PATIENCE_SECONDS
    while not _taken(container, lease):
        if time.monotonic() > until:
            raise Missing(
                f"{container.uri}/{name} is leased by another for more than {PATIENCE_SECONDS:.0f} s",
                remedy="Wait until it ends, or break the lease: az storage blob lease break.",
            )
        time.sleep(POLL_SECONDS)
    return lease


def _taken(container: Container, lease: BlobLeaseClient) -> bool:
    def take() -> bool:
        try:
            lease.acquire(lease_duration=LEASE_SECONDS)
        except ResourceExistsError:
            return False
        return True

    return container.ask(take)
