"""Several datasets with weights, as Megatron's arguments take them.

Names and forms after NVIDIA/Megatron-LM megatron/training/arguments.py (_add_data_args) and get_blend_from_list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.data.tokenizing.checking import look

SPLITS = {"train": "train", "heldout": "valid", "valid": "valid", "test": "test"}
"""Megatron's name of each split."""


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture."""

    weight: float
    """Share of the samples, relative to the other weights."""
    prefix: Path
    """`.bin` and `.idx` come after it."""


def parse_mixture(words: Sequence[str]) -> tuple[Part, ...]:
    """`WEIGHT PREFIX WEIGHT PREFIX ...` as parts.

    Raises ValueError when a weight is no positive number, a dataset is named twice, is not there, or stores another type;
    IntegrityError when one is not whole.
    """
    if not words or len(words) % 2:
        raise ValueError(
            "name a weight and a prefix for every dataset: 0.7 data/code_text_document 0.3 data/prose_text_document"
        )
    parts = tuple(Part(_weight(words[i]), Path(words[i + 1])) for i in range(0, len(words), 2))
    names = [part.prefix.resolve() for part in parts]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice} is named twice; give it one weight")
    for part in parts:
        if not Path(f"{part.prefix}.idx").is_file():
            raise ValueError(f"{part.prefix}.idx does not exist; name the prefix of a dataset, without .bin or .idx")
    types = {look(part.prefix, samples=1).dtype for part in parts}
    if len(types) > 1:
        raise ValueError(f"the datasets store {' and '.join(sorted(types))}: they are of different tokenizers")
    return parts


def blend(parts: Sequence[Part]) -> list[str]:
    """A list that Megatron reads as a mixture: weights and prefixes in turn, or one prefix alone."""
    if len(parts) == 1:
        return [str(parts[0].prefix)]
    total = sum(part.weight for part in parts)
    return [word for part in parts for word in (f"{part.weight / total:.9g}", str(part.prefix))]


def data_arguments(parts: Sequence[Part]) -> tuple[str, ...]:
    """Arguments for one mixture, which Megatron divides by its own --split."""
    return ("--data-path", *blend(parts))


def blend_file(splits: Mapping[str, Sequence[Part]]) -> dict[str, list[str] | None]:
    """The content of the file that --per-split-data-args-path names, which has all three splits."""
    named = {SPLITS[split]: blend(parts) for split, parts in splits.items()}
    return {split: named.get(split) for split in ("train", "valid", "test")}


def _weight(word: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is no weight: a weight stands before every prefix") from None
    if not math.isfinite(weight) or weight <= 0:
        raise ValueError(f"weight {word} must be a number above 0")
    return weight
