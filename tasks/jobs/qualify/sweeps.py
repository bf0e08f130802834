"""A sweep of one collective by torch.distributed: the sizes, the time and the correctness of each, as nccl-tests measure.

algbw is size / time and busbw is algbw times the collective's factor (operations.py); time is the mean over ranks of operations
one after another, without a barrier between them. Out of place and in place are measured apart. torch's all-reduce and
broadcast know no second buffer: out of place, the message was copied into one before the clock starts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import cuda, distributed

from tasks.common.names import Collective
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.groups import Communicator
from tasks.jobs.qualify.operations import DIVIDED, ELEMENT_BYTES, TWO_BUFFERS, Prepared, bus_factor, prepare
from tasks.qualification.measured import Row

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
    free = _free_gpu_bytes() * GPU_SHARE if comm.cuda else _free_bytes() * CPU_SHARE / bench.ranks_per_node
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


def _free_gpu_bytes() -> int:
    cuda.empty_cache()
    return cuda.mem_get_info()[0]


def _free_bytes() -> int:
    """Linux's MemAvailable (Documentation/filesystems/proc.rst): free memory, and what the cache of files would give up."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
        return _timed_on_gpu(prepared, iterations)
    began = time.perf_counter()
    for _ in range(iterations):
        for work in prepared.start():
            work.wait()
    return (time.perf_counter() - began) / iterations


def _timed_on_gpu(prepared: Prepared, iterations: int) -> float:
    """By the GPU's clock. NCCL works on a stream of its own, which begins after what the current one has, and for which the
    current one waits in wait(); operations are in order, so the last one's end is the end of all."""
    cuda.synchronize()
    began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    began.record()
    works = [prepared.start() for _ in range(iterations)]
    for work in works[-1]:
        work.wait()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000 / iterations


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
