"""A rank's side of checkpoints: snapshot to memory, hand over to the writer, find and restore the newest good one.

The only stall is the copy into a buffer that the writer process shares; the buffer is a whole safetensors file, so that
the writer needs no tensor library. On disk: checkpoint_files.py. The writing: checkpoint_writer.py. Collectives do not
live here: train.py makes the ranks agree. See docs/DESIGN.md, "Checkpoint".
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from tasks.errors import IntegrityError
from tasks.jobs.checkpoint_files import Manifest, manifests, place_of, quarantine, quarantined, verify
from tasks.jobs.checkpoint_writer import Writing
from tasks.jobs.elastic import newcomers_seed
from tasks.training_config import TrainingConfig

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
RNG = "rng.torch"


def identity(config: TrainingConfig, tokens: Mapping[str, Any], *, world_size: int | None) -> dict[str, Any]:
    """What a run must share with a checkpoint to go on from it; `world_size` is None for one whose ranks come and go."""
    fixed = {} if world_size is None else {"world_size": world_size}
    return {**fixed, "training": config.model_dump(mode="json"), "tokens": dict(tokens)}


def choose(root: Path, wanted: Mapping[str, Any]) -> Manifest | None:
    """The newest checkpoint whose every byte verifies; None when there never was one. What fails is quarantined.

    Raises IntegrityError when there are checkpoints and none is good, ValueError when the good one is of another run.
    """
    paths, reasons = manifests(root), []
    for path in paths:
        if reason := quarantined(path.parent):
            reasons.append(reason)
            continue
        try:
            found = verify(path)
        except IntegrityError as error:
            print(f"quarantined: {error}", file=sys.stderr, flush=True)
            quarantine(path.parent, str(error))
            reasons.append(str(error))
            continue
        _require_same(found.identity, wanted, where=path.parent)
        return found
    if paths or (root / "LATEST").exists():
        said = "; ".join(reasons) or "LATEST names one, but no manifest is left"
        raise IntegrityError(
            f"all checkpoints under {root} are bad: {said}",
            remedy=f"Restore one and delete its quarantined.json, or delete {root} to start from step 0.",
        )
    return None


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], *, where: Path) -> None:
    theirs, ours = dict(_flat(found)), dict(_flat(wanted))
    differing = [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]
    if differing:
        said = "; ".join(f"{key} is {theirs.get(key)!r} in the checkpoint, {ours.get(key)!r} now" for key in differing)
        raise ValueError(
            f"cannot go on from {where}: {said}. Take back the change, or train anew in another job folder"
        )


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def training_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that training changes, by name: weights, AdamW's steps and moments. The tensors themselves, no copies.

    A base model's frozen weights are not among them: they are an input of training, with a version of their own.
    """
    tensors = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"weight.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = value
    return tensors


def restore(root: Path, found: Manifest, *, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint into `training_tensors`, and this rank's generator state into torch.

    Weights and optimizer state are equal on all ranks under DDP, so rank 0's shard holds them for all. A rank that was not there
    when it was saved gets a seed of its own.
    """
    folder = place_of(root, found.step, found.attempt)
    shared = _load(folder, found.files[0])
    own = _load(folder, found.files[rank]) if 0 < rank < len(found.files) else shared
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in shared.items() if name != RNG} or RNG not in own:
        raise IntegrityError(
            f"the shards in {folder} do not hold the tensors of this network and optimizer",
            remedy="They were written by another release of Headway or of transformers: go on with that one.",
        )
    for name, tensor in tensors.items():
        tensor.copy_(shared[name])
    if rank < len(found.files):
        torch.set_rng_state(own[RNG])
    else:
        torch.manual_seed(newcomers_seed(int(found.identity["training"]["seed"]), found.step, rank))


def _load(folder: Path, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """The bytes that are hashed here are the bytes that are loaded, whatever happened since they were verified."""
    data = (folder / entry["path"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise IntegrityError(f"{folder / entry['path']} changed between verification and loading")
    return dict(load(data))


class Snapshot:
    """Shared memory with the image of a safetensors file, which tensors of fixed names and shapes are copied into.

    The layout (safetensors format): 8 bytes little-endian length of the header; the header, JSON
    `{name: {dtype, shape, data_offsets: [begin, end]}}`, padded with spaces to a multiple of 8; then the raw data.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, Any] = {}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].nbytes
            kind, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.size = 8 + len(text) + end
        self.descriptor = _anonymous_memory(self.size)
        self._memory = mmap.mmap(self.descriptor, self.size)
        self._memory[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
        starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in order}
        self._places = {name: self._view(tensors[name], starts[name]) for name in order}
        self.take(tensors)

    def _view(self, like: Tensor, offset: int) -> Tensor:
        count = math.prod(like.shape)
        return torch.frombuffer(self._memory, dtype=like.dtype, count=count, offset=offset).view(like.shape)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors as they are now."""
        for name, place in self._places.items():
            place.copy_(tensors[name])


def _anonymous_memory(size: int) -> int:
    """A descriptor of memory without a name: it vanishes with the last process that has it, however that dies."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("headway-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class Saver:
    """A rank's checkpoints: one buffer, one writer process, one save in flight.

    A save that fails raises OSError from the next call of any method: training does not go on without checkpoints.
    """

    def __init__(self, tensors: Mapping[str, Tensor], **writing: Any) -> None:
        """`writing` are the fields of `checkpoint_writer.Writing` but for the buffer and its size."""
        self._tensors = tensors
        self._snapshot = Snapshot({**tensors, RNG: torch.get_rng_state()})
        self._writing = Writing(buffer=self._snapshot.descriptor, size=self._snapshot.size, **writing)
        self._in_flight = False
        path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.checkpoint_writer", json.dumps(asdict(self._writing))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            pass_fds=[self._snapshot.descriptor],
            process_group=0,  # torchrun signals a rank's whole group, and a rank that is asked to stop saves first
        )

    def busy(self) -> bool:
        """Whether the last save is still being written; on rank 0: not yet committed."""
        assert self._process.stdout
        if self._in_flight and select.select([self._process.stdout], [], [], 0)[0]:
            self.wait()
        return self._in_flight

    def save(self, *, step: int, consumed_samples: int) -> None:
        """Copy the tensors and this rank's generator state, and have them written; waits while a save is in flight."""
        assert self._process.stdin
        self.wait()
        self._snapshot.take({**self._tensors, RNG: torch.get_rng_state()})
        self._process.stdin.write(json.dumps({"step": step, "consumed_samples": consumed_samples}).encode() + b"\n")
        self._process.stdin.flush()
        self._in_flight = True

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        assert self._process.stdout
        if not self._in_flight:
            return
        line = self._process.stdout.readline()
        if not line:
            raise OSError(f"the checkpoint writer of rank {self._writing.rank} died with code {self._process.wait()}")
        self._in_flight = False
        answer = json.loads(line)
        if answer["errno"]:
            raise OSError(answer["errno"], f"checkpoint of step {answer['step']} failed: {answer['error']}")

    def close(self) -> None:
        """Wait for the last save, then end the writer."""
        self.wait()
        self._process.communicate()
