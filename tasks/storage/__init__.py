"""Where artifacts live: the port's protocol is store.py; `open_store` is a home's own store, `open_named` any other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.storage.store import Store

if TYPE_CHECKING:
    from tasks.storage.settings import StoreConfig


def open_store(home: Path) -> Store:
    """The store that a home works in. Raises ValueError, Missing."""
    from tasks.storage.settings import load_stores

    return open_named(home, load_stores(home).use)


def open_named(home: Path, name: str) -> Store:
    """A store by its name in stores.yaml, or by the path of a folder (it has a slash in it). Raises ValueError, Missing."""
    from tasks.storage.local import LocalStore
    from tasks.storage.settings import LOCAL, load_stores

    if name == LOCAL:
        return LocalStore(home / "store")
    if "/" in name and "://" not in name:
        return LocalStore(Path(name))
    known = load_stores(home).stores
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"{name!r} is no store: stores.yaml names {there}; a folder is written with a slash, as ./{name}"
        )
    return _open_configured(home, known[name])


def _open_configured(home: Path, config: StoreConfig) -> Store:
    from tasks.storage.local import LocalStore

    if config.uri.startswith(("/", "file://")):
        return LocalStore(Path(config.uri.removeprefix("file://")))
    if config.uri.startswith("az://"):
        from tasks.storage.blob.client import open_container
        from tasks.storage.blob.store import BlobStore

        return BlobStore(open_container(config), home)
    raise ValueError(f"{config.uri} is no store to work in: models are copied to a registry with `headway copy`")
