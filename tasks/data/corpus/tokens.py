"""Words as numbers: what near duplicates, contamination and the drift of the vocabulary are told by.

A word is a run of letters, digits, underscores and characters outside ASCII, in lower case; each Chinese, Japanese or Korean
character is a word of its own. Everything else separates. A word's hash is a polynomial of its bytes modulo 2^64, mixed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 18
BASE = 0x9E3779B97F4A7C15
STEP = 0xD6E8FEB86659FD93
_WORD = b"0123456789abcdefghijklmnopqrstuvwxyz_"
_TABLE = bytes(byte if byte >= 128 or byte in _WORD else (byte + 32 if 65 <= byte <= 90 else 0) for byte in range(256))
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Words:
    """The words of documents that lie in one buffer."""

    hashes: Hashes
    bounds: NDArray[np.int64]
    """The first word of each document, and the count of all, shape [documents + 1]."""


def read_words(buffer: bytes, starts: NDArray[np.int64]) -> Words:
    """The words of a buffer whose documents begin at `starts` (one more for the end), a separator between them."""
    places, hashes = [], []
    begin = 0
    while begin < len(buffer):
        end = _cut(buffer, begin)
        result, hashed = _chunk(buffer[begin:end])
        places.append(result + begin)
        hashes.append(hashed)
        begin = end
    if not places:
        return Words(np.zeros(0, np.uint64), np.zeros(len(starts), np.int64))
    return Words(np.concatenate(hashes), np.searchsorted(np.concatenate(places), starts))


def ngrams(words: Words, n: int) -> Words:
    """All runs of n words within a document, as words."""
    if len(words.hashes) < n:
        return Words(np.zeros(0, np.uint64), np.zeros(len(words.bounds), np.int64))
    keep = np.ones(len(words.hashes) - n + 1, np.bool_)
    for back in range(1, n):
        last = words.bounds[1:] - back
        keep[last[(last >= 0) & (last < len(keep))]] = False
    counts = np.maximum(np.diff(words.bounds) - n + 1, 0)
    return Words(mixed(_runs(words.hashes, n)[keep]), np.concatenate(([0], np.cumsum(counts))))


def mixed(values: Hashes) -> Hashes:
    """Every bit depends on every other (the finaliser of MurmurHash3)."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values


def _runs(hashes: Hashes, n: int) -> Hashes:
    """sum of hashes[i + j] STEP^(n - 1 - j) for j < n, by doubling."""
    if n == 1:
        return hashes
    if n % 2:
        shorter = _runs(hashes, n - 1)
        return shorter[:-1] * np.uint64(STEP) + hashes[n - 1 :]
    half = _runs(hashes, n // 2)
    return half[: -n // 2] * np.uint64(pow(STEP, n // 2, 2**64)) + half[n // 2 :]


def _cut(buffer: bytes, begin: int) -> int:
    """The end of a chunk: after a line feed or a blank where there is one, else anywhere."""
    end = begin + CHUNK
    if end >= len(buffer):
        return len(buffer)
    result = max(buffer.rfind(b"\n", begin, end), buffer.rfind(b" ", end - 256, end))
    return result + 1 if result > begin else end


def _chunk(part: bytes) -> tuple[NDArray[np.int64], Hashes]:
    data = np.frombuffer(part.translate(_TABLE), np.uint8)
    begins = data != 0
    before = begins[:-1].copy()
    if data.max(initial=0) >= 0xE3:
        before &= ~((data[1:] >= 0xE3) & (data[1:] <= 0xED))
    begins[1:] &= ~before
    places = np.flatnonzero(begins)
    if not len(places):
        return places, np.zeros(0, np.uint64)
    powers, inverses = _powers()
    sums = np.add.reduceat(data * powers[: len(data)], places)
    return places, mixed(sums * inverses[places])


@lru_cache(maxsize=1)
def _powers() -> tuple[Hashes, Hashes]:
    """BASE^i and BASE^-i modulo 2^64."""
    tables = []
    for base in (BASE, pow(BASE, -1, 2**64)):
        table = np.full(CHUNK, base, np.uint64)
        table[0] = 1
        tables.append(np.cumprod(table, dtype=np.uint64))
    return tables[0], tables[1]
