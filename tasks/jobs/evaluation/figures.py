"""`evaluation.json` of what was scored: the whole, calibration, and every slice. What suites say is added by evaluate.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.config.evaluation import EvaluationConfig
from tasks.evaluation import scores
from tasks.evaluation.comparison import Sums, masks, sums

Columns = Mapping[str, Any]
Certainty = NDArray[np.float64]
"""Shape [documents, bins, 3]: see tasks/evaluation/scores.py."""


def figures(documents: Columns, certainty: Certainty, sources: Mapping[str, Any], config: EvaluationConfig) -> Any:
    """The content of `evaluation.json`. `sources` holds, where there are several corpora, the columns and certainty of each."""
    drawn = sampling(config)
    whole, bigram = sums(documents), documents["bigram_bits"]
    score = scores.bits_per_byte_interval(whole.bits, whole.bytes, **drawn)
    gain = scores.relative_gain(whole.bits, bigram, **drawn)
    slices = {
        **{f"source {name}": (sums(columns), sure) for name, (columns, sure) in sources.items()},
        **{
            name: (whole.part(chosen), certainty[chosen])
            for name, chosen in masks(documents["bytes"], documents["kinds"]).items()
        },
    }
    return {
        "documents": len(whole),
        "bytes": sum(documents["bytes"]),
        "tokens": sum(documents["tokens"]),
        "bits_per_byte": score.estimate,
        "interval": [score.low, score.high],
        "perplexity": _perplexity(whole),
        "accuracy": _accuracy(whole, drawn),
        "calibration": {
            "error": scores.calibration_error(certainty),
            "bins": scores.reliability(certainty),
        },
        "unigram": {"bits_per_byte": scores.bits_per_byte(documents["unigram_bits"], whole.bytes)},
        "bigram": {"bits_per_byte": scores.bits_per_byte(bigram, whole.bytes)},
        "gain_over_bigram": {"estimate": gain.estimate, "interval": [gain.low, gain.high]},
        "confidence": config.confidence,
        "slices": [_slice(name, *parts, config) for name, parts in slices.items()],
    }


def sampling(config: EvaluationConfig) -> dict[str, Any]:
    """How documents are drawn again."""
    return {"samples": config.bootstrap_samples, "confidence": config.confidence, "seed": config.seed}


def metrics(payload: Mapping[str, Any]) -> dict[str, float]:
    """What runs are compared by, of `evaluation.json`; a suite's are called `SUITE.METRIC`."""
    gain = payload["gain_over_bigram"]
    suites = {
        f"{name}.{metric}": value
        for name, suite in payload["suites"].items()
        for metric, value in suite["metrics"].items()
    }
    return {
        "bits_per_byte": payload["bits_per_byte"],
        "bigram_bits_per_byte": payload["bigram"]["bits_per_byte"],
        "unigram_bits_per_byte": payload["unigram"]["bits_per_byte"],
        "gain_over_bigram": gain["estimate"],
        "gain_low": gain["interval"][0],
        "gain_high": gain["interval"][1],
        "perplexity": payload["perplexity"],
        "accuracy": payload["accuracy"]["estimate"],
        "calibration_error": payload["calibration"]["error"],
        "documents": payload["documents"],
        "share_of_heldout": payload["heldout"]["share"],
        "context": payload["context"]["declared"],
        **suites,
    }


def _slice(name: str, of: Sums, certainty: Certainty, config: EvaluationConfig) -> dict[str, Any]:
    """One row: with too few documents an interval would promise what it cannot hold, so there is none."""
    drawn, enough = sampling(config), len(of) >= config.min_slice_documents
    score = scores.bits_per_byte_interval(of.bits, of.bytes, **drawn) if enough else None
    return {
        "slice": name,
        "status": "measured" if enough else "insufficient",
        "documents": len(of),
        "bytes": int(of.bytes.sum()),
        "tokens": int(_known(of.tokens).sum()),
        "bits_per_byte": scores.bits_per_byte(of.bits, of.bytes),
        "interval": [score.low, score.high] if score else None,
        "perplexity": _perplexity(of),
        "accuracy": _accuracy(of, drawn, interval=enough),
        "calibration_error": scores.calibration_error(certainty),
    }


def _perplexity(of: Sums) -> float:
    """Per token of the model's own tokenizer."""
    return float(2.0 ** (math.fsum(of.bits) / _known(of.tokens).sum()))


def _accuracy(of: Sums, drawn: dict[str, Any], *, interval: bool = True) -> dict[str, Any]:
    """The share of tokens that the model held for the likeliest."""
    result = scores.ratio(_known(of.correct), _known(of.tokens), **drawn)
    return {"estimate": result.estimate, "interval": [result.low, result.high] if interval else None}


def _known(column: NDArray[np.float64] | None) -> NDArray[np.float64]:
    assert column is not None, "this release writes every column"
    return column
