"""Logs of Azure's node health checks (AzNHC): of one machine, and summaries of many. Pure.

The forms are those of Azure/azurehpc-health-checks @0e0a1ac: run-health-checks.sh, dockerfile/aznhc-entrypoint.sh, customTests
and distributed_nhc. A log is written on at each run: there may be several runs of one machine in it. Nothing is raised. What
a fault code means is data: tasks/hardware/aznhc.json; what it means for the machine is tasks/qualification/aznhc_findings.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["passed", "warned", "failed"]
CHECK = re.compile(r"\b(check_\w+)")
CODE = re.compile(r"[Ff]au\w{1,2}e?[Cc]ode:\s*(NHC\w+)")
"""FaultCode, and the spellings faultCode and FauleCode that are there too."""
_META = re.compile(r"-+ VM Meta Data -+")
_FIELDS = {
    "VM NAME": "vm",
    "COMPUTER NAME": "computer",
    "VM HOST NAME": "host",
    "VM ID": "vm_id",
    "VM SKU": "sku",
    "PHYSICAL HOST NAME": "physical_host",
    "Kernel Version": "kernel",
}
_FIELD = re.compile(rf"^\s*({'|'.join(_FIELDS)}):\s*(.*?)\s*$")
_RESULT = re.compile(
    r"(?:SUCCESS:\s+\S+:\s+Health check (passed)|ERROR:\s+\S+:\s+Health check (failed)"
    r"|WARNING:\s+\S+:\s+(Nearing) a failure threshold):\s*(.*)"
)
_THROTTLED = re.compile(r"Warning: GPU (\d+) throttled, reason=(0x[0-9a-fA-F]+)")
_EXIT = re.compile(r"Health checks completed with exit code:\s*(-?\d{1,9})")
_UNSUPPORTED = re.compile(r"The vm SKU '([^']*)' is currently not supported by Azure health checks")
_DISTRIBUTED = re.compile(r"^\s*([A-Za-z0-9][\w.-]*)\s+\|\s*(.*?)\s*$")
_LABEL = re.compile(r"^(\s*\d{1,6}: |\[\d+,\d+\](?:<\w+>)?:\s?|\[pod/[^\]\s]+\]\s)")
"""What srun --label, mpirun and kubectl write first."""
_NO_RESULTS = "No results reported"
_NUMBER = r"(\d+(?:\.\d+)?)"
_EXPECTED = re.compile(rf"expected\s*(>=?)\s*{_NUMBER}\s*(GB/s|Gbps)?,? but measured\s*{_NUMBER}\s*(GB/s|Gbps)?")
_LESS = re.compile(rf"Bandwidth {_NUMBER} is less than {_NUMBER}")
_FOUND = re.compile(r"Expected to see (\d+) but found (\d+)")
_READINGS = (
    ("host_to_device", re.compile(rf"Device (\d+) Host to Device reported bandwidth is {_NUMBER} (GB/s)")),
    ("device_to_host", re.compile(rf"Device (\d+) Device to Host reported bandwidth is {_NUMBER} (GB/s)")),
    ("host_to_device", re.compile(rf"H2D_GPU_(\d+):\s*{_NUMBER}\s*(GB/s)")),
    ("device_to_host", re.compile(rf"D2H_GPU_(\d+):\s*{_NUMBER}\s*(GB/s)")),
    ("peer_to_peer", re.compile(rf"P2P_GPU_(\d+_\d+):\s*{_NUMBER}\s*(GB/s)")),
    ("ib_write_bw", re.compile(rf"IB devices=(\S+), \S+:.*Measured IB BW {_NUMBER} (Gbps)")),
    ("ib_write_bw", re.compile(rf"ib_write_lb_(\w+):\s*{_NUMBER}\s*(Gbps)")),
    ("all_reduce", re.compile(rf"Measured Avg [NR]CCL allreduce (bus BW) {_NUMBER} (GB/s)")),
    ("all_reduce", re.compile(rf"([nr]ccl_all_red):\s*{_NUMBER}\s*(GB/s)")),
    ("all_reduce_ib_loopback", re.compile(rf"NCCL allreduce (IB loopback) bandwidth {_NUMBER} (GB/s)$")),
)
_BITS = 8
"""ib_write_bw counts bits, everything else bytes."""


@dataclass(frozen=True)
class NhcResult:
    """One line that says how a check went."""

    level: Level
    check: str
    """Empty where the line names none."""
    said: str
    code: str = ""
    """NHC2010; empty where the line has none."""
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    """GB/s where a bandwidth was measured, whatever the line's unit was."""
    throttled: tuple[str, str] | None = None
    """GPU and the mask of reasons."""


