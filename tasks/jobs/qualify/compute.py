"""How fast each rank multiplies matrices and moves memory, all at the same time: each core, each GPU in each number format.

2 n^3 operations a product of matrices of normal random numbers. GPUs multiply two sizes, for which one is faster depends on
the GPU, and the better one counts. How a rate is measured: bench.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch

from tasks.jobs.qualify.bench import Bench, Rate, Together, measure_windows, steady

# torch.cuda is ROCm's interface too, so what follows serves NVIDIA's and AMD's GPUs alike.


WARMUP_TIMES = 3
PCI_DEVICES = Path("/sys/bus/pci/devices")
Work = Callable[[int], Callable[[], object]]
"""Makes what is repeated on a device, whose number it is given."""


def own(bench: Bench) -> tuple[int, ...]:
    """The devices that this rank measures; together the ranks of a machine measure all that they see, each once."""
    count = torch.cuda.device_count()
    if count < bench.ranks_per_node:  # each rank sees its own alone, or they share some
        return (bench.local_rank % count,)
    return tuple(range(bench.local_rank, count, bench.ranks_per_node))


def names(devices: Sequence[int]) -> tuple[str, ...]:
    """As probes call them."""
    return tuple(f"GPU {device}" for device in devices)


def measure_all(devices: Sequence[int], work: Work, amount: float, seconds: float) -> tuple[Rate, ...]:
    """Amounts a second of work that amounts to so much, on some devices at the same time, a thread each."""
    with ThreadPoolExecutor(len(devices)) as pool:
        return tuple(pool.map(lambda device: measure_one(device, work, amount, seconds), devices))


def measure_one(device: int, work: Work, amount: float, seconds: float) -> Rate:
    """The average over all of the time, by the device's own clock (events), after a warm-up."""
    with torch.cuda.device(device):
        once = work(device)
        _milliseconds(once, WARMUP_TIMES)
        each = _milliseconds(once, WARMUP_TIMES) / WARMUP_TIMES / 1000
        times = max(WARMUP_TIMES, round(seconds / max(each, 1e-6)))
        rate = amount * times / (_milliseconds(once, times) / 1000)
    return Rate(rate, rate)


def _milliseconds(once: Callable[[], object], times: int) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(times):
        once()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


