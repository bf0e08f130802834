"""How fast memory moves: a rank's on the CPU, a GPU's own, between a GPU and its host, between two GPUs of a machine.

Bytes are counted as they are read and written, as STREAM does (McCalpin; www.cs.virginia.edu/stream/ref.html): a copy of N
bytes moves 2 N, a triad (a = b + s c) 3 N; what a cache fetches before it writes is not counted. Between two memories the N
bytes that arrive count once, as nvbandwidth has it. GB/s are 10^9 bytes a second. Collectives are elsewhere (collectives.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

from tasks.jobs.qualify import compute
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.rates import Rate, Together, measure_windows, steady

GIGA = 1e9
LEAST_ARRAY = 32 * 2**20
"""Where Linux does not tell the cache."""
CACHES = 4
"""STREAM's rule: each array at least so many times the last cache, here over all ranks of the machine."""
MOST_OF_MEMORY = 0.05
"""Share of the machine's memory that the arrays of all its ranks take."""
ARRAYS = 3
CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
GPU_BYTES, HOST_BYTES, PEER_BYTES = 2**30, 2**28, 2**29
SHORT_SECONDS = 0.5
"""Longest time of one GPU's copies to and from its host; there are many of them, one after another."""
PAIR_SECONDS = 0.1


def measure(bench: Bench) -> None:
    """Note `memory_bandwidth` of this rank or its GPUs; local rank 0 also what moves between the machine's memories."""
    torch.set_num_threads(bench.threads)
    together = Together(bench, "memory")
    if not bench.cuda:
        _on_cpu(together)
        return
    devices = compute.own(bench)
    outcome = together.best(
        "memory_bandwidth", lambda: compute.measure_all(devices, _copy_within, 2.0 * GPU_BYTES, bench.config.seconds)
    )
    text = f"copies of {GPU_BYTES >> 20} MiB, read and written bytes"
    together.note("memory_bandwidth", "GB/s", outcome, where=compute.names(devices), per=GIGA, text=text)
    together.meet("before copies")
    if bench.local_rank == 0:
        _between_memories(together)


def _on_cpu(together: Together) -> None:
    bench, size = together.bench, array_bytes(together.bench.ranks_per_node)
    copies: list[Rate] = []

    def once() -> list[Rate]:
        triad, copy = triad_and_copy(size, bench.config.seconds)
        copies.append(copy)
        return [triad]

    outcome = together.best("memory_bandwidth", once)
    copy = max((rate for rate, _ in copies), default=0.0) / GIGA
    text = (
        f"triad of arrays of {size >> 20} MiB, all ranks at the same time, read and written bytes; copy {copy:.4g} GB/s"
    )
    where = (f"rank {bench.rank.rank}",)
    # The ranks share the machine's memory: without the time that others had the core, their rates say nothing.
    together.note("memory_bandwidth", "GB/s", outcome, where=where, per=GIGA, text=text, compared=False)


def triad_and_copy(size: int, seconds: float) -> tuple[Rate, Rate]:
    """Bytes a second of both, on float32 arrays of so many bytes. The triad, which is what counts, gets half of the time."""
    one, two, three = (torch.ones(size // 4) for _ in range(ARRAYS))
    triad = measure_windows(lambda: torch.add(two, three, alpha=3.0, out=one), 3.0 * size, seconds / 2)
    return steady(triad), steady(measure_windows(lambda: one.copy_(two), 2.0 * size, seconds / 8))


def array_bytes(ranks: int, cache: Path = CACHE) -> int:
    """Size of one array of a rank where so many share the caches and the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = max(LEAST_ARRAY, CACHES * cache_bytes(cache) // ranks)
    return min(wanted, int(memory * MOST_OF_MEMORY / ARRAYS / ranks))


def cache_bytes(path: Path) -> int:
    """The last cache as Linux writes it, as 32768K; 0 where it does not."""
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text.removesuffix("K")) * 1024 if text.endswith("K") else 0


def _copy_within(device: int) -> Callable[[], object]:
    source = torch.ones(GPU_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _between_memories(together: Together) -> None:
    """GPU by GPU and pair by pair, one at a time: what is measured is the way, not how many share the host's memory."""
    devices = range(torch.cuda.device_count())
    seconds = min(together.bench.config.seconds, SHORT_SECONDS)
    for device in devices:
        _note(together, "host_to_device", f"GPU {device}", partial(_with_host, device, True, seconds))
        _note(together, "device_to_host", f"GPU {device}", partial(_with_host, device, False, seconds))
    for one, two in itertools.combinations(devices, 2):
        if torch.cuda.can_device_access_peer(one, two):
            _note(together, "peer_to_peer", f"GPU {one} and GPU {two}", partial(_with_peer, one, two))


def _note(together: Together, check: str, where: str, once: Callable[[], Rate]) -> None:
    together.note(check, "GB/s", together.repeated(lambda: (once(),)), where=(where,), per=GIGA)


def _with_host(device: int, to_device: bool, seconds: float) -> Rate:
    """Pinned memory of the GPU's own socket."""

    def work(device: int) -> Callable[[], object]:
        near, far = _pinned(device), torch.ones(HOST_BYTES // 4, device=device)
        source, target = (near, far) if to_device else (far, near)
        return lambda: target.copy_(source, non_blocking=True)

    with compute.beside(device):
        return compute.measure_one(device, work, HOST_BYTES, seconds)


@cache
def _pinned(device: int) -> torch.Tensor:
    """Kept for each device: torch hands freed pinned memory out again, and it lies on the socket that asked first."""
    return torch.ones(HOST_BYTES // 4, pin_memory=True)


def _with_peer(one: int, two: int) -> Rate:
    """The slower of the two directions."""

    def work(device: int) -> Callable[[], object]:
        source = torch.ones(PEER_BYTES // 4, device=device)
        target = torch.empty_like(source, device=two if device == one else one)
        return lambda: target.copy_(source, non_blocking=True)

    return min(compute.measure_one(device, work, PEER_BYTES, PAIR_SECONDS) for device in (one, two))
