"""The cheap measures of documents, a batch at once: characters by class, bad characters, repeated lines, hashes.

All documents of a batch lie in one buffer of UTF-8 with a line feed between them, and numpy looks at the buffer in windows
that fit a processor's cache. What a measure means for a corpus is judged in tasks/data/judging.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from tasks.config.data import CharacterClass

WINDOW = 1 << 20
CLASSES: tuple[CharacterClass, ...] = get_args(CharacterClass)
"""Classes of characters, told by the first byte of their UTF-8 form alone (hexadecimal, and the code points it opens):

letters, digits, punctuation: ASCII; punctuation also C2 (U+0080-00BF) and E2 (U+2000-2FFF: dashes, quotes, arrows, symbols).
space: tab, line feed, carriage return, blank. control: the other bytes below 20, and 7F.
latin: C3-CD (U+00C0-037F, accents and combining marks). greek: CE, CF (U+0380-03FF). cyrillic: D0-D4 (U+0400-053F).
arabic_hebrew: D6-DF (U+0580-07FF, Syriac too). indic_thai: E0 (U+0800-0FFF). cjk: E3-E9 (U+3000-9FFF, kana too).
hangul: EA-ED (U+A000-D7FF, Yi too). emoji_other: F0-F4 (from U+10000). other: D5, E1 (Vietnamese letters with two marks,
Georgian, Khmer), EE, EF (private use, full width forms, U+FFFD).
"""
_RANGES = {
    "punctuation": [(0x21, 0x7E), (0xC2, 0xC2), (0xE2, 0xE2)],
    "letters": [(0x41, 0x5A), (0x61, 0x7A)],
    "digits": [(0x30, 0x39)],
    "control": [(0x00, 0x1F), (0x7F, 0x7F)],
    "space": [(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)],
    "latin": [(0xC3, 0xCD)],
    "greek": [(0xCE, 0xCF)],
    "cyrillic": [(0xD0, 0xD4)],
    "arabic_hebrew": [(0xD6, 0xDF)],
    "indic_thai": [(0xE0, 0xE0)],
    "cjk": [(0xE3, 0xE9)],
    "hangul": [(0xEA, 0xED)],
    "emoji_other": [(0xF0, 0xF4)],
    "other": [(0xD5, 0xD5), (0xE1, 0xE1), (0xEE, 0xEF)],
}
"""Later ranges overrule earlier ones."""


@dataclass(frozen=True)
class Texts:
    """Documents in one buffer, a line feed between them."""

    texts: list[str]
    encoded: list[bytes]

    @classmethod
    def of(cls, texts: list[str]) -> Texts:
        return cls(texts, [text.encode() for text in texts])

    @cached_property
    def buffer(self) -> bytes:
        return self.encoded[0] if len(self.encoded) == 1 else b"\n".join(self.encoded)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each document."""
        return np.fromiter(map(len, self.encoded), np.int64, len(self.encoded))

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins in the buffer, and where one after the last would, shape [documents + 1]."""
        return np.concatenate(([0], np.cumsum(self.sizes + 1)))

    @cached_property
    def characters(self) -> NDArray[np.int64]:
        return np.fromiter(map(len, self.texts), np.int64, len(self.texts))

    @cached_property
    def histogram(self) -> NDArray[np.int64]:
        """How often each byte occurs in the documents, shape [256]."""
        pairs = np.zeros(65_536, np.int64)
        for _, data in windows(self.buffer):
            pairs += np.bincount(data[: len(data) // 2 * 2].view(np.uint16), minlength=65_536)
        table = pairs.reshape(256, 256)
        counts: NDArray[np.int64] = table.sum(axis=0) + table.sum(axis=1)
        if len(self.buffer) % 2:
            counts[self.buffer[-1]] += 1
        counts[10] -= len(self.texts) - 1
        return counts

    def documents_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The document that each position of the buffer belongs to."""
        return np.searchsorted(self.starts, positions, side="right") - 1

    def shares(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """The share of each document's characters that stand at some positions."""
        counts = np.bincount(self.documents_at(positions), minlength=len(self.texts))
        return (counts / np.maximum(self.characters, 1)).astype(np.float32)


def windows(buffer: bytes) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Parts of a buffer and where they begin."""
    data = np.frombuffer(buffer, np.uint8)
    for start in range(0, len(data), WINDOW):
        yield start, data[start : start + WINDOW]


def classes(histogram: NDArray[np.int64]) -> NDArray[np.int64]:
    """Characters by class, from a histogram of bytes, shape [len(CLASSES)]."""
    known = _CLASS_OF >= 0
    return np.bincount(_CLASS_OF[known], weights=histogram[known], minlength=len(CLASSES)).astype(np.int64)


def control_shares(texts: Texts) -> NDArray[np.float32]:
    """The share of control characters in each document; tab, line feed and carriage return are none."""
    if not texts.histogram[_CONTROL].any():
        return np.zeros(len(texts.texts), np.float32)
    results = []
    for start, data in windows(texts.buffer):
        mask = ((data < 32) & (data != 9) & (data != 10) & (data != 13)) | (data == 127)
        results.append(np.flatnonzero(mask) + start)
    return texts.shares(np.concatenate(results))


def replacement_shares(texts: Texts) -> NDArray[np.float32]:
    """The share of U+FFFD (EF BF BD) in each document."""
    if not texts.histogram[0xEF]:
        return np.zeros(len(texts.texts), np.float32)
    data = np.frombuffer(texts.buffer, np.uint8)
    places = np.concatenate([np.flatnonzero(part == 0xEF) + start for start, part in windows(texts.buffer)])
    return texts.shares(places[(data[places + 1] == 0xBF) & (data[places + 2] == 0xBD)])


def repeated_shares(texts: Texts) -> NDArray[np.float32]:
    """The share of each document's characters in lines that it has already had; lines of white space do not count."""
    return np.fromiter(map(repeated_share, texts.texts), np.float32, len(texts.texts))


def repeated_share(text: str) -> float:
    """Characters in lines that came before, by characters in all lines; without line feeds and lines of white space."""
    lines = text.split("\n")
    if len(lines) == 1:
        return 0.0
    distinct = set(lines)
    total, once = len(text) - len(lines) + 1, len("".join(distinct))
    if total == once:
        return 0.0
    if blank := {line for line in distinct if line.isspace()}:
        total -= sum(len(line) for line in lines if line in blank)
        once -= sum(map(len, blank))
    return (total - once) / max(total, 1)


def heldout(texts: Texts, fraction: float) -> NDArray[np.bool_]:
    """Whether each document belongs to the held-out split: by the sha256 of its content, as preprocessing divides."""
    first = b"".join(hashlib.sha256(data).digest()[:8] for data in texts.encoded)
    limit = min(math.ceil(fraction * 2**64), 2**64 - 1)
    return np.frombuffer(first, ">u8") < np.uint64(limit)


def content_hashes(texts: Texts) -> NDArray[np.uint64]:
    """xxh3, 128 bits, of each document, shape [documents, 2].

    Two of n different documents are taken for equal with a chance below n^2 / 2^129: 10^-20 for a thousand million.
    """
    import xxhash

    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join(map(digest, texts.encoded)), np.uint64).reshape(-1, 2)


