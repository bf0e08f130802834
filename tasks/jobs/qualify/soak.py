"""Whether a machine holds its rate when it is hot: products of matrices for a minute or longer, on all ranks at the same time.

The drop is what the rate lost from the first to the last tenth; the rate itself is compute.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tasks.jobs.qualify import gpus, temperatures
from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.compute import GPU_SIZES, formats_of, matmul_windows, product_on
from tasks.jobs.qualify.rates import Outcome, Rate, Together, tried
from tasks.qualification.measured import Probe

PARTS = 10
HOTTEST_FIRST = ("matmul_bf16", "matmul_fp16", "matmul_fp32")


def measure(bench: Bench) -> None:
    """Note `soak_drop` of this rank's core or its GPUs; local rank 0 notes `temperature` too, the highest that it saw."""
    torch.set_num_threads(bench.threads)
    together = Together(bench, "soak")
    together.meet("ready")
    seconds = min(bench.config.soak_seconds, together.left) / PARTS
    tenths: list[Outcome] = []
    hottest: dict[str, float] = {}
    once, where = _work(bench, seconds)
    while len(tenths) < PARTS and together.left > 0:
        tenths.append(tried(once))
        if bench.local_rank == 0:
            now = temperatures.of_gpus() if bench.cuda else temperatures.of_zones()
            hottest = {part: max(degrees, hottest.get(part, degrees)) for part, degrees in now.items()}
    bench.note(*_drops(tenths, where, together.late), *_temperatures(bench, hottest))


def _work(bench: Bench, seconds: float) -> tuple[Callable[[], Sequence[Rate]], tuple[str, ...]]:
    """What is done in a tenth of the time, and the names of the parts whose rates it gives."""
    if not bench.cuda:
        size = bench.config.matmul_size
        return lambda: [_middle(matmul_windows(size, seconds))], (f"rank {bench.rank.rank}",)
    devices = gpus.own(bench)
    check = next(check for check in HOTTEST_FIRST if check in formats_of(devices[0]))
    work, amount = partial(product_on, check, GPU_SIZES[0]), 2.0 * GPU_SIZES[0] ** 3
    return lambda: gpus.measure_all(devices, work, amount, seconds), gpus.names(devices)


def _middle(windows: Sequence[Rate]) -> Rate:
    """The median window by its rate on the core: a tenth's best window would hide throttling that comes and goes."""
    return sorted(windows, key=lambda window: window.on_core)[len(windows) // 2]


def _drops(tenths: Sequence[Outcome], where: Sequence[str], late: str) -> list[Probe]:
    failed = next((tenth for tenth in tenths if not tenth.rates), None)
    if failed or len(tenths) < PARTS:
        status, said = (failed.status, failed.said) if failed else ("timed out", late)
        return [Probe(check="soak_drop", status=status, said=said)]
    found = []
    for number, part in enumerate(where):
        rates = [tenth.rates[number].on_core for tenth in tenths]
        unknown = [tenth for tenth, rate in enumerate(rates, start=1) if not rate]
        if unknown:  # the rank had its core for less than the clock can tell
            said = f"the rate of tenth {unknown[0]} of {PARTS} is unknown: other work had the core all the time"
            found.append(Probe(check="soak_drop", status="failed", where=part, said=said))
        else:
            found.append(_drop(part, rates))
    return found


def _drop(part: str, rates: Sequence[float]) -> Probe:
    said = "rate of each tenth against the first: " + ", ".join(f"{rate / rates[0]:.3f}" for rate in rates)
    return Probe(check="soak_drop", measured=1 - rates[-1] / rates[0], where=part, said=said)


def _temperatures(bench: Bench, hottest: dict[str, float]) -> list[Probe]:
    if bench.cuda and bench.local_rank == 0 and not hottest:
        said = "neither nvidia-smi nor rocm-smi says one"
        return [Probe(check="temperature", status="missing", unit="C", said=said)]
    return [
        Probe(check="temperature", measured=degrees, unit="C", where=part) for part, degrees in sorted(hottest.items())
    ]