@dataclass(frozen=True)
class NhcReading:
    """A figure that a debug line tells, in GB/s."""

    check: str
    where: str
    measured: float


@dataclass(frozen=True)
class NhcRun:
    """One run on one machine."""

    host: str = ""
    """Its own name; of a summary the name in front of the line."""
    about: dict[str, str] = field(default_factory=dict)
    """vm, computer, host, vm_id, sku, physical_host, kernel."""
    results: tuple[NhcResult, ...] = ()
    readings: tuple[NhcReading, ...] = ()
    exit_code: int | None = None
    """None: the log has no such line, the run did not end."""
    unsupported: str = ""
    """The size that there are no checks for: nothing ran, and the exit code was 0."""
    summary: Literal["", "healthy", "failed", "no results"] = ""
    """Of a summary of many machines."""

    @property
    def failed(self) -> tuple[NhcResult, ...]:
        return tuple(result for result in self.results if result.level == "failed")

    @property
    def passed(self) -> tuple[NhcResult, ...]:
        return tuple(result for result in self.results if result.level == "passed")


def is_aznhc(text: str) -> bool:
    """Whether a text is of AzNHC."""
    marks = (_META, _RESULT, _EXIT, _UNSUPPORTED, _THROTTLED)
    lines = (_split(line)[1] for line in text.split("\n")[:2000])
    return any(mark.search(text) for mark in marks) or any(map(_of_summary, lines))


def _split(line: str) -> tuple[str, str]:
    """The launcher's label of a line, empty where there is none, and the rest."""
    label = match[0] if (match := _LABEL.match(line)) else ""
    return label.strip(), line[len(label) :]


def read_aznhc(text: str) -> list[NhcRun]:
    """Every run in a log, in order; of a summary one a machine."""
    lines = [_split(line) for line in text.split("\n")]
    summary = not _META.search(text) and any(_of_summary(rest) for _, rest in lines)
    readers: dict[str, _Reader] = {}
    many: dict[str, _Building] = {}
    for label, rest in lines:
        # What a summary says of a machine and is not understood is unknown, not nothing.
        match = _DISTRIBUTED.match(rest) if summary else None
        host, output = (match[1], match[2]) if match else _of_summary(rest) or ("", rest)
        if host:
            many.setdefault(host, _Building(host=host)).take(output)
        else:
            readers.setdefault(label, _Reader()).take(rest)
    runs = (run for reader in readers.values() for run in reader.runs())
    return [*runs, *(building.run() for building in many.values())]


def result_of(line: str) -> NhcResult | None:
    """What a line says of a check; None when it says nothing."""
    if throttled := _THROTTLED.search(line):
        where = (f"GPU {throttled[1]}", throttled[2].lower())
        return NhcResult("warned", "check_gpu_clock_throttling", throttled[0], throttled=where)
    match = _RESULT.search(line)
    if not match:
        return None
    levels: tuple[Level, ...] = ("passed", "failed", "warned")
    level = next(level for level, text in zip(levels, match.groups()[:3], strict=True) if text)
    text = match[4].strip()
    check, code = CHECK.search(text), CODE.search(text)
    measured, limit, unit = _figures(text)
    return NhcResult(level, check[1] if check else "", text, code[1] if code else "", measured, limit, unit)


