"""Which machines a log is of, where it does not say: by the names of its file and folder. One name of a machine for several."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

_PARTS = re.compile(r"[_+,@=\s]+|-vs-|\.")
_MACHINE = re.compile(
    r"(?=.*\d)(?:(?:[a-z]*vm|[a-z]*node|host|gpu|compute|worker|hpc|ip|slurm|nd|aks|batch)[a-z]*-?[\w-]*\d|[a-z][a-z\d]*(?:-[a-z\d]+)*-\d+)",
    re.IGNORECASE,
)
"""Names that machines have in clusters: vm-07, mynode-042, ip-0A000004, hpc-1, aks-gpu-123-vmss000001."""
_NO_MACHINE = re.compile(
    r"(?:nd|nc|hb)\d+\w*|(?:job|run|test|try|round|slurm|part|pair|step)-?\d+|nodes?\d*|\d+[a-z]*", re.IGNORECASE
)


def machines_of(path: str, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Machines that a path names: those that are known from other logs, else what looks like one; none is no guess."""
    pure = PurePath(path)
    for text in (pure.name, pure.parent.name):
        found = [name for name in sorted(known, key=len, reverse=True) if _stands_in(name, text)]
        if found:
            return tuple(sorted(found, key=text.lower().index))
    for text in (pure.name, pure.parent.name):
        found = [part for part in _PARTS.split(text) if _MACHINE.fullmatch(part) and not _NO_MACHINE.fullmatch(part)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def _stands_in(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])|(?:^|_){re.escape(name)}(?=_|$)", text) is not None


def one_name(names: Iterable[str]) -> dict[str, str]:
    """Each name's own: vm-1.internal.cloudapp.net is vm-1 where both are there."""
    known = set(names)
    return {name: name.split(".")[0] if name.split(".")[0] in known else name for name in known}
