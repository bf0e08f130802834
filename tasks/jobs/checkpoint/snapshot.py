"""A rank's side of checkpoints: snapshot to memory, hand over to the writer, restore from shards.

The only stall is the copy into a buffer that the writer process shares; the buffer is a whole safetensors file, so that
the writer needs no tensor library. On disk: files.py. The writing: writer.py. Which one is gone on from:
choice.py. How parts of tensors are put together: pieces.py. See docs/DESIGN.md, "Checkpoint".

A rank's end of its writer process: one save in flight, and what became of it.

What the process does: writer.py. What it is given: a snapshot or a folder. A save
that fails is told and training goes on; how often it may is decided by all ranks together (training/checkpoints.py).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.common.errors import IntegrityError
from tasks.jobs.checkpoint.files import Manifest, place_of
from tasks.jobs.checkpoint.pieces import DTYPES, Piece, Saved, piece_of, read_into, shards_of
from tasks.jobs.checkpoint.writer import OWN, Writing
from tasks.jobs.node.elastic import newcomers_seed


class WriterProcess:
    """State: the process, whether a save is in flight, how the last one ended and how long it took."""

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.failure = ""
        """Why the last save failed; empty when it did not, or is still in flight."""
        self.seconds = 0.0
        """How long the last save took to be written; on rank 0: to be committed."""
        self._in_flight = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")))
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.jobs.checkpoint.writer", json.dumps(asdict(self.writing)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
            pass_fds=[self.writing.buffer] if self.writing.buffer >= 0 else [],
            process_group=0,  # torchrun signals a rank's whole group, and a rank that is asked to stop saves first
        )

    def busy(self) -> bool:
        """Whether the last save is still being written; on rank 0: not yet committed."""
        assert self._process.stdout
        if self._in_flight:
            # By poll: select knows no descriptor above 1023, and large jobs have as many sockets.
            poll = select.poll()
            poll.register(self._process.stdout, select.POLLIN)
            if poll.poll(0):
                self.wait()
        return bool(self._in_flight)

    def ask(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Have what is there now written."""
        assert self._process.stdin and not self._in_flight
        self.failure, self._in_flight = "", step
        request = {"step": step, "consumed_samples": consumed_samples, "local": local}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises OSError when a newer attempt has taken this job over."""
        assert self._process.stdout
        if not self._in_flight:
            return
        line = self._process.stdout.readline()
        if not line:
            self._died()
            return
        self._in_flight = 0
        answer = json.loads(line)
        self.seconds = answer["seconds"]
        if answer["errno"] == errno.ESTALE:
            raise OSError(errno.ESTALE, f"checkpoint of step {answer['step']} failed: {answer['error']}")
        if answer["errno"]:
            self.fail(f"checkpoint of step {answer['step']} failed: {answer['error']}")

    def fail(self, why: str) -> None:
        """The last save failed, here or in the process."""
        self.failure = why
        print(f"{why}; training continues", file=sys.stderr, flush=True)

    def _died(self) -> None:
        step, code = self._in_flight, self._process.wait()
        self._restart()
        rank = self.writing.rank
        self.fail(f"checkpoint of step {step} failed: the checkpoint writer of rank {rank} died with code {code}")

    def _restart(self) -> None:
        """A new process, with nothing in flight."""
        self._process.kill()
        self._process.communicate()
        self._in_flight, self._process = 0, self._start()

    def abandon(self) -> None:
        """Another rank failed: what is in flight will never be committed."""
        if self._in_flight:
            self._restart()

    def close(self) -> None:
        """Wait for the last save, then end the process."""
        self.wait()
        self._process.communicate()


# Checkpoints of engines that write their own files: in the same protocol, hashed, receipted, committed, verified before
# a load.
#
#     checkpoints/step-S/attempt-A/own/...     what the engine wrote; every rank sees the same folder
#
# Ranks write together; then each rank's writer process hashes its share of the files. Nothing here reads the files, and
# none is read before `verify` (files.py) went over all of them. No tensor library is needed.


class FolderSaver(WriterProcess):
    """A rank's checkpoints, of which the engine writes the files while training stands still; hashing goes on beside it."""

    def __init__(self, write: Callable[[Path], None], **writing: Any) -> None:
        """`write` puts this rank's files into a folder that all ranks share; `writing` are fields of Writing."""
        self._write = write
        super().__init__(Writing(**writing, own=True))

    def save(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Have the engine write, and its files hashed and committed; waits while a save is in flight.

        There is no tier of the machine's own disk: `local` must be False.

        What an engine cannot write, for a full disk as for any OSError, is a save that failed.
        """
        assert not local
        self.wait()
        folder = place_of(Path(self.writing.root), step, self.writing.attempt) / OWN
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write(folder)
        except OSError as error:
            self.fail(f"checkpoint of step {step} failed: {error}")
            return
        self.ask(step=step, consumed_samples=consumed_samples)


RNG = "rng.torch"
RNG_CUDA = "rng.cuda"
Pieces = Mapping[str, Piece]


def training_tensors(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Piece]:
    """This rank's part of all that training changes, by name: weights, AdamW's steps and moments. No copies.

    A base model's frozen weights are not among them: they are an input of training, with a version of their own.
    """
    pieces = {}
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        pieces[f"weight.{name}"] = piece_of(parameter)
        for key, value in optimizer.state[parameter].items():
            pieces[f"optimizer.{key}.{name}"] = piece_of(value)
    return pieces


def generators() -> dict[str, Piece]:
    """The state of this rank's random generators: of the CPU, and of its GPU."""
    states = {RNG: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[RNG_CUDA] = torch.cuda.get_rng_state()
    return {name: piece_of(state) for name, state in states.items()}


def restore(root: Path, result: Manifest, *, rank: int, pieces: Pieces) -> None:
    """Copy a checkpoint into this rank's `training_tensors`, and its generators' state into torch.

    As many ranks as there are now may differ from as many as wrote it. A rank that was not there when it was saved gets a seed of
    its own. Raises IntegrityError when it does not hold these tensors.
    """
    shards = list(shards_of(root, result))
    tensors = [[saved for saved in shard if not saved.name.startswith("rng.")] for shard in shards]
    read_into(pieces, tensors, where=str(place_of(root, result.step, result.attempt)))
    if rank < len(shards):
        set_generators(shards[rank])
    else:
        torch.manual_seed(newcomers_seed(int(result.identity["training"]["seed"]), result.step, rank))


def set_generators(shard: list[Saved]) -> None:
    """Give torch the states that a shard holds."""
    take_generators({saved.name: saved.rows(0, saved.shape[0]) for saved in shard if saved.name.startswith("rng.")})


def take_generators(states: Mapping[str, Tensor]) -> None:
    """Give torch these states of its generators, by name."""
    if RNG not in states:
        raise IntegrityError(
            "the shards do not hold the tensors of this run: the state of a random generator is not there"
        )
    torch.set_rng_state(states[RNG])
    if torch.cuda.is_available() and RNG_CUDA in states:
        torch.cuda.set_rng_state(states[RNG_CUDA])


class Snapshot:
    """Shared memory with the image of a safetensors file, which tensors of fixed names and shapes are copied into.

    The layout (safetensors format): 8 bytes little-endian length of the header; the header, JSON
    `{name: {dtype, shape, data_offsets: [begin, end]}}`, padded with spaces to a multiple of 8; then the raw data.
    """

    def __init__(self, pieces: Pieces) -> None:
        tensors = {name: piece.tensor for name, piece in pieces.items()}
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, Any] = {"__metadata__": {"pieces": json.dumps(_places(pieces))}}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].nbytes
            kind, shape = DTYPES[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.size = 8 + len(text) + end
        # A descriptor of memory without a name: it vanishes with the last process that has it, however that dies.
        if sys.platform == "linux":
            descriptor = os.memfd_create("headway-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, self.size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(self.descriptor, self.size)
        self._memory[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
        starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in order}
        self._places = {name: self._view(tensors[name], starts[name]) for name in order}
        self._on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if self._on_gpu:
            # Have the GPU's driver lock the memory, so that copies go at the bus's full rate and beside each other.
            start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(start, self.size, 0)))
        self.take(pieces)

    def _view(self, like: Tensor, offset: int) -> Tensor:
        count = math.prod(like.shape)
        return torch.frombuffer(self._memory, dtype=like.dtype, count=count, offset=offset).view(like.shape)

    def take(self, pieces: Pieces) -> None:
        """Copy the tensors as they are now."""
        for name, place in self._places.items():
            place.copy_(pieces[name].tensor, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back; nothing is in flight any more."""
        if self._on_gpu:
            start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(start)))
        self._places.clear()
        self._memory.close()
        os.close(self.descriptor)


def _places(pieces: Pieces) -> dict[str, dict[str, Any]]:
    """Of those that are a part of a tensor: where it begins, and the shape of the whole."""
    divided = {name: piece for name, piece in pieces.items() if piece.divided}
    return {name: {"offset": piece.offset, "shape": piece.shape} for name, piece in divided.items()}


class Saver(WriterProcess):
    """A rank's checkpoints: one buffer, one writer process, one save in flight."""

    def __init__(self, pieces: Callable[[], Pieces], **writing: Any) -> None:
        """`pieces` gives this rank's `training_tensors`; `writing` are fields of Writing, but for the buffer and its size.

        What is whole on all ranks, rank 0 saves.
        """
        self._pieces, self._first = pieces, writing["rank"] == 0
        self._snapshot = Snapshot(self._saved())
        super().__init__(Writing(buffer=self._snapshot.descriptor, size=self._snapshot.size, **writing))

    def _saved(self) -> dict[str, Piece]:
        own = {name: piece for name, piece in self._pieces().items() if self._first or piece.divided}
        return {**{name: piece for name, piece in own.items() if piece.tensor.numel()}, **generators()}

    def save(self, *, step: int, consumed_samples: int, local: bool = False) -> None:
        """Copy the tensors and this rank's generator state, and have them written; waits while a save is in flight.

        `local`: to this machine's own disk, as a checkpoint of this rank alone.
        """
        self.wait()
        self._snapshot.take(self._saved())
        self.ask(step=step, consumed_samples=consumed_samples, local=local)

    def close(self) -> None:
        """Wait for the last save, then end the process and give the memory back."""
        super().close()
        self._snapshot.close()
