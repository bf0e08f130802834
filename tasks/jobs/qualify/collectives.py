"""Collectives over all ranks, in nccl-tests' terms: size, algbw, busbw, wrong elements."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
from torch import distributed

from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import Row, Sweep

PATTERN = 1024
"""Elements of the message repeat 0, 1, ... 1023, plus the rank: their sums are exact in float32."""


def measure(bench: Bench) -> None:
    """Write the sweep of the all-reduce over all ranks, where there are several."""
    if bench.world_size == 1:
        return
    names = bench.share("collectives/nodes", bench.node, seconds=bench.config.check_seconds)
    distributed.init_process_group(
        "gloo",
        store=bench.store,
        rank=bench.rank.rank,
        world_size=bench.world_size,
        timeout=timedelta(seconds=bench.config.collective_seconds),
    )
    try:
        row = all_reduce_row(bench.config.largest_megabytes * 1_000_000, bench.config.seconds)
    finally:
        distributed.destroy_process_group()
    if bench.rank.rank == 0:
        nodes = tuple(dict.fromkeys(names.values()))
        bench.sweep(
            Sweep(
                collective="all_reduce",
                scope="all",
                nodes=nodes,
                ranks=bench.world_size,
                backend="gloo",
                tool=f"torch {torch.__version__}",
                rows=(row,),
            )
        )


def all_reduce_row(size: int, seconds: float) -> Row:
    """One size in bytes; bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): bytes / time x 2 (n - 1) / n."""
    ranks = distributed.get_world_size()
    times, wrong = all_reduce_times(size // 4, seconds)
    totals = torch.tensor([statistics.mean(times), float(wrong)], dtype=torch.float64)
    distributed.all_reduce(totals)
    mean = totals[0].item() / ranks
    algbw = size / mean / 1e9
    return Row(
        bytes=size,
        microseconds=mean * 1e6,
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        wrong=round(totals[1].item()),
    )


def all_reduce_times(elements: int, seconds: float) -> tuple[list[float], int]:
    """Seconds of each all-reduce of float32 [elements] over all ranks, and how many elements were wrong.

    Ranks agree on the number of repetitions by the slowest one's first try, or they would wait for each other for ever.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    pattern = torch.arange(elements, dtype=torch.float32).remainder_(PATTERN)
    expected = pattern * ranks + ranks * (ranks - 1) / 2
    message = torch.empty_like(pattern)

    def once() -> tuple[float, int]:
        torch.add(pattern, rank, out=message)
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(message)
        return time.perf_counter() - began, int((message != expected).sum())

    once()
    slowest = torch.tensor([once()[0]])
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    measured = [once() for _ in range(max(1, round(seconds / slowest.item())))]
    return [elapsed for elapsed, _ in measured], sum(wrong for _, wrong in measured)
