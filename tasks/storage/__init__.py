"""Where artifacts live: the port's protocol is store.py, and `open_store` is its one factory."""

from __future__ import annotations

from pathlib import Path

from tasks.storage.store import Store


def open_store(home: Path) -> Store:
    """The store of a home folder."""
    from tasks.storage.local import LocalStore

    return LocalStore(home / "store")
