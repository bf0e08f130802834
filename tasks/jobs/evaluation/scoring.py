"""A model's scores of documents, all from one forward pass: bits, whether the likeliest token was right, and how sure it was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from tasks.jobs.evaluation.heldout import Encoded
from tasks.jobs.evaluation.windows import Window, batches, windows
from tasks.jobs.runtime import Rank
from tasks.scores import CALIBRATION_BINS, Certainty

BATCH_POSITIONS = 8192
"""Most positions, padding included, that one forward pass takes."""
BATCH_LOGITS = 1 << 26
"""Most logits of one forward pass (256 MiB in float32): large vocabularies take fewer positions."""
NOT_SCORED = -100


@dataclass(frozen=True)
class Scored:
    """What a model made of documents, each with its end."""

    bits: NDArray[np.float64]
    """Of all tokens of a document, shape [documents]."""
    tokens: NDArray[np.int64]
    """Scored tokens of a document, shape [documents]."""
    correct: NDArray[np.int64]
    """Those that the model held for the likeliest, shape [documents]."""
    certainty: Certainty
    """How sure it was of the likeliest token, by document and bin."""


def load_model(checkpoint: Path) -> Any:
    """The causal language model of a folder, in float32 and evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True).eval()


def context_of(model: Any, most: int) -> int:
    """Tokens that a model takes at once, at most `most`."""
    return min(most, getattr(model.config, "max_position_embeddings", most))


def score(model: Any, encoded: Encoded, *, sequence_length: int, rank: Rank) -> Scored:
    """Score each document and its end, with end-of-document as left context.

    Raises ValueError where the model gives no finite probability.
    """
    found = windows(encoded.lengths.tolist(), context_of(model, sequence_length))
    count, done = len(encoded.documents), 0
    bits, correct = np.zeros(count), np.zeros(count, np.int64)
    certainty = Certainty.none(count)
    for batch in batches(found, min(BATCH_POSITIONS, BATCH_LOGITS // model.config.vocab_size)):
        rows = np.array([window.document for window in batch])
        lost, right, sure = (part.numpy() for part in _scores(model, batch, encoded))
        scored = np.isfinite(lost) | np.isnan(lost)  # what is not scored is infinite
        np.add.at(bits, rows, np.where(scored, lost, 0.0).sum(axis=1) / math.log(2))
        np.add.at(correct, rows, (right & scored).sum(axis=1))
        certainty.add(np.repeat(rows, scored.sum(axis=1)), sure[scored], right[scored])
        done += len(batch)
        rank.progress(done, len(found), f"{done} of {len(found)} windows")
    _require_finite(bits)
    return Scored(bits=bits, tokens=encoded.lengths, correct=correct, certainty=certainty)
