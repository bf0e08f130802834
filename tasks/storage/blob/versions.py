"""Names for what a file was: Blob version ids, or snapshots on an emulator, which has none and ignores a version id silently.

Which of both a container has is found by trying, never by asking for what it is called. How bytes get there is transfer.py's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal

from azure.core import MatchConditions
from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError

from tasks.errors import Missing
from tasks.storage.blob import faults
from tasks.storage.blob.client import Container, Written
from tasks.storage.blob.layout import PROBE

Mode = Literal["versions", "snapshots"]
CONTESTED_TRIES = 8
_SAYS = b'{"schema": "headway/store/1"}\n'


def detect(container: Container) -> Mode:
    """Whether writes make versions; where they do not, an emulator's snapshots stand in. Raises Missing elsewhere."""
    there = container.head(PROBE)
    if there and there.version_id:
        return "versions"
    written = container.put(PROBE, _SAYS)
    if written and written.version:
        return "versions"
    if container.emulator:
        return "snapshots"
    raise without_versions(container)


def without_versions(container: Container) -> Missing:
    """Why nothing is published into an account that keeps no versions."""
    return Missing(
        f"{container.uri}: writing there makes no version, so what is overwritten would be lost"
        + (": the account has a hierarchical namespace, which excludes versions" if hierarchical(container) else ""),
        remedy="Turn versioning on (az storage account blob-service-properties update --enable-versioning true), or use an "
        "account without hierarchical namespace, NFS and SFTP.",
    )


def hierarchical(container: Container) -> bool | None:
    """Whether the account has a hierarchical namespace; None when this identity may not ask."""
    from tasks.errors import HeadwayError

    try:
        return bool(container.ask(container.service.get_account_information).get("is_hns_enabled"))
    except HeadwayError:
        return None


def seal(container: Container, mode: Mode, name: str, upload: Callable[[], Written]) -> str:
    """Upload, and the name that these very bytes keep. Whoever writes in between makes us upload again."""
    for tries in range(CONTESTED_TRIES):
        written = upload()
        if mode == "versions":
            if not written.version:
                raise without_versions(container)
            return written.version
        if taken := snapshot(container, name, written.etag):
            return taken
        time.sleep(random.uniform(0.0, 0.05 * 2**tries))
    raise Missing(
        f"{container.uri}/{name} is overwritten by others all the time", remedy="Publish again when they end."
    )


def snapshot(container: Container, name: str, etag: str) -> str | None:
    """A snapshot of a blob as long as it is the one of that etag."""

    def take() -> str | None:
        try:
            taken = container.blob(name).create_snapshot(etag=etag, match_condition=MatchConditions.IfNotModified)
        except (ResourceModifiedError, ResourceNotFoundError) as error:
            if faults.code_of(error) == "ContainerNotFound":
                raise
            return None
        return f"snapshot:{taken['snapshot']}"

    return container.ask(take, name)