@contextmanager
def beside(device: int) -> Iterator[None]:
    """This thread on the cores of the device's own socket, so that memory made here lies there; where Linux names none, as is."""
    before, near = os.sched_getaffinity(0), cores_beside(device)
    try:
        if near & before:
            os.sched_setaffinity(0, near & before)
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_beside(device: int, root: Path = PCI_DEVICES) -> set[int]:
    """Cores that Linux names as near to a device (`local_cpulist`, as 0-23,48-71)."""
    output = torch.cuda.get_device_properties(device)
    address = [int(getattr(output, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")]
    try:
        text = (root / "{:04x}:{:02x}:{:02x}.0".format(*address) / "local_cpulist").read_text()
    except OSError:
        return set()
    return read_cores(text)


def read_cores(text: str) -> set[int]:
    """Linux's list of cores: 0-3,8 is 0, 1, 2, 3 and 8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


TERA = 1e12
GPU_SIZES = (8192, 16384)
FORMATS: dict[str, tuple[torch.dtype, str]] = {
    "matmul_fp32": (torch.float32, "highest"),
    "matmul_tf32": (torch.float32, "high"),
    "matmul_bf16": (torch.bfloat16, "highest"),
    "matmul_fp16": (torch.float16, "highest"),
}
"""A GPU's number formats, and torch's precision of float32 products: `high` is TF32."""
FP8 = "matmul_fp8"
TF32_FROM, FP8_FROM = (8, 0), (8, 9)
"""NVIDIA's compute capabilities: Ampere's and Ada's, Hopper's."""


def measure(bench: Bench) -> None:
    """Note `matmul_FORMAT` of this rank's core or of its GPUs, in TFLOP/s."""
    torch.set_num_threads(bench.threads)
    together = Together(bench, "compute")
    if bench.cuda:
        devices, seconds = own(together.bench), together.bench.config.seconds
        text = f"the better of {' and '.join(map(str, GPU_SIZES))}, all GPUs at the same time"
        for check in formats_of(devices[0]):
            rates = together.best(check, partial(_both_sizes, devices, check, seconds))
            together.note(check, "TFLOP/s", rates, where=names(devices), per=TERA, text=text)
        return
    outcome = together.best("matmul_fp32", lambda: [steady(_windows(bench.config.matmul_size, bench.config.seconds))])
    together.note("matmul_fp32", "TFLOP/s", outcome, where=(f"rank {bench.rank.rank}",), per=TERA)


def matmul_windows(size: int, seconds: float) -> list[Rate]:
    """GFLOP/s of float32 products of [size, size] matrices on the CPU, one average a window of about half a second."""
    return [Rate(rate / 1e9, on_core / 1e9) for rate, on_core in _windows(size, seconds)]


def _windows(size: int, seconds: float) -> list[Rate]:
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return measure_windows(lambda: torch.mm(left, right, out=out), 2.0 * size**3, seconds)


def formats_of(device: int) -> list[str]:
    """The formats that a GPU multiplies in hardware."""
    amd, capability = torch.version.hip is not None, torch.cuda.get_device_capability(device)
    without = {"matmul_tf32"} if amd or capability < TF32_FROM else set()
    without |= {"matmul_bf16"} if not amd and capability < TF32_FROM else set()
    fp8 = hasattr(torch, "_scaled_mm") and capability >= ((9, 4) if amd else FP8_FROM)
    return [check for check in FORMATS if check not in without] + ([FP8] if fp8 else [])


def _both_sizes(devices: Sequence[int], check: str, seconds: float) -> tuple[Rate, ...]:
    each = [
        measure_all(devices, partial(product_on, check, size), 2.0 * size**3, seconds / len(GPU_SIZES))
        for size in GPU_SIZES
    ]
    return tuple(map(max, *each))


def product_on(check: str, size: int, device: int) -> Callable[[], object]:
    """One product of [size, size] matrices on a GPU, to be repeated."""
    if check == FP8:
        # One scale a matrix, the product in bf16; torch wants the right matrix column by column.
        fp8 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
        left, right = (torch.randn(size, size, device=device).to(fp8) for _ in range(2))
        one = torch.ones((), device=device)
        columns = right.t()
        return lambda: torch._scaled_mm(
            left, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    dtype, precision = FORMATS[check]
    torch.set_float32_matmul_precision(precision)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


# Bytes are counted as STREAM counts them, read and written (McCalpin; www.cs.virginia.edu/stream/ref.html): a copy of
# N bytes moves 2 N, a triad (a = b + s c) 3 N; what a cache fetches before it writes does not count. Between two
# memories the N bytes that arrive count once, as in nvbandwidth. A GB/s is 10^9 bytes a second.


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


def measure_memory(bench: Bench) -> None:
    """Note `memory_bandwidth` of this rank or its GPUs; local rank 0 also what moves between the machine's memories."""
    torch.set_num_threads(bench.threads)
    together = Together(bench, "memory")
    if not bench.cuda:
        _on_cpu(together)
        return
    devices = own(bench)
    outcome = together.best(
        "memory_bandwidth", lambda: measure_all(devices, _copy_within, 2.0 * GPU_BYTES, bench.config.seconds)
    )
    text = f"copies of {GPU_BYTES >> 20} MiB, read and written bytes"
    together.note("memory_bandwidth", "GB/s", outcome, where=names(devices), per=GIGA, text=text)
    together.meet("before copies")
    if bench.local_rank == 0:
        # GPU by GPU and pair by pair, one at a time: what is measured is the way, not how many share the host's
        # memory.
        every = range(torch.cuda.device_count())
        seconds = min(together.bench.config.seconds, SHORT_SECONDS)
        for device in every:
            _note(together, "host_to_device", f"GPU {device}", partial(_with_host, device, True, seconds))
            _note(together, "device_to_host", f"GPU {device}", partial(_with_host, device, False, seconds))
        for one, two in itertools.combinations(every, 2):
            if torch.cuda.can_device_access_peer(one, two):
                _note(together, "peer_to_peer", f"GPU {one} and GPU {two}", partial(_with_peer, one, two))


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


def _note(together: Together, check: str, where: str, once: Callable[[], Rate]) -> None:
    together.note(check, "GB/s", together.repeated(lambda: (once(),)), where=(where,), per=GIGA)


def _with_host(device: int, to_device: bool, seconds: float) -> Rate:
    """Pinned memory of the GPU's own socket."""

    def work(device: int) -> Callable[[], object]:
        near, far = _pinned(device), torch.ones(HOST_BYTES // 4, device=device)
        source, target = (near, far) if to_device else (far, near)
        return lambda: target.copy_(source, non_blocking=True)

    with beside(device):
        return measure_one(device, work, HOST_BYTES, seconds)


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

    return min(measure_one(device, work, PEER_BYTES, PAIR_SECONDS) for device in (one, two))
