"""What a model writes: greedily or by chance, several prompts at once, with the keys and values of what was read kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tasks.jobs.evaluation.division import Arrays
from tasks.jobs.evaluation.suites import Bench

# Logits of a causal language model in parts of so many positions that they take a bounded amount of memory.
#
# A network's body is run once; its head (the output matrix, and what an architecture does behind it) is run on parts of
# what the body said. What is small is run as a whole, with the same bits as ever.


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


BATCH = 32
"""Prompts that are continued at once."""


def continued(
    bench: Bench, prompts: Sequence[Sequence[int]], tokens: int, *, seed: int | None = None
) -> list[list[int]]:
    """Up to `tokens` tokens behind each prompt: the likeliest ones, or with a seed drawn from the whole distribution.

    Prompts are neither empty nor longer than the model's context; each has the room that the context leaves to it, whatever the
    others have. The end of a document is a token like any other: who reads what was written cuts there. Raises SuiteTimeout.
    """
    return begin("continued", bench, prompts, tokens, seed=seed)()


def begin(
    name: str,
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    seed: int | None = None,
    stops: Sequence[int] = (),
) -> Callable[[], list[list[int]]]:
    """Do this rank's share of the same; what is returned waits for the other ranks' and says it, or raises OnRankZero.

    Of the likeliest tokens no more are written once each prompt that is continued together has written one of `stops`.
    """
    rooms = [min(tokens, bench.context - len(prompt)) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    groups = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    most = [max(rooms[number] for number in group) for group in groups]
    chance = None if seed is None else Chance(seed, bench.model.config.vocab_size)

    def compute(unit: int) -> Arrays:
        generator = chance.behind([(len(groups[other]), most[other]) for other in range(unit)]) if chance else None
        return {"tokens": np.array(_continue(bench, [prompts[n] for n in groups[unit]], most[unit], generator, stops))}

    parts = bench.division.share(name, range(len(groups)), compute)

    def ended() -> list[list[int]]:
        results: list[list[int]] = [[] for _ in prompts]
        for group, part in zip(groups, parts.all(bench.check_time), strict=True):
            for number, row in zip(group, part["tokens"].tolist(), strict=True):
                results[number] = row[: rooms[number]]
        return results

    return ended


class Chance:
    """The one sequence of random numbers that all groups of prompts draw from, one behind the other, whoever continues which."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._generator, self._vocab_size, self._drawn = torch.Generator().manual_seed(seed), vocab_size, 0

    def behind(self, groups: Sequence[tuple[int, int]]) -> torch.Generator:
        """The generator as one rank by itself would have it after these groups, each of so many rows and tokens.

        Groups are asked for in their order; the caller draws the next one's.
        """
        for rows, tokens in groups[self._drawn :]:
            even = torch.ones(rows, self._vocab_size)
            for _ in range(tokens):
                torch.multinomial(even, 1, generator=self._generator)  # how much that draws depends on the shape alone
        self._drawn = len(groups) + 1
        return self._generator


@torch.inference_mode()
def _continue(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    chance: torch.Generator | None,
    stops: Sequence[int] = (),
) -> list[list[int]]:
    """Shorter prompts are padded on the left and masked there, so that all go on at the same place.

    What a row says beyond the model's context is of no use: its position is the last one.
    """
    longest = max(map(len, prompts))
    device = bench.model.device
    read = torch.tensor([[bench.eod_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    places, kept = (seen.cumsum(-1) - 1).clamp(min=0), None
    rows: list[Any] = [read[:, :0]]
    ended, ends = torch.zeros_like(read[:, 0], dtype=torch.bool), torch.tensor(stops, dtype=read.dtype, device=device)
    for _ in range(tokens):
        bench.check_time()
        logits, kept = next_logits(bench.model, read, attention_mask=seen, position_ids=places, past_key_values=kept)
        # Drawn on the CPU, wherever the logits are: one generator for all machines.
        read = (
            logits.argmax(-1, keepdim=True)
            if chance is None
            else torch.multinomial(torch.softmax(logits.cpu(), dim=-1), 1, generator=chance).to(logits.device)
        )
        seen = torch.cat((seen, torch.ones_like(read)), dim=1)
        places = (places[:, -1:] + 1).clamp(max=bench.context - 1)
        rows.append(read)
        ended |= torch.isin(read[:, 0], ends)
        if chance is None and ended.all():
            break
    written: list[list[int]] = torch.cat(rows, dim=1).tolist()
    return written


def before_end(tokens: Sequence[int], eod_id: int) -> list[int]:
    """What was written up to the end of the document."""
    ids = list(tokens)
    return ids[: ids.index(eod_id)] if eod_id in ids else ids
