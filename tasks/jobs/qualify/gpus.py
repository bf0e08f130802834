"""A rank's GPUs: which are its own, how work on them is timed, which cores lie beside them. NVIDIA's and AMD's alike.

Everything here asks torch.cuda, which is ROCm's too. What is measured is in compute.py, memory.py and soak.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from tasks.jobs.qualify.bench import Bench
from tasks.jobs.qualify.rates import Rate

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
