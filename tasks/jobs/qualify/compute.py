"""How fast each rank multiplies matrices, all at the same time: each core in fp32, each GPU in the number formats that it has.

2 n^3 operations a product of matrices of normal random numbers. GPUs multiply two sizes, for which one is faster depends on
the GPU, and the better one counts. How a rate is measured: rates.py, gpus.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tasks.jobs.qualify import gpus
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.rates import Rate, Together, measure_windows, steady

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
        _on_gpus(together)
        return
    outcome = together.best("matmul_fp32", lambda: [steady(_windows(bench.config.matmul_size, bench.config.seconds))])
    together.note("matmul_fp32", "TFLOP/s", outcome, where=(f"rank {bench.rank.rank}",), per=TERA)


def matmul_windows(size: int, seconds: float) -> list[Rate]:
    """GFLOP/s of float32 products of [size, size] matrices on the CPU, one average a window of about half a second."""
    return [Rate(rate / 1e9, on_core / 1e9) for rate, on_core in _windows(size, seconds)]


def _windows(size: int, seconds: float) -> list[Rate]:
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return measure_windows(lambda: torch.mm(left, right, out=out), 2.0 * size**3, seconds)


def _on_gpus(together: Together) -> None:
    devices, seconds = gpus.own(together.bench), together.bench.config.seconds
    text = f"the better of {' and '.join(map(str, GPU_SIZES))}, all GPUs at the same time"
    for check in formats_of(devices[0]):
        outcome = together.best(check, partial(_both_sizes, devices, check, seconds))
        together.note(check, "TFLOP/s", outcome, where=gpus.names(devices), per=TERA, text=text)


def formats_of(device: int) -> list[str]:
    """The formats that a GPU multiplies in hardware."""
    amd, capability = torch.version.hip is not None, torch.cuda.get_device_capability(device)
    without = {"matmul_tf32"} if amd or capability < TF32_FROM else set()
    without |= {"matmul_bf16"} if not amd and capability < TF32_FROM else set()
    fp8 = hasattr(torch, "_scaled_mm") and capability >= ((9, 4) if amd else FP8_FROM)
    return [check for check in FORMATS if check not in without] + ([FP8] if fp8 else [])


def _both_sizes(devices: Sequence[int], check: str, seconds: float) -> tuple[Rate, ...]:
    each = [
        gpus.measure_all(devices, partial(product_on, check, size), 2.0 * size**3, seconds / len(GPU_SIZES))
        for size in GPU_SIZES
    ]
    return tuple(map(max, *each))


def product_on(check: str, size: int, device: int) -> Callable[[], object]:
    """One product of [size, size] matrices on a GPU, to be repeated."""
    if check == FP8:
        return _fp8_product(size, device)
    dtype, precision = FORMATS[check]
    torch.set_float32_matmul_precision(precision)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _fp8_product(size: int, device: int) -> Callable[[], object]:
    """One scale a matrix, the product in bf16; torch wants the right matrix column by column."""
    fp8 = torch.float8_e4m3fnuz if torch.version.hip else torch.float8_e4m3fn
    left, right = (torch.randn(size, size, device=device).to(fp8) for _ in range(2))
    one = torch.ones((), device=device)
    columns = right.t()
    return lambda: torch._scaled_mm(
        left, columns, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
