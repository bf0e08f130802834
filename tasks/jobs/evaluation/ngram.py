"""Unigram and interpolated Kneser-Ney bigram models over token ids: what a network must beat.

Sources: Ney, Essen and Kneser 1994 (absolute discounting, D = n1 / (n1 + 2 n2)); Chen and Goodman 1998, section 2.7
(interpolated Kneser-Ney: the lower order counts distinct contexts). The lowest order is interpolated with the uniform
distribution, so no token has probability zero. Works on sorted pair codes, never on a matrix of V x V. Knows no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tasks.formats.mmididx import Joined

BLOCK_TOKENS = 1 << 24
MOST_TOKENS = 1 << 26
"""Tokens that both models are fitted on at most: of 10 G tokens the sorting of pairs took hours."""
SAMPLE_BLOCK_TOKENS = 1 << 16
"""Tokens of each block of which a larger split gives MOST_TOKENS: at each seam one pair is counted that does not stand there."""
UNDEFINED_DISCOUNT = 0.5
"""Where no count is 1, the formula gives 0 (or 0/0) and nothing would be left for what was not seen."""


class Ngram(Protocol):
    """A language model that looks back at most one token."""

    def bits(self, tokens: NDArray[np.integer], contexts: NDArray[np.integer]) -> NDArray[np.float64]:
        """-log2 P(token | context) of each token, shape [tokens]."""


@dataclass(frozen=True)
class Unigram:
    """Token frequencies, discounted and interpolated with the uniform distribution."""

    probabilities: NDArray[np.float64]
    """Shape [vocab_size]; sums to 1."""

    def bits(self, tokens: NDArray[np.integer], contexts: NDArray[np.integer]) -> NDArray[np.float64]:
        """-log2 P(token), shape [tokens]; the contexts do not matter."""
        return -np.log2(self.probabilities[tokens])


@dataclass(frozen=True)
class Bigram:
    """P(w | v) = max(c(v, w) - D, 0) / c(v) + backoff(v) * lower(w)."""

    codes: NDArray[np.int64]
    """v * vocab_size + w of each pair that was seen, ascending, shape [pairs]."""
    discounted: NDArray[np.float64]
    """max(c(v, w) - D, 0) / c(v) of each pair, shape [pairs]."""
    backoff: NDArray[np.float64]
    """D * N1+(v, .) / c(v): the share that context v leaves to the lower order; 1 where v was not seen. [vocab_size]"""
    lower: NDArray[np.float64]
    """Continuation distribution, by N1+(., w), interpolated with the uniform one; shape [vocab_size]."""

    def bits(self, tokens: NDArray[np.integer], contexts: NDArray[np.integer]) -> NDArray[np.float64]:
        """-log2 P(token | context), shape [tokens]."""
        wanted = _pair_codes(tokens, contexts, vocab_size=len(self.lower))
        place = np.minimum(np.searchsorted(self.codes, wanted), len(self.codes) - 1)
        seen = np.where(self.codes[place] == wanted, self.discounted[place], 0.0)
        return -np.log2(seen + self.backoff[contexts] * self.lower[tokens])


def sampled(tokens: NDArray[Any] | Joined) -> NDArray[Any]:
    """What the models are fitted on: the stream as it is, or of a longer one MOST_TOKENS in evenly spaced blocks, in order."""
    if len(tokens) <= MOST_TOKENS:
        return tokens[:]
    blocks = MOST_TOKENS // SAMPLE_BLOCK_TOKENS
    last = len(tokens) - SAMPLE_BLOCK_TOKENS
    starts = [number * last // max(blocks - 1, 1) for number in range(blocks)]
    return np.concatenate([tokens[start : start + SAMPLE_BLOCK_TOKENS] for start in starts])


def fit_unigram(tokens: NDArray[np.integer], vocab_size: int) -> Unigram:
    """Fit on a training stream of shape [tokens], read in blocks."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        counts += np.bincount(tokens[start : start + BLOCK_TOKENS], minlength=vocab_size)
    return Unigram(_interpolated_with_uniform(counts))


def fit_bigram(tokens: NDArray[np.integer], vocab_size: int, *, eod_id: int) -> Bigram:
    """Fit on a training stream of shape [tokens] in which every document ends with `eod_id`.

    So each document's first token follows an eod; the stream's very first token is given one.
    """
    codes, counts = _count_pairs(tokens, vocab_size, eod_id=eod_id)
    contexts, continuations = np.divmod(codes, vocab_size)
    totals = np.bincount(contexts, weights=counts, minlength=vocab_size)
    followers = np.bincount(contexts, minlength=vocab_size)
    discount = absolute_discount(counts)
    return Bigram(
        codes=codes,
        discounted=np.maximum(counts - discount, 0.0) / totals[contexts],
        backoff=np.where(totals > 0, discount * followers / np.maximum(totals, 1), 1.0),
        lower=_interpolated_with_uniform(np.bincount(continuations, minlength=vocab_size)),
    )


def absolute_discount(counts: NDArray[np.integer]) -> float:
    """D = n1 / (n1 + 2 n2), where nk is how many entries occurred k times (Ney, Essen and Kneser 1994)."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else UNDEFINED_DISCOUNT


def document_bits(
    model: Ngram,
    tokens: NDArray[np.integer],
    lengths: NDArray[np.integer],
    *,
    eod_id: int,
    scored: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Bits of each document, shape [documents]: `tokens` joins them, `lengths` counts the tokens of each.

    The first token of a document is predicted from `eod_id`. `scored` says which tokens count; None: all do.
    """
    first = (np.cumsum(lengths) - lengths)[lengths > 0]
    contexts = np.empty_like(tokens)
    contexts[1:] = tokens[:-1]
    contexts[first] = eod_id
    owner = np.repeat(np.arange(len(lengths)), lengths)
    bits = model.bits(tokens, contexts) if scored is None else np.where(scored, model.bits(tokens, contexts), 0.0)
    return np.bincount(owner, weights=bits, minlength=len(lengths)).astype(np.float64)


def _interpolated_with_uniform(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """max(c - D, 0) / N + (D * types / N) / V: absolute discounting over the uniform distribution."""
    total, types = counts.sum(), int((counts > 0).sum())
    discount = absolute_discount(counts)
    return np.maximum(counts - discount, 0.0) / total + discount * types / total / len(counts)


def _pair_codes(tokens: NDArray[np.integer], contexts: NDArray[np.integer], *, vocab_size: int) -> NDArray[np.int64]:
    return contexts.astype(np.int64) * vocab_size + tokens


def _count_pairs(
    tokens: NDArray[np.integer], vocab_size: int, *, eod_id: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each pair that occurs, as an ascending code, and how often; block by block, so memory stays bounded."""
    codes, counts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    before = eod_id
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + BLOCK_TOKENS])
        contexts = np.concatenate((np.array([before], dtype=block.dtype), block[:-1]))
        more_codes, more_counts = np.unique(_pair_codes(block, contexts, vocab_size=vocab_size), return_counts=True)
        every = np.concatenate((codes, more_codes))
        order = np.argsort(every, kind="stable")
        every, weights = every[order], np.concatenate((counts, more_counts))[order]
        first = np.flatnonzero(np.concatenate(([True], every[1:] != every[:-1])))
        codes, counts = every[first], np.add.reduceat(weights, first)
        before = int(block[-1])
    return codes, counts
