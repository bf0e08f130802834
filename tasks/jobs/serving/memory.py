"""Memory that this machine, or this container, would still give. See proc(5), and cgroup-v2.rst of Linux's documentation."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available(cgroup: Path = CGROUP) -> int:
    """Bytes: what Linux calls available, and no more than the container's limit leaves."""
    return min(_of_machine(), _of_container(cgroup))


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 once it has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _of_container(cgroup: Path) -> int:
    """Of cgroup v2: the limit less what cannot be given back; the cache of files can."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        payload = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(limit - used + int(payload.get("inactive_file", 0)), 0)
    except (OSError, ValueError):
        return 1 << 62
