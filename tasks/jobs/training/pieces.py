"""A rank's part of the tensors that a checkpoint holds: DDP has them whole, FSDP2 and tensor parallel in parts.

How parts become files and files other parts is tasks/jobs/checkpoint/snapshot.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
