"""A network that is too large for one GPU, measured by ranks that each hold a share of every block (FSDP2).

A block is gathered while it computes, so its products are those of the whole network, bit for bit; embedding, last norm and
output matrix are whole on every rank. Nobody ever holds all blocks: the network is made without memory, and each rank reads its
own rows out of the safetensors. Ranks gather together, though each has its own batches: before every pass through the network's
body they agree that one is made, and who has nothing to compute makes an empty one. How training divides a network is
tasks/jobs/training/parallel.py.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tasks.jobs.checkpoint.pieces import piece_of
from tasks.jobs.checkpoint.weights import Weights, empty_network, replace_parameters
from tasks.jobs.training.parallel import BACKENDS, blocks

PATIENCE = timedelta(days=7)
"""Longest time that ranks wait for each other: while rank 0 runs what a model wrote, the others wait. When a rank is lost, the
launcher ends all of them sooner."""
POLL_SECONDS = 0.05


def meeting_place() -> tuple[str, int]:
    """Address and port where torchrun keeps the store of this job's ranks."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def open_group(device: torch.device, *, name: str, rank: int, world_size: int, place: tuple[str, int]) -> None:
    """Open the process group of the ranks, who find each other in the store at `place`; `name` tells several groups apart."""
    store = dist.PrefixStore(name, dist.TCPStore(*place, is_master=False, timeout=PATIENCE))
    backends = BACKENDS if device.type == "cuda" else "gloo"
    dist.init_process_group(backends, store=store, rank=rank, world_size=world_size, timeout=PATIENCE)


def fewest(free: int) -> int:
    """Of all ranks, the least of what each has."""
    least = torch.tensor(free)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least)


def load_sharded(checkpoint: Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of a folder, in evaluation mode, of whose blocks this rank holds its share.

    Raises ValueError for an architecture without blocks, and for weights under other names than the network's.
    """
    model = empty_network(checkpoint, dtype)
    if not (parts := blocks(model)):
        raise ValueError(
            f"{type(model).__name__} has no blocks that transformers names, so it cannot be divided over ranks: set "
            "cluster.evaluation.shard: never, and measure on a machine with a larger GPU"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in parts:
        fully_shard(block, mesh=mesh)
    replace_parameters(model, lambda parameter: torch.empty_like(parameter, device=device))
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    weights = Weights(checkpoint, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _read(parameter, name, weights)
    return model


def _read(parameter: Tensor, name: str, weights: Weights) -> None:
    """Copy this rank's part of a tensor out of its file."""
    piece = piece_of(parameter)
    saved = weights.slices(name, piece.shape)
    if piece.tensor.numel():
        rows = [slice(start, start + size) for start, size in zip(piece.offset, piece.tensor.shape, strict=True)]
        piece.tensor.copy_(saved[tuple(rows)])


class Lockstep:
    """Has all ranks make the passes through a network's body together."""

    def __init__(self, model: Any) -> None:
        self._model, self._empty = model, False
        model.base_model.register_forward_pre_hook(self._before)

    def _before(self, *_: Any) -> None:
        if not self._empty:
            self._agree(working=True)

    def idle(self) -> None:
        """While this rank waits for another one's results: take part in whatever the others compute."""
        working, _ = self._agree()
        self._pass(working)

    def meet(self) -> None:
        """Take part in what the others compute until all ranks have come to this call."""
        while True:
            working, arrived = self._agree(arrived=True)
            if not working and arrived == dist.get_world_size():
                return
            self._pass(working)

    def _agree(self, *, working: bool = False, arrived: bool = False) -> tuple[int, int]:
        """How many ranks are about to pass something through the body, and how many wait for all."""
        counts = torch.tensor([working, arrived], dtype=torch.int64)
        dist.all_reduce(counts)
        return int(counts[0]), int(counts[1])

    def _pass(self, working: int) -> None:
        if not working:
            time.sleep(POLL_SECONDS)
            return
        self._empty = True
        try:
            with torch.no_grad():
                self._model.base_model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._model.device))
        finally:
            self._empty = False
