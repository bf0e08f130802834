"""What training takes of the machine of rank 0: processors, memory, its GPU. Read every ten seconds, from counters of the OS.

The names are those that MLflow shows under "System metrics". Whether a machine is healthy is tasks/jobs/qualify and node.py.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

LOOK_SECONDS = 10.0
MEBI = 2**20
PROC = Path("/proc")


class MachineUse:
    """State: the counters at the last look."""

    def __init__(self, device: torch.device, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.device, self._clock = device, clock
        self._looked = clock()
        self._ticks, self._own = _processors(), _own_seconds()

    def look(self) -> dict[str, float]:
        """What was used since the last look; empty before ten seconds are over."""
        passed = self._clock() - self._looked
        if passed < LOOK_SECONDS:
            return {}
        ticks, own = _processors(), _own_seconds()
        found = {"cores_used": (own - self._own) / passed, **_memory(), **_gpu(self.device)}
        if ticks and self._ticks and (whole := ticks[1] - self._ticks[1]):
            found["system/cpu_utilization_percentage"] = 100 * (ticks[0] - self._ticks[0]) / whole
        self._looked, self._ticks, self._own = self._clock(), ticks, own
        return {name: round(value, 3) for name, value in found.items()}


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """The most that this rank had at once: of the machine's memory, and of its GPU's as torch's allocator counts it."""
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    found = {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        found["gpu_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def _processors() -> tuple[int, int] | None:
    """Busy ticks and all ticks of the machine (proc(5): user, nice, system, idle, iowait, irq, softirq, steal)."""
    try:
        line = (PROC / "stat").read_text().splitlines()[0]
    except OSError:
        return None
    ticks = [int(number) for number in line.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _own_seconds() -> float:
    used = os.times()
    return used.user + used.system


def _memory() -> dict[str, float]:
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    told = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    used = told["MemTotal"] - told["MemAvailable"]
    share = 100 * used / told["MemTotal"]
    return {"system/system_memory_usage_megabytes": used / 1024, "system/system_memory_usage_percentage": share}


def _gpu(device: torch.device) -> dict[str, float]:
    """Of the GPU of rank 0; its counters need NVIDIA's or AMD's Python package, and are left out without it."""
    if device.type != "cuda":
        return {}
    free, whole = torch.cuda.mem_get_info(device)
    name = f"system/gpu_{device.index or 0}"
    found = {f"{name}_memory_usage_megabytes": (whole - free) / MEBI}
    try:
        found[f"{name}_utilization_percentage"] = float(torch.cuda.utilization(device))
        found[f"{name}_power_usage_watts"] = torch.cuda.power_draw(device) / 1000
    except Exception:  # noqa: BLE001 NVML's errors have no common class here, and a counter is worth no training
        pass
    return found
