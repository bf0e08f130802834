"""Where what lies below a store's prefix, and which names may be part of it. Pure.

`artifacts/KIND/NAME/files/PATH`, `artifacts/KIND/NAME/versions/VERSION/manifest.json`, `documents/KEY`; and for a moment
`artifacts/KIND/NAME/drafts/ID`, a manifest that is about to appear.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tasks.storage.manifest import Manifest

MANIFEST = "manifest.json"
PROBE_TEXT = b'{"schema": "headway/store/1"}\n'
PROBE = "store.json"
LONGEST = 1024
"""Characters in a blob's name. https://learn.microsoft.com/rest/api/storageservices/naming-and-referencing-containers--blobs--and-metadata"""
_PLAIN = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9_-])?")
_VERSION = re.compile(r"[0-9a-f]{64}")


def name_folder(kind: str, name: str) -> str:
    """Everything of one name. Raises ValueError for what is no name: it must not lead anywhere else."""
    for part in (kind, name):
        if not _PLAIN.fullmatch(part):
            raise ValueError(
                f"{part!r} is no name in a store: at most 63 lower case letters, digits, dots, dashes and underscores, "
                "beginning with a letter or digit and not ending with a dot"
            )
    return f"artifacts/{kind}/{name}/"


def version_folder(kind: str, name: str, version: str) -> str:
    """What lies beside a version's manifest, and the manifest. Raises ValueError for what is no version."""
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version: 64 hex digits")
    return f"{name_folder(kind, name)}versions/{version}/"


def folder_of(manifest: Manifest) -> str:
    return version_folder(manifest.content.kind, manifest.provenance.name, manifest.version)


def drafts_folder(place: str) -> str:
    """Of a name's folder: where manifests lie that a deletion may still hold up."""
    return f"{place}drafts/"


def files_folder(manifest: Manifest) -> str:
    return f"{name_folder(manifest.content.kind, manifest.provenance.name)}files/"


def document_key(key: str) -> str:
    """Raises ValueError for a key that leads out of the documents."""
    if key.startswith("/") or any(part in ("..", ".") for part in key.split("/")) or "\\" in key or "\0" in key:
        raise ValueError(f"{key!r} is not a document's key: no leading / and no ..")
    return f"documents/{key}"


def attachment_name(name: str) -> str:
    """Raises ValueError for what would be something else than a file beside the manifest."""
    if not name or "/" in name or "\\" in name or name in (".", "..", MANIFEST):
        raise ValueError(f"{name!r} is no name of a file beside a manifest")
    return name


def require_blob_names(folder: str, paths: Iterable[str]) -> None:
    """Raise ValueError for paths that Azure changes or does not take: ends of `.`, or more than 1024 characters."""
    for path in paths:
        if any(part.endswith(".") for part in path.split("/")):
            raise ValueError(f"{path!r} cannot be stored in Azure, which drops a dot at the end of a name: rename it")
        if len(folder) + len(path) > LONGEST:
            raise ValueError(f"{path!r} is too long for Azure, which takes {LONGEST} characters with the prefix")
