"""Names of files that somebody else chose: in a manifest, in a listing of another machine, in a container. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tasks.common.errors import IntegrityError

_NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f\\]")


def is_plain(path: str) -> bool:
    """Whether a path stays inside the folder that it is joined to, and means one file on every file system."""
    return not _NOT_PLAIN.search(path) and not any(part in ("", ".", "..") for part in path.split("/"))


def require_inside(names: Iterable[str], *, where: str) -> None:
    """Raise IntegrityError when a name that was listed somewhere must not be joined to a folder of ours."""
    strange = [name for name in names if not is_plain(name)]
    if strange:
        raise IntegrityError(
            f"{where} holds {strange[0]!r}, which is no name of a file below it: no leading /, no .., no \\, no control sign",
            problems=[{"path": name, "problem": "name"} for name in strange],
            remedy="Nothing of it was brought. Find out who wrote it, and remove it there.",
        )
