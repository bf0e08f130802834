"""Where jobs on machines without a shared folder find their files: a store's container, as a value that is handed to who submits.

A job's folder lies below `jobs/`, what jobs start from below `code/`, both beside the store's artifacts (layout.py). How a folder
is kept in step is folder.py's; what is in it is docs/compute.md's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.artifacts import parse_ref
from tasks.storage.blob import layout
from tasks.storage.blob.client import Container, open_container
from tasks.storage.blob.credentials import token_credential
from tasks.storage.blob.folder import BlobFolder
from tasks.storage.blob.store import BlobStore
from tasks.storage.blob.transfer import upload
from tasks.storage.settings import Identity, StoreConfig
from tasks.storage.store import Store, find

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential


class BlobFiles:
    """A store's container for jobs. Nothing is asked of Azure before a method needs it."""

    def __init__(self, config: StoreConfig, home: Path, own: Store) -> None:
        """`own` is the store that the home works in, which may be another one."""
        self.config, self._home, self._own = config, home, own
        self.uri = config.uri.rstrip("/")
        self.credential, self.secret = str(config.credential), config.secret

    def folder(self, prefix: str, local: Path) -> BlobFolder:
        """A job's folder, of which this side only reads what the job changes."""
        return BlobFolder(self._container, prefix, local, theirs=True)

    def address(self, name: str) -> str:
        """The https address of what lies under a name, as other services of Azure take it."""
        account, _, rest = self.uri.removeprefix("az://").partition("/")
        return f"https://{account}.blob.core.windows.net/{rest}/{name}"

    def place(self, ref: str) -> str:
        """The folder of an artifact's version, where its manifest lies. Raises ValueError for a reference that is none."""
        kind, name, version = parse_ref(ref)
        return layout.version_folder(kind, name, version)

    def have(self, ref: str) -> None:
        """See to it that an artifact is in this store; one of another store is copied. Raises Missing, IntegrityError."""
        kind, name, version = parse_ref(ref)
        store = BlobStore(self._container, self._home)
        if store.manifest(kind, name, version):
            return
        manifest = find(self._own, kind, name, version)
        provenance = manifest.provenance.model_copy(update={"blob_versions": {}})
        files = self._own.fetch(manifest)
        store.publish(files, kind=kind, inputs=manifest.content.inputs, provenance=provenance)

    def put_once(self, name: str, write: Callable[[Path], None]) -> None:
        """Have a file lie under a name that tells its content; it is made only where it is not there."""
        if self._container.head(name):
            return
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "made"
            write(made)
            upload(self._container, name, made)

    def token(self) -> TokenCredential:
        """What other services of Azure know us by: as the store does; with a connection string, who is logged in.

        Raises Missing.
        """
        kind = self.config if self.config.credential != "connection_string" else Identity()
        return token_credential(kind, of=self.uri)

    @property
    def _container(self) -> Container:
        return open_container(self.config)
