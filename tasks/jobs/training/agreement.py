"""What ranks tell each other beside gradients: one collective a step, and rank 0's word at a start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

REASONS = ("signal", "notice", "limit")
"""Why ranks stop although they are not done: SIGTERM; the machine is about to be taken; max_hours or max_cost."""


@dataclass(frozen=True)
class Word:
    """What all ranks know after a step."""

    loss: float
    """Mean over ranks."""
    samples: float
    """Fingerprint of the global batch, of an elastic run."""
    reasons: tuple[str, ...]
    """Why at least one rank wants to stop, of REASONS."""
    seconds: tuple[float, ...]
    """By rank: its own part of the step, before it waited for others."""


def exchange(*, loss: torch.Tensor, samples: float, asked: tuple[bool, ...], seconds: float, group: Any) -> Word:
    """Each rank gives its own and gets everybody's, in one collective."""
    ranks, first = dist.get_world_size(group), 2 + len(REASONS)
    payload = torch.zeros(first + ranks, dtype=torch.float64)
    payload[0], payload[1], payload[first + dist.get_rank(group)] = loss, samples, seconds
    payload[2:first] = torch.tensor(asked, dtype=torch.float64)
    dist.all_reduce(payload, group=group)
    total, fingerprint, *rest = payload.tolist()
    reasons = tuple(name for name, count in zip(REASONS, rest, strict=False) if count)
    return Word(total / ranks, fingerprint, reasons, tuple(rest[len(REASONS) :]))


def told_by_rank_0(value: Any, group: Any) -> Any:
    """Rank 0's value on every rank, as JSON; the others' own is not looked at."""
    text = bytearray(json.dumps(value).encode() if dist.get_rank() == 0 else b"")
    size = torch.tensor(len(text))
    dist.broadcast(size, src=0, group=group)
    data = torch.frombuffer(text or bytearray(int(size)), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return json.loads(data.numpy().tobytes())


def all_agree(fine: bool, group: Any) -> bool:
    """Whether it is so on every rank."""
    word = torch.tensor(int(fine))
    dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
    return bool(word)
