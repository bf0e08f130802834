"""The seal of a JSON document or line: its last key is the sha256 of what it closes, so a changed bit shows when it is read.

A seal finds what rots and what is edited by hand, not a forger, who can make a new one: that is what signatures and the chain
of the audit log are for. Documents of releases before there were seals have none, and are read as they are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from tasks.common.errors import IntegrityError

_BEFORE, _AFTER, _DIGITS = b', "seal": "', b'"}', 64
_LENGTH = len(_BEFORE) + _DIGITS + len(_AFTER)
_NEARLY = 2
"""A tail that differs from a seal's in no more bytes than that is a damaged seal, and no document without one."""


_SEAL = re.compile(rb', "seal": "[0-9a-f]{64}"}')
CHAINED = "audit/"
"""Documents under this key have no seal: each names the hash of the one before it, as sha256sum tells it of the file."""


def sealed(data: bytes, *, key: str = "") -> bytes:
    """The JSON object with its seal, as it is written. What is no object, or an empty one, stays as it is."""
    if key.startswith(CHAINED) or not data.endswith(b"}") or data == b"{}":
        return data
    return data[:-1] + _BEFORE + hashlib.sha256(data).hexdigest().encode() + _AFTER


def has_seal(data: bytes) -> bool:
    """Whether a JSON object ends with a seal; that it fits what it closes, `opened` says."""
    return _SEAL.fullmatch(data[-_LENGTH:]) is not None


def opened(data: bytes, *, where: str) -> bytes:
    """The JSON object without its seal, as it was before `sealed`. Raises IntegrityError, which names `where`."""
    tail = data[-_LENGTH:]
    frame = tail[: len(_BEFORE)] + tail[-len(_AFTER) :]
    wrong = sum(one != other for one, other in zip(frame, _BEFORE + _AFTER, strict=False))
    if len(tail) < _LENGTH or wrong > _NEARLY:
        return data
    inside = data[:-_LENGTH] + b"}"
    if data != sealed(inside):
        raise _damaged(where)
    return inside


def opened_lines(data: bytes, *, where: str) -> Iterator[bytes]:
    """The JSON objects of a file of sealed lines, each without its seal; a line that a kill cut is among them as it is.

    Raises IntegrityError for a changed bit: a cut line has no whole seal, so one that has it, and more behind it, was changed.
    """
    for number, line in enumerate(data.split(b"\n"), 1):
        place = f"{where}, line {number},"
        inside = opened(line, where=place)
        if inside == line and _SEAL.search(line):
            raise _damaged(place)
        if inside.strip():
            yield inside


def _damaged(where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} is damaged: its bytes are not those that were written",
        remedy="`headway restore` brings it back from a backup; what was recorded in it is not believed until then.",
    )
