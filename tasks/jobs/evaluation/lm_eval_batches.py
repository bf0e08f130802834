"""Which requests lm-evaluation-harness answers together, so that ranks can divide them and each computes whole batches. Pure.

As `Collator` in lm_eval/models/utils.py orders and groups them; what asks the model is lm_eval_model.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tokenized = tuple[Any, list[int], list[int]]
"""A request by its texts, the tokens of its context and those of its continuation."""


def batches_of_contexts(requests: Sequence[Tokenized], size: int, *, shared: bool) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: longest first, and those of one forward pass together.

    Where logits are `shared`, continuations that differ in their last token alone are answered by one pass, that of the longest.
    """
    groups: dict[Any, list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        key = tuple(context + continuation[:-1]) if shared else number
        groups.setdefault(key, []).append(number)

    def place(group: list[int]) -> tuple[int, tuple[int, ...]]:
        read = requests[max(group, key=lambda number: len(requests[number][2]))]
        tokens = tuple(read[1] + read[2])
        return -len(tokens), tokens

    ordered = sorted(groups.values(), key=place)
    return [
        sorted(number for group in ordered[start : start + size] for number in group)
        for start in range(0, len(ordered), size)
    ]


def batches_of_prompts(
    arguments: Sequence[tuple[str, Mapping[str, Any]]], size: int, *, length: Callable[[str], int]
) -> list[list[int]]:
    """The requests of each batch, as the harness batches them: by settings of generation, longest first.

    What is drawn by chance cannot be divided, for each draw depends on those before it: it is one unit.
    """
    drawn = [number for number, (_, settings) in enumerate(arguments) if settings.get("do_sample")]
    groups: dict[str, list[int]] = {}
    for number, (_, settings) in enumerate(arguments):
        if not settings.get("do_sample"):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(number)
    units = [drawn] if drawn else []
    for group in groups.values():
        ordered = sorted(group, key=lambda number: (-length(arguments[number][0]), arguments[number][0]))
        units += [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return units