def _class_table() -> NDArray[np.int64]:
    table = np.full(256, -1)
    for name, ranges in _RANGES.items():
        for first, last in ranges:
            table[first : last + 1] = CLASSES.index(name)
    return table


_CLASS_OF = _class_table()
_CONTROL = np.flatnonzero(np.equal(_CLASS_OF, CLASSES.index("control")))


# Histograms with fixed bins, so that two versions of a corpus are compared without their data. See docs/data.md.
#
# Bin i counts edges[i] <= value < edges[i + 1]; the last bin has no upper edge. Who compares:
# tasks/data/drift/histograms.py.


LENGTHS: tuple[float, ...] = tuple(sorted({0, *(round(2 ** (half / 2)) for half in range(61))}))
"""Half octaves from 1 to 2^30 characters; empty documents have a bin of their own."""
SHARES: tuple[float, ...] = (0.0, 1e-9, 1e-4, 1e-3, 0.005, 0.01, 0.02, 0.05, *(round(0.1 * i, 1) for i in range(1, 11)))
"""Shares of a document, finer where little is much; none at all has a bin of its own."""
COUNTS: tuple[float, ...] = (0, 1, 2, 3, 4, 5, 10, 20, 50, 100)
RATIOS: tuple[float, ...] = tuple(round(1 + 0.1 * i, 1) for i in range(31))
"""Bytes a character: 1 is ASCII, 4 is the most that UTF-8 has."""
EDGES: dict[str, tuple[float, ...]] = {
    "characters": LENGTHS,
    "bytes_per_character": RATIOS,
    "control": SHARES,
    "replacement": SHARES,
    "repeated": SHARES,
    "secrets": COUNTS,
    "personal": COUNTS,
}
"""The bins of each column."""


def bins_of(values: NDArray[Any], edges: tuple[float, ...]) -> NDArray[np.int64]:
    """The index of each value's bin; a value below the first edge counts as the first bin."""
    return np.maximum(np.searchsorted(np.asarray(edges), values, side="right") - 1, 0)


def count(values: NDArray[Any], edges: tuple[float, ...]) -> NDArray[np.int64]:
    """How many values fall into each bin, shape [len(edges)]."""
    return np.bincount(bins_of(values, edges), minlength=len(edges))


def plain(edges: tuple[float, ...], counts: NDArray[np.int64]) -> dict[str, list[float]]:
    """A histogram as JSON."""
    return {"edges": list(edges), "counts": counts.tolist()}