def _figures(text: str) -> tuple[float | None, float | None, str]:
    """What was measured, the least that was expected, and the unit; bits are made bytes."""
    if match := _EXPECTED.search(text):
        bits = _BITS if "Gbps" in (match[3], match[5]) else 1
        return float(match[4]) / bits, float(match[2]) / bits, "GB/s"
    if match := _LESS.search(text):
        return float(match[1]), float(match[2]), "GB/s"
    if match := _FOUND.search(text):
        return float(match[2]), float(match[1]), ""
    return None, None, ""


def _of_summary(line: str) -> tuple[str, str] | None:
    """Machine and what is said of it, by a line of a summary."""
    match = _DISTRIBUTED.match(line) if "|" in line else None
    if not match:
        return None
    output = match[2]
    known = (
        output == "Healthy"
        or _NO_RESULTS in output
        or _RESULT.search(output)
        or _EXIT.search(output)
        or _reading(output)
    )
    return (match[1], output) if known or "ERROR:" in output or "nhc" in output else None


def _reading(line: str) -> NhcReading | None:
    for check, pattern in _READINGS:
        if match := pattern.search(line.rstrip()):
            value = float(match[2]) / (_BITS if match[3] == "Gbps" else 1)
            return NhcReading(check, f"GPU {match[1]}" if match[1][0].isdigit() else match[1], value)
    return None


@dataclass
class _Building:
    """A run while it is read."""

    host: str = ""
    about: dict[str, str] = field(default_factory=dict)
    results: dict[NhcResult, None] = field(default_factory=dict)
    readings: dict[NhcReading, None] = field(default_factory=dict)
    exit_code: int | None = None
    unsupported: str = ""
    healthy: bool = False
    silent: bool = False

    @property
    def empty(self) -> bool:
        return not (self.about or self.results or self.readings or self.unsupported) and self.exit_code is None

    def take(self, line: str) -> None:
        if result := result_of(line):
            self.results[result] = None
        elif reading := _reading(line):
            self.readings[reading] = None
        elif ended := _EXIT.search(line):
            self.exit_code = int(ended[1])
        elif unsupported := _UNSUPPORTED.search(line):
            self.unsupported = unsupported[1]
        elif self.host:
            self._summary(line)
        elif about := _FIELD.match(line):
            field = _FIELDS[about[1]]
            value = about[2]
            if self.about.setdefault(field, value) != value:
                text = f"two machines in one log, line by line: {self.about[field]} and {value}"
                self.results[NhcResult("failed", "", text, code="NHCNA")] = None

    def _summary(self, line: str) -> None:
        if line == "Healthy":
            self.healthy = True
        elif _NO_RESULTS in line:
            self.silent = True
        elif "ERROR:" in line:
            text = line.partition("ERROR:")[2].strip()
            self.results[NhcResult("failed", "", text)] = None

    def run(self) -> NhcRun:
        about = self.about
        failed = any(result.level == "failed" for result in self.results)
        return NhcRun(
            host=self.host or about.get("host") or about.get("vm") or about.get("computer", ""),
            about=about,
            results=tuple(self.results),
            readings=tuple(self.readings),
            exit_code=self.exit_code,
            unsupported=self.unsupported,
            summary="failed"
            if failed and self.host
            else "no results"
            if self.silent
            else "healthy"
            if self.healthy
            else "",
        )


class _Reader:
    """Runs of one machine, each from its meta data, or from the end of the one before."""

    def __init__(self) -> None:
        self.done: list[_Building] = []
        self.now = _Building()

    def take(self, line: str) -> None:
        if _META.search(line) or (_UNSUPPORTED.search(line) and not self.now.empty):
            self._next()
        self.now.take(line)
        if self.now.exit_code is not None:
            self._next()

    def _next(self) -> None:
        if not self.now.empty:
            self.done.append(self.now)
        self.now = _Building()

    def runs(self) -> list[NhcRun]:
        self._next()
        return [building.run() for building in self.done]
