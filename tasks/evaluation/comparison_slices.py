"""Which held-out documents make a slice: those of one source of a mixture, of one script, of one class of lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.evaluation.performance_slices import length_classes

COLUMNS = ("bytes", "tokens", "model_bits", "correct")
"""Of `documents.json`, what scores are sums of; bits of the model, tokens of its own tokenizer."""


@dataclass(frozen=True)
class Sums:
    """Documents as an evaluation scored them, columns of shape [documents]; what an older release did not write is None."""

    bytes: NDArray[np.float64]
    bits: NDArray[np.float64]
    tokens: NDArray[np.float64] | None
    correct: NDArray[np.float64] | None

    def part(self, chosen: NDArray[np.bool_]) -> Sums:
        """The chosen documents alone."""
        tokens = None if self.tokens is None else self.tokens[chosen]
        correct = None if self.correct is None else self.correct[chosen]
        return Sums(self.bytes[chosen], self.bits[chosen], tokens, correct)

    def __len__(self) -> int:
        return len(self.bytes)


def sums(documents: Mapping[str, Any]) -> Sums:
    """The columns of `documents.json`, or of one source in `sources.json`. Raises KeyError without bytes and bits."""
    size, tokens, bits, correct = (_column(documents, name) for name in COLUMNS)
    if size is None or bits is None:
        raise KeyError("bytes and model_bits")
    return Sums(size, bits, tokens, correct)


def masks(sizes: Sequence[float], kinds: Sequence[str]) -> dict[str, NDArray[np.bool_]]:
    """Slices of one corpus by name, each of shape [documents]: scripts where there are several, then classes of lengths."""
    lengths, scripts = np.asarray(sizes, np.float64), np.asarray(kinds)
    by_script = sorted(set(kinds)) if len(set(kinds)) > 1 else []
    found = {
        **{f"script {kind}": scripts == kind for kind in by_script},
        **{name: (lengths > low) & (lengths <= high) for name, low, high in length_classes(lengths)},
    }
    return {name: chosen for name, chosen in found.items() if chosen.any()}


def slices(documents: Mapping[str, Any], sources: Mapping[str, Any]) -> dict[str, Sums]:
    """Every slice of an evaluation by its name. `sources` is its `sources.json`, empty where the model learnt from one corpus."""
    whole = sums(documents)
    others = {f"source {name}": sums(each) for name, each in sources.get("others", {}).items()}
    return {
        **({f"source {sources['own']}": whole, **others} if others else {}),
        **{name: whole.part(chosen) for name, chosen in masks(documents["bytes"], documents.get("kinds", ())).items()},
    }


def _column(documents: Mapping[str, Any], name: str) -> NDArray[np.float64] | None:
    found = documents.get(name)
    return None if found is None else np.asarray(found, np.float64)
