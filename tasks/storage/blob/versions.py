"""Names for what a file was: Blob version ids, or snapshots on an emulator, which has none and ignores a version id silently.

Which of both a container has is found by trying, never by asking for what it is called. How bytes get there is transfer.py's.

`headway doctor` asks here whether a container can be worked in: does it answer, may we write, does it keep versions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from azure.core import MatchConditions
from azure.core.exceptions import ResourceModifiedError, ResourceNotFoundError
from azure.storage.blob import BlobProperties

from tasks.common.errors import HeadwayError, Missing
from tasks.storage.blob import faults, layout
from tasks.storage.blob.client import Container, Written, in_parallel, open_container
from tasks.storage.manifest import Manifest
from tasks.storage.settings import StoreConfig

Mode = Literal["versions", "snapshots"]
CONTESTED_TRIES = 8
LISTED_FROM = 200
JOBS_PAGE = 'docs/azureml.md, "An account for jobs"'


def detect(container: Container) -> Mode:
    """Whether writes make versions; where they do not, an emulator's snapshots stand in. Raises Missing elsewhere."""
    existing = container.head(layout.PROBE)
    if existing and existing.version_id:
        return "versions"
    written = container.put(layout.PROBE, layout.PROBE_TEXT)
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
    from tasks.common.errors import HeadwayError

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


def stored_sizes(container: Container, manifest: Manifest) -> dict[str, int]:
    """Bytes of each stored version that a manifest names, by path; without those that are gone.

    Few are asked for one by one; many by a listing, which is one request for 5,000 of them.
    """
    folder, named = layout.files_folder(manifest), manifest.provenance.blob_versions
    if len(named) > LISTED_FROM:
        old = "snapshots" if next(iter(named.values())).startswith("snapshot:") else "versions"
        result: dict[str, int] = {}
        for blob in container.listing(folder, include=(old,)):
            path = blob.name.removeprefix(folder)
            if named.get(path) == id_of(blob):
                result[path] = int(blob.size)
        return result
    heads = in_parallel(lambda path: container.head(folder + path, named[path]), named)
    return {path: int(head.size) for path, head in zip(named, heads, strict=True) if head}


def id_of(blob: BlobProperties) -> str:
    """What a manifest calls a listed blob; empty for one that is neither a version nor a snapshot."""
    return f"snapshot:{blob.snapshot}" if blob.snapshot else blob.version_id or ""


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


class Health(NamedTuple):
    """What is true of a container, and what to do about it."""

    ok: bool
    said: str
    remedy: str = ""


def examine_for_jobs(config: StoreConfig) -> Health:
    """Look at the store of jobs' folders, which needs no versions, as `examine` does."""
    try:
        container = open_container(config)
        versions = bool((written := container.put(layout.PROBE, layout.PROBE_TEXT)) and written.version)
    except (HeadwayError, ValueError) as error:
        return Health(False, str(error), getattr(error, "remedy", ""))
    kept = "keeps versions, so every rotated checkpoint stays and is paid for" if versions else "keeps no versions"
    return Health(
        True,
        f"{container.uri} answers to {config.credential}, may be written, and {kept}; folders of jobs lie there",
        f"Name a store in an account without versioning as `jobs` of stores.yaml: {JOBS_PAGE}." if versions else "",
    )


def examine(config: StoreConfig) -> Health:
    """Look at a store in Azure as who publishes into it does: a small blob is written, store.json. Raises nothing of Azure's."""
    try:
        container = open_container(config)
        mode = detect(container)
        if mode == "versions" and hierarchical(container):
            raise without_versions(container)
    except (HeadwayError, ValueError) as error:
        return Health(False, str(error), getattr(error, "remedy", ""))
    kept = "keeps versions" if mode == "versions" else "is an emulator without versions, snapshots replace them"
    return Health(True, f"{container.uri} answers to {config.credential}, may be written, and {kept}")
