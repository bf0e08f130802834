"""The program that measures a cluster: every rank's matmul rate at the same time, then the all-reduce between them.

Measures only: what is too slow is judged by the stage (tasks/benchmark.py) against tasks/hardware. One rank, or several
started by torchrun over gloo. See docs/qualification.md.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from tasks.config import BenchmarkConfig
from tasks.jobs.runtime import Rank, main
from tasks.process import write_json

WINDOW_SECONDS = 0.5
"""Longer than a scheduler's quota period (0.1 s), so that a throttled rank shows its average rate in every window."""
WARMUP_SECONDS = 0.2
SHORTEST_SHARE = 0.05
"""Of a window that must have been computed, or the two clocks disagree too much to say anything."""
PATTERN = 1024
"""Elements of the message repeat 0, 1, ... 1023, plus the rank: their sums are exact in float32."""


def run(rank: Rank) -> dict[str, Any]:
    """Measure; rank 0 writes `measurement.json` and returns the metrics and the measurement."""
    config = BenchmarkConfig(**rank.settings["benchmark"])
    torch.set_num_threads(rank.settings["threads"])
    with _process_group(rank):
        reports = _matmul_reports(rank, config)
        rank.progress(1, 2, "all-reduce")
        allreduce = _allreduce_report(rank, config)
    measurement = {"ranks": reports, "allreduce": allreduce}
    if rank.rank == 0:
        write_json(rank.output / "measurement.json", measurement)
    rank.progress(2, 2, "done")
    return {"metrics": _metrics(reports, allreduce), "measurement": measurement}


class Window(NamedTuple):
    """GFLOP/s in about half a second of products."""

    rate: float
    """By the clock: what a training step gets."""
    on_core: float
    """Without the time that the rank was ready and other work had its core: what the part itself does."""


def matmul_windows(size: int, seconds: float) -> list[Window]:
    """GFLOP/s of float32 products of [size, size] matrices, one average a window of about half a second.

    2 size^3 operations a product. A window that was stopped midway counts the time that it stood still, in both rates.
    """
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    _multiply_for(WARMUP_SECONDS, left, right, out)
    count = max(1, round(seconds / WINDOW_SECONDS))
    windows = []
    for _ in range(count):
        waited = _waited_for_a_core()
        products, elapsed = _multiply_for(seconds / count, left, right, out)
        computed = max(elapsed - (_waited_for_a_core() - waited), elapsed * SHORTEST_SHARE)
        operations = 2 * size**3 * products / 1e9
        windows.append(Window(rate=operations / elapsed, on_core=operations / computed))
    return windows


def allreduce_times(elements: int, seconds: float) -> tuple[list[float], bool]:
    """Seconds of each all-reduce of float32 [elements] over all ranks, and whether every sum was right.

    Ranks agree on the number of repetitions by the slowest one's first try, or they would wait for each other for ever.
    """
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    pattern = torch.arange(elements, dtype=torch.float32).remainder_(PATTERN)
    expected = pattern * ranks + ranks * (ranks - 1) / 2
    message = torch.empty_like(pattern)

    def once() -> tuple[float, bool]:
        torch.add(pattern, rank, out=message)
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(message)
        return time.perf_counter() - began, bool(torch.equal(message, expected))

    once()
    slowest = torch.tensor([once()[0]])
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    measured = [once() for _ in range(max(1, round(seconds / slowest.item())))]
    return [elapsed for elapsed, _ in measured], all(right for _, right in measured)


def _matmul_reports(rank: Rank, config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Every rank's report. When one is slower than its peers all measure again, and each rank's best round counts.

    Other work that comes and goes spares some round; throttling and a bad part spare none.
    """
    best = _gathered(rank, _matmul_report(rank, config))
    for _ in range(config.rounds - 1):
        if not _any_behind([report["on_core_gflops"] for report in best], config.min_of_peers):
            break
        again = _gathered(rank, _matmul_report(rank, config))
        best = [max(pair, key=lambda report: report["on_core_gflops"]) for pair in zip(best, again, strict=True)]
    return best


def _any_behind(rates: list[float], share: float) -> bool:
    """Whether a rank is slower than its share of the median of the others."""
    peers = [rates[:rank] + rates[rank + 1 :] for rank in range(len(rates))]
    return any(rate < share * statistics.median(others) for rate, others in zip(rates, peers, strict=True) if others)


def _matmul_report(rank: Rank, config: BenchmarkConfig) -> dict[str, Any]:
    if rank.world_size > 1:
        distributed.barrier()
    windows = matmul_windows(config.matmul_size, config.seconds)
    return {
        "rank": rank.rank,
        "host": socket.gethostname(),
        # A moment's disturbance spares some window; throttling spares none.
        "matmul_gflops": max(window.rate for window in windows),
        "on_core_gflops": max(window.on_core for window in windows),
        "windows": [window.rate for window in windows],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _waited_for_a_core() -> float:
    """Seconds that the main thread was ready to run and other work had its core, since it began.

    Second field of Linux's /proc/self/schedstat, in ns (Documentation/scheduler/sched-stats.rst); 0 where there is none.
    A stopped process is not ready, so what a throttled rank loses is not in it.
    """
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _multiply_for(seconds: float, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> tuple[int, float]:
    began, products = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds or not products:
        torch.mm(left, right, out=out)
        products += 1
    return products, elapsed


def _allreduce_report(rank: Rank, config: BenchmarkConfig) -> dict[str, Any]:
    """Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): bytes / time x 2 (n - 1) / n, so 0 for one rank."""
    report = {"megabytes": config.allreduce_megabytes, "gigabytes_per_second": 0.0, "correct": True}
    if rank.world_size == 1:
        return report
    times, correct = allreduce_times(config.allreduce_megabytes * 1_000_000 // 4, config.seconds)
    everyone = _gathered(rank, {"seconds": statistics.mean(times), "correct": correct})
    seconds = statistics.mean(one["seconds"] for one in everyone)
    algorithm = config.allreduce_megabytes / 1000 / seconds
    bus = algorithm * 2 * (rank.world_size - 1) / rank.world_size
    return {**report, "gigabytes_per_second": bus, "correct": all(one["correct"] for one in everyone)}


def _gathered(rank: Rank, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has to say, in the order of ranks, on every rank."""
    if rank.world_size == 1:
        return [mine]
    everyone: list[Any] = [None] * rank.world_size
    distributed.all_gather_object(everyone, mine)
    return everyone


def _metrics(reports: list[dict[str, Any]], allreduce: dict[str, Any]) -> dict[str, float]:
    rates = [report["matmul_gflops"] for report in reports]
    return {
        "matmul_gflops_per_rank": min(rates),
        "matmul_gflops_median": statistics.median(rates),
        "allreduce_gigabytes_per_second": allreduce["gigabytes_per_second"],
    }


@contextmanager
def _process_group(rank: Rank) -> Iterator[None]:
    if rank.world_size == 1:
        yield
        return
    distributed.init_process_group("gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(run))
