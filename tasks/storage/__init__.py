"""Where artifacts live: the port's protocol is store.py; `open_store` is a home's own store, `open_named` any other.

`open_files` is where jobs on machines without a shared folder find their files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.config.base import has_policy
from tasks.storage.store import Store

if TYPE_CHECKING:
    from tasks.storage.blob.folder import BlobFiles


def open_store(home: Path) -> Store:
    """The store that a home works in. Raises ValueError, Missing."""
    from tasks.storage.settings import load_stores

    return open_named(home, load_stores(home).use)


def open_named(home: Path, name: str) -> Store:
    """A store by its name in stores.yaml, or by the path of a folder (it has a slash in it). Raises ValueError, Missing."""
    from tasks.storage.settings import LOCAL, load_stores

    if name == LOCAL:
        return _folder(home / "store", home)
    if "/" in name and "://" not in name:
        return _folder(Path(name), home)
    known = load_stores(home).stores
    if name not in known:
        hint = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"{name!r} is no store: stores.yaml names {hint}; a folder is written with a slash, as ./{name}"
        )
    config = known[name]
    if config.uri.startswith(("/", "file://")):
        return _folder(Path(config.uri.removeprefix("file://")), home)
    if config.uri.startswith("az://"):
        from tasks.storage.blob.client import open_container
        from tasks.storage.blob.store import BlobStore

        return BlobStore(open_container(config), home)
    raise ValueError(f"{config.uri} is no store to work in: models are copied to a registry with `headway copy`")


def open_folder(root: Path) -> Store:
    """A store in a folder, for one that keeps documents of its own."""
    from tasks.storage.local import LocalStore

    return LocalStore(root)


def open_files(home: Path, name: str = "") -> BlobFiles:
    """The container of a store for jobs, and where their folders lie; without a name, the home's own store. Raises ValueError."""
    from tasks.storage.settings import load_stores

    stores = load_stores(home)
    wanted = name or stores.use
    config = stores.stores.get(wanted)
    if config is None or not config.uri.startswith("az://"):
        what = f"{config.uri}" if config else "a folder of this machine" if wanted == "local" else "not in stores.yaml"
        raise ValueError(
            f"store {wanted!r} is {what}: jobs on machines without a shared folder need one on Azure Blob. Name it in "
            "stores.yaml (docs/storage.md), and use it there or set cluster.mirror.store (of azureml: azureml.store) to its name"
        )
    from tasks.storage.blob.folder import BlobFiles

    jobs = stores.stores[stores.jobs] if stores.jobs else None
    return BlobFiles(config, home, open_store(home), jobs=jobs)


def _folder(root: Path, home: Path) -> Store:
    """A store in a folder. Where the home says who may do what, or whose signatures count, others may write to the folder."""
    from tasks.storage.local import LocalStore

    return LocalStore(root, home=home if has_policy(home) else None)
