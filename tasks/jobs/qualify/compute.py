"""How fast each rank multiplies matrices, all ranks at the same time.

Judged elsewhere. When a rank is slow against its peers all measure again, and each rank's best round counts: other work that
comes and goes spares some round; throttling and a bad part spare none.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from tasks.jobs.qualify.bench import Bench
from tasks.qualification.measured import Probe

WINDOW_SECONDS = 0.5
"""Longer than a scheduler's quota period (0.1 s), so that a throttled rank shows its average rate in every window."""
WARMUP_SECONDS = 0.2
SHORTEST_SHARE = 0.05
"""Of a window that must have been computed, or the two clocks disagree too much to say anything."""


class Window(NamedTuple):
    """GFLOP/s in about half a second of products."""

    rate: float
    """By the clock: what a training step gets."""
    on_core: float
    """Without the time that the rank was ready and other work had its core: what the part itself does."""


def measure(bench: Bench) -> None:
    """Note `matmul_fp32` of this rank, in TFLOP/s."""
    torch.set_num_threads(bench.threads)
    best: Window | None = None
    for number in range(bench.config.rounds):
        bench.share(f"compute/{number}/ready", True, seconds=bench.config.check_seconds)
        windows = matmul_windows(bench.config.matmul_size, bench.config.seconds)
        # A moment's disturbance spares some window; throttling spares none.
        now = Window(max(w.rate for w in windows), max(w.on_core for w in windows))
        best = now if best is None or now.on_core > best.on_core else best
        everyone = bench.share(f"compute/{number}/rate", best.on_core, seconds=bench.config.check_seconds)
        if not _any_behind(list(everyone.values()), bench.config.min_of_peers):
            break
    assert best
    where = f"rank {bench.rank.rank}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    bench.note(Probe(check="memory_gib", measured=memory, unit="GiB"))
    bench.note(
        Probe(check="matmul_fp32", measured=best.rate / 1000, unit="TFLOP/s", where=where, peers=best.on_core / 1000)
    )


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


def _any_behind(rates: list[float], share: float) -> bool:
    """Whether a rank is slower than its share of the median of the others."""
    peers = [rates[:rank] + rates[rank + 1 :] for rank in range(len(rates))]
    return any(rate < share * statistics.median(others) for rate, others in zip(rates, peers, strict=True) if others)


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
