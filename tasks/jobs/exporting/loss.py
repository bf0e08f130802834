"""Bits per byte of an exported model and of its checkpoint, on the same held-out text and by the evaluation's own measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.common.process import read_json
from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation.scores import Estimate, bits_per_byte, bits_per_byte_interval
from tasks.jobs.evaluation.heldout import Encoded, Heldout, encode_for, read_heldout
from tasks.jobs.evaluation.scoring import context_of, score
from tasks.jobs.node.runtime import Rank

LONGEST = 1024
"""Tokens that a model takes at once here, where its checkpoint does not say what it was trained with."""
DECIMALS = 6


@dataclass(frozen=True)
class Sample:
    """Held-out documents in a checkpoint's own tokens."""

    heldout: Heldout
    encoded: Encoded
    context: int
    confidence: float
    samples: int
    seed: int


def read_sample(checkpoint: Path, tokens: Path, *, most_bytes: int, context: int | None = None) -> Sample:
    """The first held-out documents, for windows of `context` tokens at most.

    Raises ValueError when there is none, or the tokenizer cannot write their text.
    """
    config = EvaluationConfig(max_bytes=most_bytes, min_documents=1)
    heldout = read_heldout(tokens, config)
    trained = read_json(checkpoint / "training.json") if (checkpoint / "training.json").is_file() else None
    length = int((trained or {}).get("sequence_length", LONGEST))
    return Sample(
        heldout,
        encode_for(checkpoint, tokens, heldout),
        min(length, context or length),
        config.confidence,
        config.bootstrap_samples,
        config.seed,
    )


def bits_of(network: Any, sample: Sample, rank: Rank) -> NDArray[np.float64]:
    """Bits of each document, shape [documents]. Raises ValueError where a model gives no finite probability."""
    return score(network, sample.encoded, context=context_of(network, sample.context), rank=rank).bits


def bits_a_byte(bits: NDArray[np.float64], sample: Sample) -> float:
    """Rounded to what float32 can carry."""
    return round(bits_per_byte(bits, sample.heldout.byte_counts), DECIMALS)


def interval_of(bits: NDArray[np.float64], sample: Sample) -> Estimate:
    """Bits per byte with the bootstrap interval over documents."""
    return bits_per_byte_interval(
        bits,
        sample.heldout.byte_counts,
        samples=sample.samples,
        confidence=sample.confidence,
        seed=sample.seed,
    )


def share_worse(bits: NDArray[np.float64], original: NDArray[np.float64]) -> float:
    """By how much more bits a model needs for the same text than its original; negative: fewer."""
    return round(float(bits.sum() / original.sum()) - 1.0, DECIMALS)
