"""The probe for silent data corruption: a machine that computes the same thing twice must get the same bits.

Every `safety.repeat_every_steps` each rank computes the gradient of a micro batch twice and compares the bits, and
replicas compare their weights. Neither touches training: no gradient is left, no random number drawn.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.jobs.data.samples import Batch
from tasks.jobs.node.runtime import Ended
from tasks.jobs.training.network import next_token_loss


def require_same_twice(network: nn.Module, batch: Batch, *, step: int) -> None:
    """Raise Ended, of the class `node`, when this rank's gradient is another one the second time."""
    first, second = _gradient(network, batch), _gradient(network, batch)
    differing = [name for name in first if first[name] != second[name]]
    if differing:
        raise _bad_machine(
            f"step {step}: the gradient of one batch, computed twice, differs in {len(differing)} of {len(first)} "
            f"tensors, first in {differing[0]}: this machine computes wrongly"
        )


def require_equal_replicas(network: nn.Module, *, step: int, group: Any) -> None:
    """Raise Ended when weights that must be equal on all ranks are not; who is in the minority is named."""
    mine = torch.tensor(bits(parameter.detach() for parameter in network.parameters()))
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    found = Counter(int(one) for one in every)
    if len(found) == 1:
        return
    (usual, count), *_ = found.most_common()
    odd = [rank for rank, one in enumerate(every) if int(one) != usual]
    said = f"step {step}: the weights of ranks {odd} are not those of the others"
    if 2 * count > len(every) and int(mine) != usual:
        raise _bad_machine(said)
    raise Ended(f"{said}: a machine computes wrongly", failure="infrastructure")


def _gradient(network: nn.Module, batch: Batch) -> dict[str, int]:
    """A sum over the bits of each gradient. Autograd is asked for the leaves alone, so no hook of DDP runs."""
    named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    with torch.random.fork_rng():
        loss = next_token_loss(network, *batch)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: bits([found]) for name, found in zip(named, gradients, strict=True) if found is not None}


def bits(tensors: Iterable[Tensor]) -> int:
    """The wrapping sum of all bytes taken as integers: any one flipped bit changes it."""
    total = 0
    for tensor in tensors:
        whole = torch.int32 if tensor.element_size() == 4 else torch.int16
        total += int(tensor.contiguous().view(-1).view(whole).sum(dtype=torch.int64))
    return total


def _bad_machine(what: str) -> Ended:
    name = os.environ.get("HEADWAY_NODE_NAME") or socket.gethostname()
    remedy = f"Have {name} checked: `headway qualify` measures it. Checkpoints since the last probe may hold its error."
    return Ended(what, failure="node", remedy=remedy, nodes=(name,))
