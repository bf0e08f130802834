"""The suite `memorisation`: how much of the training text the model knows by heart, beside text that it has not seen.

Passages of both splits are drawn by a seed. The model is given the first tokens of each and writes on greedily; a passage is
known by heart when all that it writes is what stands there (Carlini et al. 2023, Quantifying Memorization Across Neural
Language Models). Held-out text gives the base rate: boilerplate is guessed right without having been learnt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tasks.evaluation.scores import wilson
from tasks.formats.mmididx import open_tokens
from tasks.jobs.evaluation.generating import continued
from tasks.jobs.evaluation.suites import Bench, Suite

SPLITS = {"train": "train_text_document", "heldout": "heldout_text_document"}
DRAWS = 4
"""Passages that are looked at for each that is wanted: one in another tokenizer may turn out too short."""


@dataclass(frozen=True)
class Passage:
    """What the model is given, and what stands behind it; in the checkpoint's ids."""

    prompt: list[int]
    rest: list[int]


def memorisation(bench: Bench) -> Suite | None:
    """Shares and counts of both splits, with their intervals; `excess` is the share of train over that of held-out text.

    `samples` is the number of passages of the split with fewer: `excess` rests on both.
    """
    config = bench.config
    if not config.probe_samples:
        return None
    metrics: dict[str, float] = {}
    samples = {}
    for split, file in SPLITS.items():
        result = passages(bench, bench.rank.inputs["tokens"] / file)
        samples[split] = len(result)
        if result:
            metrics |= _counted(split, known_by_heart(bench, result), len(result), config.confidence)
    if all(samples.values()):
        metrics["excess"] = metrics["train_share"] - metrics["heldout_share"]
    prefix, rest = lengths(bench)
    details = {"samples": samples, "prefix_tokens": prefix, "tokens": rest}
    return Suite(metrics, min(samples.values()), lower_is_better=tuple(metrics), details=details)


def known_by_heart(bench: Bench, results: list[Passage]) -> int:
    """How many passages the model ends as they end."""
    _, rest = lengths(bench)
    written = continued(bench, [passage.prompt for passage in results], rest)
    return sum(row == passage.rest for row, passage in zip(written, results, strict=True))


def lengths(bench: Bench) -> tuple[int, int]:
    """Tokens that the model is given, and that it then writes: as configured, or what its context has room for."""
    prefix = min(bench.config.probe_prefix_tokens, bench.context // 2)
    return prefix, min(bench.config.probe_tokens, bench.context - prefix)


def passages(bench: Bench, prefix: Path) -> list[Passage]:
    """Up to `probe_samples` passages of one split, drawn from documents that are long enough; fewer where there are fewer."""
    config, indexed = bench.config, open_tokens(prefix)
    given, rest = lengths(bench)
    length = given + rest
    other = _tokenizer_of(bench)
    results = []
    for start in _starts(indexed.boundaries, length, DRAWS * config.probe_samples, config.seed):
        ids = _ids(indexed.tokens, start, length, other, bench)
        if len(ids) >= length:
            results.append(Passage(ids[:given], ids[given:length]))
        if len(results) == config.probe_samples:
            break
    return results


def _counted(split: str, count: int, samples: int, confidence: float) -> dict[str, float]:
    share = wilson(count, samples, confidence=confidence)
    values = {"count": count, "share": share.estimate, "low": share.low, "high": share.high}
    return {f"{split}_{name}": float(value) for name, value in values.items()}


def _starts(boundaries: NDArray[np.int64], length: int, count: int, seed: int) -> Iterator[int]:
    """First tokens of passages within one document, each place of the split as likely as any other, none twice."""
    room = np.maximum(np.diff(boundaries) - length, 0)  # the end of the document is no part of a passage
    ends = np.cumsum(room)
    if not len(ends) or not ends[-1]:
        return
    places = np.random.default_rng(seed).choice(int(ends[-1]), min(count, int(ends[-1])), replace=False, shuffle=True)
    for place in places.tolist():
        document = int(np.searchsorted(ends, place, side="right"))
        yield int(boundaries[document]) + place - int(ends[document] - room[document])


def _tokenizer_of(bench: Bench) -> Tokenizer | None:
    """The tokens' own tokenizer where it is another than the checkpoint's; None: ids can be taken as they are."""
    own = bench.rank.inputs["tokens"] / "tokenizer" / "tokenizer.json"
    if own.read_bytes() == (bench.rank.inputs["checkpoint"] / "tokenizer.json").read_bytes():
        return None
    return Tokenizer.from_file(str(own))


def _ids(tokens: NDArray[Any], start: int, length: int, other: Tokenizer | None, bench: Bench) -> list[int]:
    """A passage in the checkpoint's ids: of another tokenizer as many as there are, which may be too few."""
    wanted = tokens[start : start + length].tolist()
    if other is None:
        return wanted
    text = other.decode(wanted, skip_special_tokens=False)
    return bench.tokenizer.encode(text, add_special_tokens=False).ids
