"""Bits by position: how many tokens a model had read when it predicted one, in buckets that grow, up to its context.

What a model declares, and an endpoint takes, is the context that it was measured up to. Where no document is so long, documents
are joined one behind the other, as training reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation import scores
from tasks.jobs.evaluation.heldout import Encoded

FIRST = 16
"""Last position of the first bucket. Then there are two to each doubling: 24, 32, 48, 64, 96, ..."""
DECIMALS = 6
"""What float32 can carry."""
MOST_ROWS = 64
"""Most rows of joined documents."""


def ends(context: int) -> list[int]:
    """The last position of each bucket; the last of all is the context."""
    return [*_growing(context), context]


def _growing(context: int) -> Iterator[int]:
    end = FIRST
    while end < context:
        yield end
        if end * 3 // 2 < context:
            yield end * 3 // 2
        end *= 2


@dataclass(frozen=True)
class Positions:
    """Of each document and bucket."""

    context: int
    bits: NDArray[np.float64]
    """Shape [documents, buckets]."""
    tokens: NDArray[np.int64]
    """Those that were predicted, shape [documents, buckets]."""

    @classmethod
    def none(cls, documents: int, context: int) -> Positions:
        shape = (documents, len(ends(context)))
        return cls(context, np.zeros(shape), np.zeros(shape, np.int64))

    def add(self, rows: NDArray[np.int64], scored: NDArray[np.bool_], lost: NDArray[np.float64]) -> None:
        """Count a batch of windows, which belong to the documents `rows`: whether a position is scored, and nats, both of shape
        [windows, positions]. The first position has read one token.
        """
        buckets = np.searchsorted(ends(self.context), np.arange(1, scored.shape[1] + 1))
        for bucket in np.unique(buckets):
            part = buckets == bucket
            np.add.at(self.bits, (rows, bucket), lost[:, part].sum(axis=1) / math.log(2))
            np.add.at(self.tokens, (rows, bucket), scored[:, part].sum(axis=1))


def longest(encoded: Encoded, context: int) -> int:
    """The last position that is read of any document."""
    return min(context, int(encoded.lengths.max()) + len(encoded.context) - 1)


def joined(encoded: Encoded, positions: int) -> Encoded | None:
    """Documents one behind the other, cut into rows of so many positions; None where they do not fill one."""
    whole, length = np.concatenate(encoded.documents), positions - len(encoded.context) + 1
    rows = min(len(whole) // length, MOST_ROWS)
    if not rows:
        return None
    return Encoded(list(whole[: rows * length].reshape(rows, length)), encoded.eod_id, encoded.opening)


def by_position(
    documents: Positions, rows: Positions | None, config: EvaluationConfig, *, reached: int
) -> list[dict[str, Any]]:
    """The list `positions` of `evaluation.json`: of documents, and beyond `reached`, where they end, of joined rows."""
    first, payload = 1, []
    for bucket, end in enumerate(ends(documents.context)):
        of = rows if rows and end > reached and rows.tokens[:, bucket].any() else documents
        payload.append({"from": first, "to": end, **_bucket(of, bucket, config), "joined": of is rows})
        first = end + 1
    return payload


def _bucket(of: Positions, bucket: int, config: EvaluationConfig) -> Mapping[str, Any]:
    """Bits a token, with an interval where there are documents enough; no bits where no token was measured."""
    bits, tokens = of.bits[:, bucket], of.tokens[:, bucket]
    reached = tokens > 0
    if not reached.any():
        return {"tokens": 0, "documents": 0, "bits_per_token": None, "interval": None}
    result = scores.ratio(
        bits[reached],
        tokens[reached],
        samples=config.bootstrap_samples,
        confidence=config.confidence,
        seed=config.seed,
    )
    enough = reached.sum() >= config.min_slice_documents
    return {
        "tokens": int(tokens.sum()),
        "documents": int(reached.sum()),
        "bits_per_token": round(result.estimate, DECIMALS),
        "interval": [round(result.low, DECIMALS), round(result.high, DECIMALS)] if enough else None,
    }
