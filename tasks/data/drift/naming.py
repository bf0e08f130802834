"""What moved, in words that may be told: which words and tokens say most, without those that may be a secret or a person's.

Words are counted by hash only (tasks/data/drift/features.py). The few that say most are looked up in documents that have them,
after secrets and personal data in those were blanked out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.corpus import secrets
from tasks.data.corpus.measures import Texts
from tasks.data.corpus.tokens import read_words
from tasks.data.drift.classifier import odds
from tasks.data.drift.columns import Kept
from tasks.data.drift.features import WORD_BITS

FEATURES = 20
LOOKED_UP = 60
ERRORS = 2
"""Standard errors that the shares of a word must lie apart to be told."""
FEWEST = 5
"""Documents that a word must be in to be told: what only one or two have may be about somebody."""
LONGEST = 24
RANDOM_BITS = 3.2
"""Bits a character from which a long word with digits looks drawn at random."""
_WORD = re.compile(r"[0-9a-z_\x80-\U0010ffff]+")


@dataclass(frozen=True)
class Feature:
    """A word and the shares of documents that have it, on both sides."""

    feature: str
    weight: float
    """Log odds, base e, that a document with the word is new; below 0 for words of the reference."""
    reference: float
    new: float


def tell(kept: Kept, new: NDArray[np.bool_], heads: Sequence[str]) -> list[Feature]:
    """The words that tell the sides apart best, half of them new ones; `heads` are the documents of the rows."""
    presence = kept.presence
    on_new, on_old = (np.asarray(presence[side].sum(axis=0), np.float64).ravel() for side in (new, ~new))
    of_new, of_old = int(new.sum()), int((~new).sum())
    weights = odds(on_new, on_old, of_new, of_old)
    shares = (on_new + on_old) / (of_new + of_old)
    error = np.sqrt(np.maximum(shares * (1 - shares), 1e-9) * (1 / of_new + 1 / of_old))
    apart = np.where(np.maximum(on_new, on_old) >= FEWEST, (on_new / of_new - on_old / of_old) / error, 0.0)
    order = [np.argsort(-sign * apart, kind="stable")[:LOOKED_UP] for sign in (1, -1)]
    names = _names([c for each in order for c in each.tolist() if abs(apart[c]) > ERRORS], kept, presence, heads)
    told = [
        [
            Feature(names[c], float(weights[c]), on_old[c] / of_old, on_new[c] / of_new)
            for c in each.tolist()
            if c in names
        ]
        for each in order
    ]
    return [feature for each in told for feature in each[: FEATURES // 2]]


def told_tokens(kept: Kept, new: NDArray[np.bool_], written: Callable[[int], str]) -> list[Feature]:
    """The tokens that weigh most in the divergence, with their shares of all tokens; those that may not be told are left out."""
    on_new, on_old = (np.asarray(kept.counts[side].sum(axis=0), np.float64).ravel()[:-1] for side in (new, ~new))
    of_new, of_old = max(on_new.sum(), 1.0), max(on_old.sum(), 1.0)
    weights = odds(on_new, on_old, of_new, of_old)
    order = np.argsort(-np.abs(on_new / of_new - on_old / of_old) * np.abs(weights), kind="stable")[:LOOKED_UP]
    names = {column: written(int(kept.labels[column])).strip() for column in order.tolist()}
    allowed = set(may_be_told(list(names.values())))
    told = [
        Feature(name, float(weights[c]), on_old[c] / of_old, on_new[c] / of_new)
        for c, name in names.items()
        if name in allowed
    ]
    return told[:FEATURES]


def may_be_told(words: Sequence[str]) -> list[str]:
    """Those words that are short, have a letter, and do not look like a key, a number of somebody or an address."""
    plain = [word for word in words if _is_plain(word)]
    secret = {found.document for found in secrets.find(Texts.of(plain))} if plain else set()
    return [word for place, word in enumerate(plain) if place not in secret]


def _is_plain(word: str) -> bool:
    if not 1 < len(word) <= LONGEST or not any(c.isalpha() for c in word) or "@" in word:
        return False
    digits = sum(c.isdigit() for c in word)
    return digits <= 4 and not (digits and len(word) >= 12 and _bits(word) > RANDOM_BITS)


def _names(order: list[int], kept: Kept, presence: Any, heads: Sequence[str]) -> dict[int, str]:
    """Columns by the word that stands for each: the most frequent of its bucket in a few documents."""
    columns = presence.tocsc()
    rows = {c: columns.indices[columns.indptr[c] : columns.indptr[c + 1]][:FEWEST].tolist() for c in order}
    looked_at = sorted({row for some in rows.values() for row in some})
    words = dict(zip(looked_at, map(_words, _clean([heads[row] for row in looked_at])), strict=True))
    names: dict[int, str] = {}
    for column, some in rows.items():
        met = Counter(words[row].get(int(kept.labels[column]), "") for row in some)
        met.pop("", None)
        if met:
            names[column] = met.most_common(1)[0][0]
    allowed = set(may_be_told(list(names.values())))
    return {column: name for column, name in names.items() if name in allowed}


def _clean(texts: list[str]) -> list[str]:
    """Texts without their secrets and personal data."""
    cleaned = list(texts)
    for found in reversed(secrets.find(Texts.of(texts)) if texts else []):
        text = cleaned[found.document]
        cleaned[found.document] = f"{text[: found.start]} {text[found.stop :]}"
    return cleaned


def _words(text: str) -> dict[int, str]:
    """The words of a document by bucket."""
    candidates = sorted(set(_WORD.findall(text.lower())))
    if not candidates:
        return {}
    texts = Texts.of(candidates)
    read = read_words(texts.buffer, texts.starts)
    single = np.flatnonzero(np.diff(read.bounds) == 1)
    buckets = read.hashes[read.bounds[single]] >> np.uint64(64 - WORD_BITS)
    return dict(zip(buckets.astype(np.int64).tolist(), (candidates[i] for i in single.tolist()), strict=True))


def _bits(word: str) -> float:
    """Shannon's entropy of a word's characters, in bits a character."""
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())
