"""A lease on a name: who deletes versions holds it, and who publishes one that stands on files of older ones.

Without it a deletion could take a file away between the look at it and the manifest that names it. A lease runs from when it was
asked for: when the answer came, some of it was gone. Whoever is stopped after its last question is fenced by what it writes
(store.py): no client's clock can do that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from azure.core.exceptions import AzureError, ResourceExistsError
from azure.storage.blob import BlobLeaseClient

from tasks.common.errors import Missing
from tasks.storage.blob.client import Container

LEASE_SECONDS = 30
RENEW_SECONDS = 8.0
FRESH_SECONDS = 0.5
"""For so long after the service was last asked, and said that the lease is ours, it is not asked again."""
PATIENCE_SECONDS = 180.0
POLL_SECONDS = 0.5


class Lost(Missing):
    """The lease ran out, or somebody broke it, before the work was done."""


@contextmanager
def held(container: Container, name: str) -> Iterator[Callable[[], None]]:
    """Hold a name's lease; what is yielded raises Lost once it is not ours any more, and is called before each last step."""
    lease, asked = _acquire(container, name)
    ended, alive = threading.Event(), [asked]

    def renew() -> None:
        asked = time.monotonic()
        lease.renew()
        alive[0] = asked

    def keep() -> None:
        while not ended.wait(RENEW_SECONDS):
            try:
                renew()
            except AzureError:
                return

    def require() -> None:
        if time.monotonic() - alive[0] < FRESH_SECONDS:
            return
        try:
            renew()  # who was stopped for long, or whose lease was broken, learns it here and not from its own clock
        except AzureError as error:
            raise lost(container, name) from error

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield require
    finally:
        ended.set()
        thread.join()
        with suppress(AzureError):  # it runs out by itself
            lease.release()


def lost(container: Container, name: str) -> Lost:
    """What is said when a lease turns out to be another's."""
    return Lost(
        f"{container.uri}/{name}: the lease on it was lost before the work was done",
        remedy="Nothing was published or removed after that: run the same command again.",
    )


def _acquire(container: Container, name: str) -> tuple[BlobLeaseClient, float]:
    """Wait for a lease that another holds; returns when it was asked for, too. Raises Missing when it is held for too long."""
    container.put(name, b"", new=True)
    lease, until = BlobLeaseClient(container.blob(name)), time.monotonic() + PATIENCE_SECONDS
    while (asked := time.monotonic()) < until:
        if _taken(container, lease):
            return lease, asked
        time.sleep(POLL_SECONDS)
    raise Missing(
        f"{container.uri}/{name} is leased by another for more than {PATIENCE_SECONDS:.0f} s",
        remedy="Wait until it ends, or break the lease: az storage blob lease break.",
    )


def _taken(container: Container, lease: BlobLeaseClient) -> bool:
    def take() -> bool:
        try:
            lease.acquire(lease_duration=LEASE_SECONDS)
        except ResourceExistsError:
            return False
        return True

    return container.ask(take)
