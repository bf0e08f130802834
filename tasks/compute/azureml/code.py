"""Headway's own code for machines that have none: the package `tasks` as a zip file, named by its content.

It goes along where the job's environment is a curated one; an image of one's own has Headway installed.
"""

from __future__ import annotations

import hashlib
import zipfile
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
KINDS = (".py", ".json", ".css", ".html")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of every entry, so that equal code is an equal file; zip knows no earlier time."""


@cache
def code_name() -> str:
    """The name under which this code lies in the store."""
    sha256 = hashlib.sha256()
    for path in _files():
        sha256.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return f"code/headway-{sha256.hexdigest()[:16]}.zip"


def write_code(target: Path) -> None:
    """Write the zip file."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files():
            entry = zipfile.ZipInfo(path.relative_to(PACKAGE.parent).as_posix(), EPOCH)
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


def _files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in KINDS)
