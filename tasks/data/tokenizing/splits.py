"""Which split a document belongs to: by the hash of its content, so that it never changes sides.

Pure arithmetic; who writes the splits is tasks/data/tokenizing/units.py.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

NAMES = {1: ("",), 2: ("train", "heldout"), 3: ("train", "valid", "test")}


@dataclass(frozen=True)
class Splits:
    """Shares of the documents, in the order of NAMES: the first is what trains."""

    fractions: tuple[float, ...] = (1.0,)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the splits; one without a name when everything goes into one file."""
        return NAMES[len(self.fractions)]

    def of(self, text: str) -> int:
        """The index of a document's split."""
        return split_of(text, self.fractions) if len(self.fractions) > 1 else 0


def split_of(text: str, fractions: tuple[float, ...]) -> int:
    """Which split a document belongs to, the last for the smallest hashes.

    The first 8 bytes of its sha256 are a number below 2^64; with (train, held out) it is held out below the second share.
    """
    first = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    share = 0.0
    for index in range(len(fractions) - 1, 0, -1):
        share += fractions[index]
        if first < share * 2**64:
            return index
    return 0


def parse_splits(text: str) -> Splits:
    """Shares as `0.98,0.02` says them; nothing is one split. Raises ValueError when they are no shares of a whole."""
    if not text:
        return Splits()
    try:
        fractions = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--split {text!r} is no list of numbers; write for example 0.98,0.02") from None
    if len(fractions) not in (2, 3) or not all(0 < share < 1 for share in fractions):
        raise ValueError(
            f"--split {text} must have two or three shares between 0 and 1: train,heldout or train,valid,test"
        )
    if not math.isclose(sum(fractions), 1.0, abs_tol=1e-9):
        raise ValueError(f"--split {text} adds up to {sum(fractions):g}; the shares must add up to 1")
    return Splits(fractions)
