"""A network that is too large for one GPU, measured by ranks that each hold a share of every block (FSDP2).

A block is gathered while it computes, so its products are those of the whole network, bit for bit; embedding, last norm and output
matrix are whole on every rank. Nobody ever holds all blocks: the network is made without memory, and each rank reads its own rows
out of the safetensors. Ranks gather together, though each has its own batches: before every pass through the network's body they
agree that one is made, and who has nothing to compute makes an empty one. How training divides a network is
tasks/jobs/training/parallel.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tasks.formats.model_folder import open_model_folder
from tasks.jobs.checkpoint.pieces import piece_of
from tasks.jobs.training.parallel import BACKENDS, blocks

PATIENCE = timedelta(days=7)
"""Longest time that ranks wait for each other: while rank 0 runs what a model wrote, the others wait. A rank that is lost ends all
of them sooner, by the launcher."""
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
    config = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if (checkpoint / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(checkpoint), local_files_only=True)
    model.requires_grad_(False).eval()
    if not (parts := blocks(model)):
        raise ValueError(
            f"{type(model).__name__} has no blocks that transformers names, so it cannot be divided over ranks: set "
            "cluster.evaluation.shard: never, and measure on a machine with a larger GPU"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in parts:
        fully_shard(block, mesh=mesh)
    _take_memory(model, device)
    with _weights(checkpoint) as files, torch.no_grad():
        for name, parameter in model.named_parameters():
            _read(parameter, files, names=(name, name.removeprefix(f"{model.base_model_prefix}.")), checkpoint=checkpoint)
    return model


def _take_memory(model: nn.Module, device: torch.device) -> None:
    """Memory for what has none, tied weights still tied; buffers, which have their values, go to the device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@contextmanager
def _weights(checkpoint: Path) -> Iterator[Mapping[str, Any]]:
    """The open file that each tensor lies in, by its name."""
    files = [safe_open(str(checkpoint / shard), "pt") for shard in open_model_folder(checkpoint).shards]
    yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _read(parameter: Tensor, files: Mapping[str, Any], *, names: tuple[str, ...], checkpoint: Path) -> None:
    """Copy this rank's part of a tensor out of its file."""
    name = next((each for each in names if each in files), "")
    saved = files[name].get_slice(name) if name else None
    piece = piece_of(parameter)
    if saved is None or tuple(saved.get_shape()) != piece.shape:
        raise ValueError(
            f"{checkpoint} has no tensor {names[0]} of shape {list(piece.shape)}, so its weights cannot be read in parts: save "
            "the model with `save_pretrained`, or set cluster.evaluation.shard: never"
        )
    if piece.tensor.numel():
        rows = [slice(start, start + size) for start, size in zip(piece.offset, piece.tensor.shape, strict=True)]
        piece.tensor.copy_(saved[tuple(rows)])


class Lockstep:
    """Has all ranks make the passes through a network's body together."""

    def __init__(self, model: Any) -> None:
        self._model, self._empty = model, False
        model.base_model.register_forward_pre_hook(lambda *_: None if self._empty else self._agree(working=True))

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

