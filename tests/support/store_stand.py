"""The stores that a test is run on: a folder, versioned blobs, Azurite's snapshots, blobs behind a proxy, a live account.

Each is opened as a user opens it, by stores.yaml, and each test has a container of its own. How a byte rots where it lies is
known here too, because no client of a store can do that.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from azurite import ACCOUNT, Azurite, Endpoint
from blob_relay import Relay
from fault_proxy import FaultProxy
from versioned_blobs import VersionedBlobs

from tasks.storage import open_named
from tasks.storage.manifest import FileEntry, Manifest, Provenance
from tasks.storage.store import Store

LIVE = os.environ.get("HEADWAY_AZURE_TEST_ACCOUNT", "")
"""az://ACCOUNT/CONTAINER of an account with versioning; its credential's kind in HEADWAY_AZURE_TEST_CREDENTIAL."""
KINDS = ("local", "versions", "snapshots", "faulty", "live")
"""What the contract is held against; `faulty` are versions behind a proxy that hits every so many requests."""
EVERY = 13
SECRET = "HEADWAY_TEST_CONNECTION"


@dataclass(frozen=True)
class Stand:
    """A store under test, and what stands behind it."""

    kind: str
    home: Path
    relay: Relay | None = None
    """Before the blobs: it has a log of every request."""
    azurite: Azurite | None = None
    container: str = ""
    endpoint: Endpoint | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_blob(self) -> bool:
        return self.kind != "local"

    def open(self) -> Store:
        """The store as a new process sees it."""
        return open_named(self.home, "cloud" if self.is_blob else "local")

    def blobs(self):
        """The SDK's client of the container, past every proxy."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(self.endpoint.connection_string).get_container_client(
            self.container
        )

    def break_leases(self) -> None:
        """What half a minute does to the lease of a process that was killed, or at once an administrator."""
        from azure.storage.blob import BlobLeaseClient

        for blob in self.blobs().list_blobs():
            if blob.lease.status == "locked":
                BlobLeaseClient(self.blobs().get_blob_client(blob.name)).break_lease(lease_break_period=0)

    def rot(self, data: bytes, *, at: int) -> None:
        """Turn one bit of a file's bytes where the service keeps them. The bytes must be found there, and only once."""
        holders = [path for path in self._disk() if data in path.read_bytes()]
        assert len(holders) == 1, f"{len(holders)} files hold these {len(data)} bytes"
        mode = holders[0].stat().st_mode
        holders[0].chmod(0o644)
        with open(holders[0], "r+b") as file:
            whole = file.read()
            assert whole.count(data) == 1
            place = whole.index(data) + at
            file.seek(place)
            file.write(bytes([whole[place] ^ 1]))
        holders[0].chmod(mode)

    def _disk(self) -> list[Path]:
        folder = self.azurite.folder / "__blobstorage__" if self.azurite else self.home / "store" / "artifacts"
        return [path for path in folder.rglob("*") if path.is_file()]

    def written(self, do: Callable[[], object]) -> list[str]:
        """Targets of the requests by which something moves bytes of a blob to the service."""
        seen = len(self.relay.log)
        do()
        sent = [r for r in self.relay.log[seen:] if r.method == "PUT" and int(r.header("content-length") or 0) > 0]
        return [request.target for request in sent]


@contextmanager
def standing(kind: str, home: Path, azurite: Callable[[], Azurite]) -> Iterator[Stand]:
    """A store of a kind, for as long as the block lasts."""
    home.mkdir(parents=True, exist_ok=True)
    if kind == "local":
        yield Stand("local", home)
        return
    with ExitStack() as stack:
        if kind == "live":
            yield _live(home)
            return
        emulator = azurite()
        both = [VersionedBlobs, FaultProxy]
        relays = {"versions": [VersionedBlobs], "snapshots": [Relay], "proxy": both, "faulty": both}[kind]
        behind: Endpoint = emulator
        for make in relays:
            relay = stack.enter_context(make(behind).running())
            behind = relay.endpoint
        if kind == "faulty":
            relay.every = EVERY
        container = f"c{uuid.uuid4().hex[:20]}"
        stand = Stand(kind, home, relay, emulator, container, behind, {SECRET: behind.connection_string})
        stand.blobs().create_container()
        write_stores(
            home, f"az://{ACCOUNT}/{container}/some/prefix", credential="connection_string", secret=f"env:{SECRET}"
        )
        kept = os.environ.get(SECRET)
        os.environ.update(stand.environment)
        try:
            yield stand
        finally:
            os.environ.pop(SECRET) if kept is None else os.environ.update({SECRET: kept})


def _live(home: Path) -> Stand:
    """A prefix of its own in the account that the environment names."""
    credential = os.environ.get("HEADWAY_AZURE_TEST_CREDENTIAL", "cli")
    write_stores(home, f"{LIVE.rstrip('/')}/headway-test-{time.time_ns()}", credential=credential)
    return Stand("live", home)


def write_stores(home: Path, uri: str, **config: str) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "stores.yaml").write_text(yaml.safe_dump({"use": "cloud", "stores": {"cloud": {"uri": uri, **config}}}))


def put(
    store: Store, folder: Path, *, name: str = "corpus", kind: str = "dataset", inputs: tuple[str, ...] = (), **said
) -> Manifest:
    return store.publish(folder, kind=kind, inputs=inputs, provenance=Provenance(name=name, **said))


def fill(folder: Path, **files: bytes) -> Path:
    """A folder with files; `__` in a name is a slash, and what is left out of three stands as it is."""
    for name, data in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry(manifest: Manifest, path: str) -> FileEntry:
    return next(file for file in manifest.content.files if file.path == path)
