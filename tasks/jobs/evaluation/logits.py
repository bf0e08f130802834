"""Logits of a causal language model in parts of so many positions that they take a bounded amount of memory.

A network's body is run once; its head (the output matrix, and what an architecture does behind it) is run on parts of what the
body said. What is small is run as a whole, with the same bits as ever. Which positions are read, scoring.py and generating.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

WHOLE_LOGITS = 1 << 26
"""Most logits that are computed as a whole (256 MiB in float32)."""
PART_LOGITS = 1 << 24
"""Most logits of a part, where a whole would be more (64 MiB in float32; who reads them may need a few times that)."""


class _Constant(nn.Module):
    """Stands for a network's body, and returns what the body returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


def logits_in_parts(model: Any, read: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits [rows, part, vocabulary] in float32, and which positions of `read` [rows, positions] they are of, in order.

    Whoever takes a part may overwrite it. Many rows are to be batched under WHOLE_LOGITS; one row may be of any length. A model
    that has no body of its own (an exported graph) gives all logits at once.
    """
    rows, positions = read.shape
    if _is_small(model, rows * positions):
        yield slice(0, positions), model(input_ids=read, use_cache=False).logits.float()
        return
    output = model.base_model(input_ids=read, use_cache=False)
    step = max(1, PART_LOGITS // (rows * model.config.vocab_size))
    for start in range(0, positions, step):
        part = slice(start, min(start + step, positions))
        yield part, _head(model, output, part).float()


def next_logits(model: Any, read: Tensor, **more: Any) -> tuple[Tensor, Any]:
    """Logits [rows, vocabulary] in float32 behind the last of `read` [rows, positions], and the keys and values to go on with."""
    if _is_small(model, read.numel()):
        output = model(input_ids=read, use_cache=True, **more)
        return output.logits[:, -1].float(), output.past_key_values
    output = model.base_model(input_ids=read, use_cache=True, **more)
    last = read.shape[1] - 1
    return _head(model, output, slice(last, last + 1))[:, -1].float(), output.past_key_values


def _is_small(model: Any, positions: int) -> bool:
    return positions * model.config.vocab_size <= WHOLE_LOGITS or getattr(model, "base_model", model) is model


def _head(model: Any, output: Any, part: slice) -> Tensor:
    """The logits of a part of what the body said."""
    kept = type(output)(**{**output, "last_hidden_state": output.last_hidden_state[:, part]})
    with _in_place_of_body(model, _Constant(kept)):
        return cast(Tensor, model(input_ids=None, use_cache=False).logits)


@contextmanager
def _in_place_of_body(model: Any, other: nn.Module) -> Iterator[None]:
    name = model.base_model_prefix
    body = getattr(model, name)
    setattr(model, name, other)
    try:
        yield
    finally:
        setattr(model, name, body)
