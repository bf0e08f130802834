"""What tests of events stand on: Azurite's blobs as a container of the configuration, and what Event Grid writes of them."""

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import azurite
from azure.storage.blob import ContainerClient
from waiting import limit

from deployments.configuration.events import ContainerConfig, EventsConfig
from tasks.events.ledger import Ledger

SECRET = "HEADWAY_TEST_EVENTS"
KEY = f"DefaultEndpointsProtocol=http;AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY}"
TOPIC = "/subscriptions/0/resourceGroups/rg/providers/Microsoft.Storage/storageAccounts/mine"
IDENTITY = {"credential": "connection_string", "secret": f"env:{SECRET}"}


@contextmanager
def known_key() -> Iterator[None]:
    """Azurite's key, where configurations name it."""
    before = os.environ.get(SECRET)
    os.environ[SECRET] = KEY
    try:
        yield
    finally:
        os.environ.pop(SECRET) if before is None else os.environ.update({SECRET: before})


@dataclass(frozen=True)
class Blobs:
    """A container of its own in Azurite."""

    service: azurite.Endpoint
    name: str

    @property
    def url(self) -> str:
        return f"{self.service.url}/{self.name}"

    @property
    def client(self) -> ContainerClient:
        return ContainerClient.from_connection_string(self.service.connection_string, self.name)

    def config(self, **said) -> ContainerConfig:
        return ContainerConfig(**{"url": self.url, "dataset": "corpus", **IDENTITY, **said})

    def put(self, name: str, data: bytes = b"some text\n") -> str:
        """Write a blob; its ETag."""
        return self.client.upload_blob(name, data, overwrite=True).get_blob_properties().etag.strip('"')

    def created(self, name: str, **said) -> dict:
        """What Event Grid writes of a blob that was written."""
        return created(f"{self.url}/{quote(name)}", **said)


def blobs(service: azurite.Endpoint) -> Blobs:
    made = Blobs(service, f"c{uuid.uuid4().hex[:20]}")
    made.client.create_container()
    return made


def created(url: str, *, id_: str = "", etag: str = "0x8D4BCC2E4835CD0") -> dict:
    """A BlobCreated event of Event Grid's schema."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S.1234567Z", time.gmtime())
    return {
        "topic": TOPIC,
        "subject": "/blobServices/default/containers/x/blobs/y",
        "eventType": "Microsoft.Storage.BlobCreated",
        "eventTime": now,
        "id": id_ or str(uuid.uuid4()),
        "data": {"api": "PutBlob", "url": url, "eTag": etag, "contentLength": 1, "blobType": "BlockBlob"},
        "dataVersion": "",
        "metadataVersion": "1",
    }


def body(*events: dict) -> bytes:
    return json.dumps(list(events)).encode()


def config(**said) -> EventsConfig:
    return EventsConfig(**{"settle_seconds": 0.3, **said})


def rows(ledger: Ledger, **wanted) -> list[dict]:
    """Rows of the ledger, oldest first."""
    where = " AND ".join(f'"{name}" = ?' for name in wanted) or "1"
    with ledger.snapshot() as db:
        found = db.execute(f"SELECT * FROM events WHERE {where} ORDER BY number", tuple(wanted.values())).fetchall()
    return [dict(row) for row in found]


def until(done, *, timeout: float = 60.0, every: float = 0.05):
    """What `done` gives as soon as it gives something."""
    deadline = time.monotonic() + limit(timeout)
    while time.monotonic() < deadline:
        if found := done():
            return found
        time.sleep(every)
    raise AssertionError(f"it did not happen within {timeout:g} s")


def lines(count: int) -> bytes:
    return b"".join(
        json.dumps({"text": f"document {number} of a small corpus"}).encode() + b"\n" for number in range(count)
    )


def ticking(*parts, until_done, timeout: float = 60.0):
    """Tick parts, as the bridge does, until something is so."""

    def turn():
        for part in parts:
            part.tick(time.time())
        return until_done()

    return until(turn, timeout=timeout)
