"""Whether a container can be worked in: does it answer, may we write, does it keep versions. For `headway doctor`."""

from __future__ import annotations

from typing import NamedTuple

from tasks.common.errors import HeadwayError
from tasks.storage.blob import versions
from tasks.storage.blob.client import open_container
from tasks.storage.settings import StoreConfig


class Health(NamedTuple):
    """What is true of a container, and what to do about it."""

    ok: bool
    said: str
    remedy: str = ""


def examine(config: StoreConfig) -> Health:
    """Look at a store in Azure as who publishes into it does: a small blob is written, store.json. Raises nothing of Azure's."""
    try:
        container = open_container(config)
        mode = versions.detect(container)
        if mode == "versions" and versions.hierarchical(container):
            raise versions.without_versions(container)
    except (HeadwayError, ValueError) as error:
        return Health(False, str(error), getattr(error, "remedy", ""))
    kept = "keeps versions" if mode == "versions" else "is an emulator without versions, snapshots stand in for them"
    return Health(True, f"{container.uri} answers to {config.credential}, may be written, and {kept}")
