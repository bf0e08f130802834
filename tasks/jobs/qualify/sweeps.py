"""A sweep of one collective by torch.distributed: the sizes, the time and the correctness of each, as nccl-tests measure.

algbw is size / time and busbw is algbw times the collective's factor; time is the mean over ranks of operations
one after another, without a barrier between them. Out of place and in place are measured apart. torch's all-reduce and
broadcast know no second buffer: out of place, the message was copied into one before the clock starts.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from torch import Tensor, cuda, distributed

from tasks.config.qualification import BenchmarkConfig, Collective
from tasks.formats.nccl_run import transports
from tasks.hardware.sku import Sku
from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import Row

# A communicator is used once: after a time-out nothing of it can be trusted. A rank is in one group at a time, so
# each is torch's default group, on a prefix of the launcher's store that is used once.


LOUD = {
    "NCCL_DEBUG": "INFO",
    "NCCL_DEBUG_SUBSYS": "INIT,NET",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""NCCL says which transports it uses, and waiting for a collective raises after the group's time limit: by default torch's
watchdog ends the process instead (docs.pytorch.org, torch_nccl_environment_variables)."""

STARTS = 20
"""Times the limit of one operation that a communicator may be open: NCCL's start has no limit, so the job would never end."""


class Communicator:
    """An open group of ranks."""

    def __init__(self, bench: Bench, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self.rank = self.ranks.index(bench.rank.rank)
        self.cuda = bench.cuda
        self.device = torch.device("cuda", _gpu(bench)) if bench.cuda else torch.device("cpu")

    def over_all(
        self, values: Sequence[float], how: distributed.ReduceOp.RedOpType = distributed.ReduceOp.SUM
    ) -> list[float]:
        """Values of all ranks, added up, or the largest of each."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(together, op=how)
        return [float(value) for value in together]


def backend(bench: Bench) -> str:
    """What communicates: nccl, rccl or gloo."""
    if not bench.cuda:
        return "gloo"
    return "rccl" if torch.version.hip else "nccl"


@contextmanager
def communicator(bench: Bench, name: str, ranks: Sequence[int], *, seconds: float) -> Iterator[Communicator]:
    """Open one over `ranks`, of which this is one. Each of its operations raises RuntimeError after `seconds`."""
    if bench.cuda:
        cuda.set_device(_gpu(bench))
        os.environ.update(LOUD, NCCL_DEBUG_FILE=str(_log(bench, bench.rank.rank)))
    # Wait for the others at the store. NCCL waits for ever for a rank that does not come to its start. Raises
    # RuntimeError.
    count = len(ranks)
    if bench.store.add(f"{name}/come", 1) == count:
        bench.store.set(f"{name}/all", "")
    bench.store.wait([f"{name}/all"], timedelta(seconds=seconds))
    overdue = threading.Timer(STARTS * seconds, os._exit, (1,))
    overdue.daemon = True
    overdue.start()
    try:
        distributed.init_process_group(
            "nccl" if bench.cuda else "gloo",
            store=distributed.PrefixStore(name, bench.store),
            rank=ranks.index(bench.rank.rank),
            world_size=len(ranks),
            timeout=timedelta(seconds=seconds),
        )
        yield Communicator(bench, ranks)
    except BaseException:
        # Without waiting for what still hangs in it. torch puts the count of default groups into their names, by
        # which ranks find each other, and starts anew only when one is destroyed: of one that did not come up it
        # would stay, and the next group's ranks would look for different names.
        if distributed.is_initialized():
            with suppress(RuntimeError):
                if bench.cuda:
                    distributed.distributed_c10d._abort_process_group()
                else:
                    distributed.destroy_process_group()
        distributed.distributed_c10d._world.group_count = 0
        raise
    finally:
        overdue.cancel()
    distributed.destroy_process_group()


def _gpu(bench: Bench) -> int:
    """The rank's GPU; where the scheduler shows each rank only its own, that is number 0."""
    return bench.local_rank % cuda.device_count()


class Transports:
    """What is used from now on by this machine's ranks. NCCL appends to one log a rank as long as the process lives."""

    def __init__(self, bench: Bench) -> None:
        self.cuda = bench.cuda
        mine = range(bench.node_rank * bench.ranks_per_node, (bench.node_rank + 1) * bench.ranks_per_node)
        self.began = {
            path: (path.stat().st_size if path.exists() else 0) for path in (_log(bench, rank) for rank in mine)
        }

    def used(self) -> tuple[str, ...]:
        """By NCCL's logs since the beginning; of gloo, TCP and the interface that it was told."""
        if not self.cuda:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            return (f"tcp/{interface}" if interface else "tcp",)
        return transports("\n".join(_since(path, began) for path, began in self.began.items()))


def _log(bench: Bench, rank: int) -> Path:
    return bench.rank.folder / "logs" / f"nccl-{rank}.log"


def _since(path: Path, began: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(began)
            return log.read().decode(errors="replace")
    except OSError:
        return ""


# Messages are float32. Element i of message k is (i + 31 k) mod 1021: sums over up to 16,000 ranks are exact, and a
# part that arrives in the wrong place or not at all shows, because every element is compared.


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


SMALLEST = 1024
ITERATIONS = 20
"""As nccl-tests do by default; fewer where the time is short."""
GPU_BYTES = 2**30
"""Largest message on GPUs whose file names none."""
QUICK_STEPS = (1024, 32, 1)
"""Of the largest message: a small, a middle and the largest one."""
BUFFERS = 2
"""A message is sent from one and arrives in another."""
GPU_SHARE = 0.9
CPU_SHARE = 0.5
"""Of the free memory that the buffers may have."""

LEAST_ON_GPUS = 10
"""Repetitions of what takes less than a second: waiting for NCCL polls, so that a single one is milliseconds too long."""


class TooLate(RuntimeError):
    """The sweep has used its time."""


@dataclass(frozen=True)
class Sweeping:
    """How a sweep is made."""

    sizes: tuple[int, ...]
    """In bytes, smallest first."""
    seconds: float
    """Of timed operations, in all."""
    limit: float
    """Longest time of all of it; a hanging operation is ended by the group's own limit."""


def sweeping(config: BenchmarkConfig, sku: Sku, *, gpu: bool, every_size: bool) -> Sweeping:
    """The sweep that config.depth asks for; pairs do with a few sizes in any depth."""
    limits = {limit.bytes for limit in sku.collectives}
    largest = max(limits, default=GPU_BYTES) if gpu else config.largest_megabytes * 1_000_000
    full = config.depth == "full"
    parts = (
        [2**k for k in range(int(math.log2(max(1, largest // SMALLEST))) + 1)] if full and every_size else QUICK_STEPS
    )
    sizes = {max(ELEMENT_BYTES, largest // part) for part in parts} | {size for size in limits if size <= largest}
    seconds = config.seconds if full and every_size else config.seconds / 2
    return Sweeping(tuple(sorted(sizes)), seconds, config.collective_seconds / 2)


def sweep(collective: Collective, how: Sweeping, comm: Communicator, bench: Bench) -> Iterator[Row]:
    """One row after another. Raises RuntimeError when an operation fails or hangs, TooLate when the time is over."""
    began = time.monotonic()
    # Bytes of the largest message for which every rank has memory.
    free = psutil.virtual_memory().available * CPU_SHARE / bench.ranks_per_node
    if comm.cuda:
        cuda.empty_cache()
        free = cuda.mem_get_info()[0] * GPU_SHARE
    largest = -comm.over_all([-free], distributed.ReduceOp.MAX)[0] / BUFFERS
    share = how.seconds / len(how.sizes) / (1 if collective in TWO_BUFFERS else 2)
    for size in how.sizes:
        elements = whole_elements(collective, size, comm.size)
        if elements * ELEMENT_BYTES > largest:
            print(f"# Reducing maxBytes below {size} due to memory limitation", flush=True)
            return
        places = (False,) if collective in TWO_BUFFERS else (False, True)
        measured = [_measure(prepare(collective, elements, comm, in_place=place), share, comm) for place in places]
        yield _row(collective, elements * ELEMENT_BYTES, comm.size, measured)
        elapsed = comm.over_all([time.monotonic() - began], distributed.ReduceOp.MAX)[0]
        if elapsed > how.limit and size != how.sizes[-1]:
            raise TooLate(f"timed out: {elapsed:.0f} s passed up to {size} bytes, the limit is {how.limit:.0f} s")


def whole_elements(collective: Collective, size: int, ranks: int) -> int:
    """Elements of a message of at least so many bytes, which all ranks can divide. nccl-tests take fewer, not more: then a limit
    for exactly this size would hold for nothing."""
    elements = math.ceil(size / ELEMENT_BYTES)
    return math.ceil(elements / ranks) * ranks if collective in DIVIDED else elements


def _measure(prepared: Prepared, seconds: float, comm: Communicator) -> tuple[float, int]:
    """Mean seconds of an operation over all ranks, and wrong elements of all ranks after the first one.

    An operation that needs more than its time is not done again: then the first one counts.
    """
    first = _timed(prepared, 1, comm)
    wrong = prepared.wrong()
    slowest = comm.over_all([first], distributed.ReduceOp.MAX)[0]
    least = LEAST_ON_GPUS if comm.cuda and slowest < 1.0 else 0
    if slowest < seconds or least:  # the first one sets connections up; it tells nothing of the next ones
        slowest = comm.over_all([_timed(prepared, 1, comm)], distributed.ReduceOp.MAX)[0]
    iterations = min(ITERATIONS, max(least, int(seconds / slowest)))
    mean = _timed(prepared, iterations, comm) if iterations else first
    total, wrongs = comm.over_all([mean, float(wrong)])
    return total / comm.size, round(wrongs)


def _timed(prepared: Prepared, iterations: int, comm: Communicator) -> float:
    """Seconds of one operation."""
    distributed.barrier()
    if comm.cuda:
        # By the GPU's clock. NCCL works on a stream of its own, which begins after what the current one has, and for
        # which the current one waits in wait(); operations are in order, so the last one's end is the end of all.
        cuda.synchronize()
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        works = [prepared.start() for _ in range(iterations)]
        for work in works[-1]:
            work.wait()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000 / iterations
    start = time.perf_counter()
    for _ in range(iterations):
        for work in prepared.start():
            work.wait()
    return (time.perf_counter() - start) / iterations


def _row(collective: Collective, size: int, ranks: int, measured: Sequence[tuple[float, int]]) -> Row:
    factor = bus_factor(collective, ranks)
    out, local = measured[0], measured[1] if len(measured) > 1 else None
    algbw = size / out[0] / 1e9
    result = Row(bytes=size, microseconds=out[0] * 1e6, algbw=algbw, busbw=algbw * factor, wrong=out[1])
    if local is None:
        return result
    algbw = size / local[0] / 1e9
    in_place = {"microseconds_in_place": local[0] * 1e6, "algbw_in_place": algbw, "busbw_in_place": algbw * factor}
    return result.model_copy(update={**in_place, "wrong_in_place": local[1]})
