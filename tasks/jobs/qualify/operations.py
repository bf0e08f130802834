"""The six collectives: what is sent, what must arrive, and how bus bandwidth follows from time. Timing is sweeps.py's.

Messages are float32. Element i of the message k is (i + 31 k) mod 1021: sums over up to 16,000 ranks are exact, a part that
arrives in the wrong place or not at all is seen, and every element is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from tasks.common.names import Collective
from tasks.jobs.qualify.groups import Communicator

PERIOD = 1021
SHIFT = 31
ELEMENT_BYTES = 4
CHECKED_ELEMENTS = PERIOD * 16_384
"""Compared at once: the comparison must not need as much memory as the message."""
NOTHING = -1.0
"""Stands where something must arrive."""
TWO_BUFFERS: tuple[Collective, ...] = ("alltoall", "sendrecv")
"""They have no form in place, and nccl-tests check none."""
DIVIDED: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "alltoall")
"""Their size is the whole buffer, of which each rank holds a part; the others' is one rank's message."""
REDUCED: tuple[Collective, ...] = ("all_reduce", "reduce_scatter")


def bus_factor(collective: Collective, ranks: int) -> float:
    """busbw / algbw, by NVIDIA/nccl-tests doc/PERFORMANCE.md."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in DIVIDED else 1.0


@dataclass(frozen=True)
class Prepared:
    """Buffers with an operation on them."""

    start: Callable[[], list[distributed.Work]]
    """Start it once; what was started must be waited for."""
    wrong: Callable[[], int]
    """Elements that are not what must have arrived after the first time; later ones add sums to sums."""


def prepare(collective: Collective, elements: int, comm: Communicator, *, in_place: bool) -> Prepared:
    """`elements`: of the whole buffer, a multiple of the ranks for the divided ones."""
    return _PREPARE[collective](elements, comm, in_place)


def _all_reduce(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    message = _filled(elements, comm, comm.rank)
    buffer = message if in_place else message.clone()
    return Prepared(
        lambda: _works(distributed.all_reduce(buffer, async_op=True)), lambda: wrong_elements(buffer, _sums(comm.size))
    )


def _broadcast(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    """From rank 0."""
    message = _filled(elements, comm, 0) if comm.rank == 0 else torch.full((elements,), NOTHING, device=comm.device)
    buffer = message if in_place else message.clone()
    return Prepared(
        lambda: _works(distributed.broadcast(buffer, src=0, async_op=True)), lambda: wrong_elements(buffer, pattern(0))
    )


def _all_gather(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    buffer, part = torch.full((elements,), NOTHING, device=comm.device), elements // comm.size
    mine = buffer.view(comm.size, part)[comm.rank] if in_place else torch.empty(part, device=comm.device)
    fill(mine, pattern(comm.rank))
    return Prepared(
        lambda: _works(distributed.all_gather_single(buffer, mine, async_op=True)),
        lambda: sum(wrong_elements(part, pattern(k)) for k, part in enumerate(buffer.view(comm.size, part))),
    )


def _reduce_scatter(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    message, part = _filled(elements, comm, comm.rank), elements // comm.size
    mine = message.view(comm.size, part)[comm.rank] if in_place else torch.full((part,), NOTHING, device=comm.device)
    expected = _sums(comm.size).roll(-(comm.rank * part % PERIOD))
    return Prepared(
        lambda: _works(distributed.reduce_scatter_single(mine, message, async_op=True)),
        lambda: wrong_elements(mine, expected),
    )


def _alltoall(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    """What rank k sends to rank m is message k + m x ranks."""
    message = torch.empty(elements, device=comm.device)
    buffer = torch.full_like(message, NOTHING)
    for peer, part in enumerate(message.view(comm.size, -1)):
        fill(part, pattern(comm.rank + peer * comm.size))
    return Prepared(
        lambda: _works(distributed.all_to_all_single(buffer, message, async_op=True)),
        lambda: sum(
            wrong_elements(part, pattern(peer + comm.rank * comm.size))
            for peer, part in enumerate(buffer.view(comm.size, -1))
        ),
    )


def _sendrecv(elements: int, comm: Communicator, in_place: bool) -> Prepared:
    """Every rank sends to the next one, all at the same time."""
    message, buffer = _filled(elements, comm, comm.rank), torch.full((elements,), NOTHING, device=comm.device)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    both = [distributed.P2POp(distributed.isend, message, after), distributed.P2POp(distributed.irecv, buffer, before)]
    return Prepared(lambda: distributed.batch_isend_irecv(both), lambda: wrong_elements(buffer, pattern(before)))


_PREPARE: dict[Collective, Callable[[int, Communicator, bool], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "broadcast": _broadcast,
    "sendrecv": _sendrecv,
}


def pattern(number: int) -> Tensor:
    """One period of the message of a number."""
    return ((torch.arange(PERIOD) + SHIFT * number) % PERIOD).to(torch.float32)


def fill(buffer: Tensor, period: Tensor) -> None:
    """Write a period over and over."""
    whole = buffer.numel() // PERIOD * PERIOD
    period = period.to(buffer.device)
    buffer[:whole].view(-1, PERIOD).copy_(period.expand(whole // PERIOD, PERIOD))
    buffer[whole:] = period[: buffer.numel() - whole]


def wrong_elements(buffer: Tensor, period: Tensor) -> int:
    """Elements of a buffer that are not the period, over and over. What is not a number is wrong."""
    whole, period = buffer.numel() // PERIOD * PERIOD, period.to(buffer.device)
    rows = (chunk.view(-1, PERIOD) != period for chunk in buffer[:whole].split(CHECKED_ELEMENTS))
    return sum(int(row.sum()) for row in rows) + int((buffer[whole:] != period[: buffer.numel() - whole]).sum())


def _filled(elements: int, comm: Communicator, number: int) -> Tensor:
    buffer = torch.empty(elements, device=comm.device)
    fill(buffer, pattern(number))
    return buffer


def _sums(ranks: int) -> Tensor:
    return torch.stack([pattern(rank) for rank in range(ranks)]).sum(dim=0)


def _works(work: distributed.Work | None) -> list[distributed.Work]:
    assert work is not None, "this rank is not in the group"
    return [work]
