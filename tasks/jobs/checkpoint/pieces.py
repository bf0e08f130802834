"""From the shards of a checkpoint to a rank's own pieces of tensors, however many ranks wrote it and will go on from it.

A shard is a safetensors file. Its header says where each tensor lies in it, and `pieces` of its metadata where a piece lies in
its whole tensor. A rank reads the blocks that hold what it needs, and checks those against the manifest as it reads them.
How shards are made is snapshot.py. Source of the format: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tasks.common.errors import IntegrityError
from tasks.jobs.checkpoint.files import BLOCK, Manifest, checked_block, place_of

# A rank's part of the tensors that a checkpoint holds: DDP has them whole, FSDP2 and tensor parallel in parts.
#
# How parts become files and files other parts is tasks/jobs/checkpoint/snapshot.py.


@dataclass(frozen=True)
class Piece:
    """One rank's part of one tensor."""

    tensor: Tensor
    """The rank's own memory, no copy: what is saved, and restored into."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins, a dimension each."""
    divided: bool = False
    """Whether ranks have different parts; else each has the whole."""


def piece_of(tensor: Tensor) -> Piece:
    """A tensor that is whole here, or this rank's part of a divided one."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    divided = any(size > 1 and not placement.is_replicate() for size, placement in sizes)
    return Piece(tensor.to_local().detach(), tuple(tensor.shape), tuple(offset), divided)


HEADER_BYTES = 100_000_000
"""Longest header that safetensors admits."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
TYPES = {name: dtype for dtype, name in DTYPES.items()}
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part of a tensor begins, and how long it is, a dimension each."""


class CheckedFile:
    """A file of a checkpoint; every byte that it gives was checked when it was read, not before."""

    def __init__(self, path: Path, entry: Mapping[str, Any]) -> None:
        self._path, self._entry, self._number, self._block = path, entry, -1, b""
        self._whole = b"" if "blocks" in entry else _whole(path, entry)

    def read(self, begin: int, end: int) -> bytearray:
        """Bytes from `begin` up to `end`. Raises IntegrityError when they are not those that were written."""
        if self._whole:
            return bytearray(self._whole[begin:end])
        result = bytearray()
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            first = number * BLOCK
            if number != self._number:
                with open(self._path, "rb") as file:
                    file.seek(number * BLOCK)
                    self._block = checked_block(file.read(BLOCK), self._entry, number, self._path)
                self._number = number
            result += self._block[max(begin - first, 0) : end - first]
        return result


def _whole(path: Path, entry: Mapping[str, Any]) -> bytes:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise IntegrityError(f"{path} changed between verification and loading")
    return data


@dataclass(frozen=True)
class Saved:
    """A piece as a shard holds it."""

    name: str
    file: CheckedFile
    dtype: torch.dtype
    begin: int
    """Its first byte in the file."""
    box: Box
    shape: tuple[int, ...]
    """Of the whole tensor."""

    def rows(self, first: int, last: int) -> Tensor:
        """Its rows of the first dimension; of a scalar, itself."""
        shape = self.box[1]
        if not shape:
            return torch.frombuffer(self.file.read(self.begin, self.begin + self.dtype.itemsize), dtype=self.dtype)[0]
        row = math.prod(shape[1:]) * self.dtype.itemsize
        data = self.file.read(self.begin + first * row, self.begin + last * row)
        return torch.frombuffer(data, dtype=self.dtype).view(last - first, *shape[1:])


def saved_in(path: Path, entry: Mapping[str, Any]) -> list[Saved]:
    """What a shard holds, in the order of its bytes. Raises IntegrityError for a header that is none."""
    file = CheckedFile(path, entry)
    length = int.from_bytes(file.read(0, 8), "little")
    if not 0 < length <= min(HEADER_BYTES, entry["size"] - 8):
        raise IntegrityError(f"{path} has a header of {length} bytes: it is not a safetensors file")
    try:
        header = json.loads(file.read(8, 8 + length))
        places = json.loads(header.pop("__metadata__", {}).get("pieces", "{}"))
        results = [_saved(name, value, file, 8 + length, places.get(name)) for name, value in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} has a header that is none: {error!r}") from error
    return sorted(results, key=lambda saved: saved.begin)


def _saved(
    name: str, output: Mapping[str, Any], file: CheckedFile, start: int, place: Mapping[str, Any] | None
) -> Saved:
    local = tuple(output["shape"])
    offset = tuple(place["offset"]) if place else (0,) * len(local)
    whole = tuple(place["shape"]) if place else local
    return Saved(name, file, TYPES[output["dtype"]], start + output["data_offsets"][0], (offset, local), whole)


def shards_of(root: Path, result: Manifest) -> Iterator[list[Saved]]:
    """What each shard of a checkpoint holds, in the order of the ranks that wrote them."""
    folder = place_of(root, result.step, result.attempt)
    for entry in result.files:
        if entry["path"].endswith(".safetensors") and "/" not in entry["path"]:
            yield saved_in(folder / entry["path"], entry)


def read_into(pieces: Mapping[str, Piece], shards: list[list[Saved]], *, where: str) -> None:
    """Copy what this rank needs of a checkpoint's tensors into its pieces.

    Raises IntegrityError when the shards do not hold these tensors whole, for example of another network.
    """
    shapes = {saved.name: saved.shape for shard in shards for saved in shard}
    if shapes != {name: piece.shape for name, piece in pieces.items()}:
        raise IntegrityError(
            f"the shards in {where} do not hold the tensors of this network and optimizer",
            remedy="They were written by another release of Headway or of transformers: continue with that one.",
        )
    left = {name: piece.tensor.numel() for name, piece in pieces.items()}
    done: set[tuple[str, Box]] = set()
    for saved in (saved for shard in shards for saved in shard):
        if (saved.name, saved.box) not in done:  # ranks that share matrices save the same piece
            done.add((saved.name, saved.box))
            left[saved.name] -= _copy(saved, pieces[saved.name])
    if lacking := [name for name, count in left.items() if count]:
        raise IntegrityError(f"the shards in {where} do not hold all of {lacking[0]}: a rank's part is not there")


def _copy(saved: Saved, piece: Piece) -> int:
    """Copy what a saved piece and a wanted one have in common; returns how many numbers that are."""
    offset, local = saved.box
    if not piece.shape:
        piece.tensor.copy_(saved.rows(0, 1))
        return 1
    starts = [max(a, b) for a, b in zip(offset, piece.offset, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(offset, local, piece.offset, piece.tensor.shape, strict=True)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return 0
    rows = saved.rows(starts[0] - offset[0], ends[0] - offset[0])
    theirs = [slice(s - o, e - o) for s, e, o in zip(starts[1:], ends[1:], offset[1:], strict=True)]
    ours = [slice(s - o, e - o) for s, e, o in zip(starts, ends, piece.offset, strict=True)]
    piece.tensor[tuple(ours)].copy_(rows[(slice(None), *theirs)])
    return math.prod(end - start for start, end in zip(starts, ends, strict=True))
