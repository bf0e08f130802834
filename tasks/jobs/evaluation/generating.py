"""What a model writes: greedily or by chance, several prompts at once, with the keys and values of what was read kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tasks.jobs.evaluation.logits import next_logits
from tasks.jobs.evaluation.suites import Bench

BATCH = 32
"""Prompts that are continued at once."""


def continued(
    bench: Bench, prompts: Sequence[Sequence[int]], tokens: int, *, seed: int | None = None
) -> list[list[int]]:
    """Up to `tokens` tokens behind each prompt: the likeliest ones, or with a seed drawn from the whole distribution.

    Prompts are neither empty nor longer than the model's context; each has the room that the context leaves to it, whatever the
    others have. The end of a document is a token like any other: who reads what was written cuts there. Raises SuiteTimeout.
    """
    rooms = [min(tokens, bench.context - len(prompt)) for prompt in prompts]
    chance = None if seed is None else torch.Generator().manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda number: (len(prompts[number]), number))
    results: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), BATCH):
        group = order[start : start + BATCH]
        most = max(rooms[number] for number in group)
        written = _continue(bench, [prompts[number] for number in group], most, chance)
        for number, row in zip(group, written, strict=True):
            results[number] = row[: rooms[number]]
    return results


@torch.inference_mode()
def _continue(
    bench: Bench, prompts: Sequence[Sequence[int]], tokens: int, chance: torch.Generator | None
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
    for _ in range(tokens):
        bench.check_time()
        logits, kept = next_logits(bench.model, read, attention_mask=seen, position_ids=places, past_key_values=kept)
        read = logits.argmax(-1, keepdim=True) if chance is None else _drawn(logits, chance)
        seen = torch.cat((seen, torch.ones_like(read)), dim=1)
        places = (places[:, -1:] + 1).clamp(max=bench.context - 1)
        rows.append(read)
    written: list[list[int]] = torch.cat(rows, dim=1).tolist()
    return written


def _drawn(logits: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Drawn on the CPU, wherever the logits are: one generator for all machines."""
    return torch.multinomial(torch.softmax(logits.cpu(), dim=-1), 1, generator=chance).to(logits.device)


def before_end(tokens: Sequence[int], eod_id: int) -> list[int]:
    """What was written up to the end of the document."""
    ids = list(tokens)
    return ids[: ids.index(eod_id)] if eod_id in ids else ids
