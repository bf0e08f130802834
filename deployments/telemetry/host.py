"""The machine: CPU, memory, disk, network, GPUs. What is not there is not told: a missing figure is no zero.

psutil asks the kernel. GPUs are asked through `nvidia-smi`, which takes up to a second: it is started at one look and its answer
is taken at the next, so nothing waits for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from deployments.telemetry import instruments as of
from deployments.telemetry.instruments import Instrument, Point

MIB = 1024.0 * 1024.0
ASKED = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
FIGURES: tuple[tuple[Instrument, float], ...] = (
    (of.GPU, 0.01),
    (of.GPU_MEMORY, MIB),
    (of.GPU_LIMIT, MIB),
    (of.GPU_HEAT, 1.0),
    (of.GPU_POWER, 1.0),
)


class Host:
    """This machine. State: the CPU clock of the last look, which psutil keeps, and a question to nvidia-smi."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._smi: subprocess.Popen[str] | None = None
        psutil.cpu_percent()

    def look(self) -> list[Point]:
        """What the machine does now; CPU is the mean since the last look."""
        return [*self._cpu(), *self._room(), *self._traffic(), *self._gpus()]

    def _cpu(self) -> Iterator[Point]:
        yield Point(of.CPU, (), psutil.cpu_percent() / 100)
        yield Point(of.LOAD, (), os.getloadavg()[0])
        yield Point(of.CORES, (), float(psutil.cpu_count() or 1))

    def _room(self) -> Iterator[Point]:
        memory = psutil.virtual_memory()
        yield Point(of.MEMORY, ("used",), float(memory.total - memory.available))
        yield Point(of.MEMORY, ("available",), float(memory.available))
        disk = free_room(self.home)
        if disk:
            yield Point(of.DISK, ("used",), float(disk[1]))
            yield Point(of.DISK, ("free",), float(disk[0]))

    def _traffic(self) -> Iterator[Point]:
        """Containers without /proc/diskstats have no figures for disks."""
        disks = psutil.disk_io_counters()
        if disks:
            yield Point(of.DISK_IO, ("read",), float(disks.read_bytes))
            yield Point(of.DISK_IO, ("write",), float(disks.write_bytes))
        cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
        if cards:
            yield Point(of.NETWORK, ("receive",), float(sum(card.bytes_recv for card in cards)))
            yield Point(of.NETWORK, ("transmit",), float(sum(card.bytes_sent for card in cards)))

    def _gpus(self) -> list[Point]:
        """The answer to the last question, and the next question."""
        points: list[Point] = []
        if self._smi is not None:
            if self._smi.poll() is None:
                return points
            points = list(parse_smi(self._smi.communicate()[0])) if self._smi.returncode == 0 else []
            self._smi = None
        program = shutil.which("nvidia-smi")
        if program:
            asked = [program, f"--query-gpu={ASKED}", "--format=csv,noheader,nounits"]
            self._smi = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return points


def parse_smi(text: str) -> Iterator[Point]:
    """The figures of nvidia-smi's CSV. `[N/A]` and `[Not Supported]` are left out, as are lines of another shape."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(ASKED.split(",")):
            continue
        for (instrument, factor), cell in zip(FIGURES, cells[2:], strict=True):
            try:
                yield Point(instrument, (cells[0], cells[1]), float(cell) * factor)
            except ValueError:
                continue


def free_room(home: Path) -> tuple[int, int] | None:
    """Bytes free for us and bytes in use on the disk that holds a folder; None when it cannot be asked."""
    try:
        usage = shutil.disk_usage(home)
    except OSError:
        return None
    return usage.free, usage.used
