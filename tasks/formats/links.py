"""What /sys says of a machine's network: rate of an InfiniBand port, the virtual function behind an Azure interface.

Pure: who reads the files is tasks/jobs/qualify/health.py. State and counters of a port are gpu_health.port_of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RATE = re.compile(r"^\s*(\d+(?:\.\d+)?) Gb/sec")
DAY = 86400.0
SYNTHETIC = "hv_netvsc"
"""Driver of an interface that Hyper-V gives; all traffic goes through it where no virtual function is behind it."""


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    driver: str
    address: str
    state: str
    """operstate: up, down, unknown."""


def rate(text: str) -> float | None:
    """Gbit/s of a port, as its file `rate` has it: 400 Gb/sec (4X NDR)."""
    match = RATE.match(text)
    return float(match[1]) if match else None


def per_day(downed: int, uptime: float) -> float:
    """Times in 24 hours that a link went down, of a counter that began at the machine's start."""
    return downed * DAY / max(uptime, DAY)


def behind(interfaces: list[Interface]) -> list[tuple[Interface, Interface | None]]:
    """Each interface of Hyper-V with its virtual function: the other interface of its address (accelerated networking)."""
    synthetic = [one for one in interfaces if one.driver == SYNTHETIC]
    others = {one.address: one for one in interfaces if one.driver and one.driver != SYNTHETIC}
    return [(one, others.get(one.address)) for one in synthetic]
