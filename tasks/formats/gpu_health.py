"""What a machine says of its GPUs and links, read and judged: nvidia-smi, the kernel log, /sys/class/infiniband.

Pure: who runs the commands is tasks/jobs/node/probes.py while a job runs, and the qualification of a cluster. What is a fault and
what only a warning is data: tasks/hardware/health.json, with its sources.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.formats.azure_machine import COMPONENTS

COMPONENTS |= {"OFED": "ofed", "DOCA": "doca", "ImageVersion": "azhpc_image", "AZ_HEALTH_CHECKS": "aznhc"}
"""Names in the image's component_versions.txt, and ours."""


# What /sys says of a machine's network: rate of an InfiniBand port, the virtual function behind an Azure interface.
#
# Pure: who reads the files is tasks/jobs/qualify/health.py. State and counters of a port are gpu_health.port_of.


# Log files of a machine as if `dmesg` had printed them: seconds since the machine's start, and the message.
#
# Pure. syslog and messages have the time of day, in one of two forms; what is older than the machine's start is left
# out.


BSD = re.compile(r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) \S+ (.*)")
ISO = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)) \S+ (.*)")
KERNEL = re.compile(r"^kernel: (?:\[\s*\d+\.\d+\]\s*)?")


def as_dmesg(text: str, *, now: float, uptime: float) -> str:
    """Lines of a log file in the form of `dmesg`. `now` is the time of day in seconds, `uptime` since the machine's start."""
    lines = []
    for line in text.splitlines():
        match = ISO.match(line) or BSD.match(line)
        if match and (at := _seconds(match[1], now)) is not None:
            since_start = at - (now - uptime)
            if since_start > 0:
                lines.append(f"[{since_start:12.6f}] {KERNEL.sub('', match[2])}")
    return "\n".join(lines)


def _seconds(stamp: str, now: float) -> float | None:
    if stamp[:1].isdigit():
        return datetime.datetime.fromisoformat(stamp).timestamp()
    year = datetime.datetime.fromtimestamp(now).year
    nearest = [at for y in (year, year - 1) if (at := _bsd(stamp, y)) is not None]
    return min(nearest, key=lambda at: abs(at - now), default=None)


def _bsd(stamp: str, year: int) -> float | None:
    try:
        return datetime.datetime.strptime(f"{year} {stamp}", "%Y %b %d %H:%M:%S").timestamp()
    except ValueError:  # 29 February
        return None


GPU_FIELDS = (
    "index",
    "pci.bus_id",
    "clocks_event_reasons.active",
    "ecc.errors.corrected.volatile.sram",
    "ecc.errors.uncorrected.volatile.sram",
    "ecc.errors.corrected.volatile.dram",
    "ecc.errors.uncorrected.volatile.dram",
    "retired_pages.pending",
)
"""Of `nvidia-smi --query-gpu`."""
ROW_FIELDS = ("gpu_bus_id", "remapped_rows.uncorrectable", "remapped_rows.pending", "remapped_rows.failure")
"""Of `nvidia-smi --query-remapped-rows`."""
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""What drivers before 535 call a field."""
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")
STAMP = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)")
LINK_DOWN = re.compile(
    r"\b((?:mlx\d+_(?!core)\w+|ib\w*\d)(?::\d+)?):? .*?(?:lost carrier|link (?:is )?down)", re.IGNORECASE
)
KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \((.*?)\)")
UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')


@dataclass(frozen=True)
class Rules:
    """health.json, as it is read."""

    xid_fail: frozenset[int]
    xid_remedy: Mapping[str, str]
    smi_fail: Mapping[str, str]
    smi_signatures: tuple[str, ...]
    ecc: Mapping[str, int]
    throttle: Mapping[str, str]
    flaps_fail: int
    command_seconds: float
    xid_hours: float = 2.0
    """Before a qualification, an older Xid only warns."""
    xid_programs: frozenset[int] = frozenset()
    """What somebody's program causes; before a qualification it says nothing of the machine."""
    rows_fail: int = 512
    """Uncorrectable errors in remapped rows."""
    pages_fail: int = 62
    """Retired pages with which a table is full (V100)."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a machine."""

    check: Literal["xid", "smi", "ecc", "rows", "throttle", "link"]
    level: Literal["fail", "warn"]
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Xid:
    """One error that NVIDIA's driver wrote into the kernel log."""

    seconds: float
    """Since the machine started, by the kernel log's clock, which drifts from all others."""
    bus: str
    code: int
    text: str


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand device."""

    active: bool
    state: str
    rate: str
    downed: int
    """How often its link went down since the device started (counters/link_downed)."""


def read_rules(text: str) -> Rules:
    """The rules of a JSON text of health.json's form."""
    output: dict[str, Any] = json.loads(text)
    return Rules(
        xid_fail=frozenset(output["xid_fail"]["codes"]),
        xid_remedy=output["xid_remedy"],
        smi_fail=output["smi_fail"]["codes"],
        smi_signatures=tuple(output["smi_fail"]["signatures"]),
        ecc={name: limit for name, limit in output["ecc"].items() if name != "source"},
        throttle=output["throttle"]["reasons"],
        flaps_fail=output["links"]["flaps_fail"],
        command_seconds=output["command_seconds"],
        xid_hours=output["xid_seen"]["hours"],
        xid_programs=frozenset(output["xid_programs"]["codes"]),
        rows_fail=output["rows"]["uncorrectable"],
        pages_fail=output["rows"]["retired_pages"],
    )


ENDED_BY_SOMEBODY = (-9, -15, 137, 143)
"""SIGKILL and SIGTERM say nothing of a machine: the agent itself ends what is left of an attempt."""


def smi_finding(code: int, text: str, rules: Rules) -> Finding | None:
    """What the end of nvidia-smi says; `code` is negative when a signal ended it. None when it is well."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
    signature = next((mark for mark in rules.smi_signatures if mark.lower() in text.lower()), None)
    if code == 0 and not signature:
        return None
    known = rules.smi_fail.get(str(code))
    crashed = (code > 127 or code < 0) and code not in ENDED_BY_SOMEBODY
    fails = known is not None or signature is not None or crashed
    what = known or "it could not look"
    return Finding("smi", "fail" if fails else "warn", f"nvidia-smi ended with {code}: {what} ({line[:200]})")


def unknown_field(text: str) -> str | None:
    """The field that this driver's nvidia-smi does not know, by its complaint."""
    match = UNKNOWN_FIELD.search(text)
    return match[1] if match else None


def rows(text: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """The lines of `--format=csv,noheader,nounits`, by the fields that were asked for; other lines are left out."""
    parts = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [dict(zip(fields, values, strict=True)) for values in parts if len(values) == len(fields)]


def gpu_findings(gpu: Mapping[str, str], rules: Rules) -> list[Finding]:
    """What one row of GPU_FIELDS says. A field that a GPU does not have reads [N/A], and says nothing."""
    name = f"GPU {gpu.get('index', '?')} ({gpu.get('pci.bus_id', '?')})"
    results = []
    for kind, limit in rules.ecc.items():
        memory, _, what = kind.partition("_")
        count = _number(gpu.get(f"ecc.errors.{what}.volatile.{memory}"))
        if count and count > limit:
            message = f"{name}: {count} {what} errors of its {memory.upper()}, the limit is {limit}"
            results.append(Finding("ecc", "fail", message, "Drain the machine and reset the GPU."))
    uncorrected = _number(gpu.get("ecc.errors.uncorrected.volatile.dram"))
    if uncorrected:
        results.append(Finding("ecc", "warn", f"{name}: {uncorrected} uncorrected errors of its memory"))
    if _yes(gpu.get("retired_pages.pending")):
        results.append(Finding("rows", "warn", f"{name}: pages wait to be retired", "Reset the GPU."))
    text = gpu.get("clocks_event_reasons.active", "")
    active = int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", text) else 0
    reasons = [word for bit, word in rules.throttle.items() if active & int(bit, 16)]
    throttled = [Finding("throttle", "warn", f"{name} is throttled: {', '.join(reasons)}")] if reasons else []
    return [*results, *throttled]


def row_findings(gpu: Mapping[str, str]) -> list[Finding]:
    """What one row of ROW_FIELDS says (AzNHC's check_gpu_ecc: pending or failed remapping of rows is a fault)."""
    name = f"GPU {gpu.get('gpu_bus_id', '?')}"
    results = []
    if _yes(gpu.get("remapped_rows.failure")):
        results.append(
            Finding("rows", "fail", f"{name}: a row of its memory could not be remapped", "Replace the GPU.")
        )
    if _yes(gpu.get("remapped_rows.pending")):
        results.append(Finding("rows", "fail", f"{name}: a row of its memory waits to be remapped", "Reset the GPU."))
    return results


def has_lines(log: str) -> bool:
    """Whether a text is a kernel's log at all."""
    return any(STAMP.match(line) for line in log.splitlines())


def newest(log: str) -> float:
    """The time of a kernel log's newest line; 0 when it has none."""
    return max((seconds for seconds, _ in _lines(log, 0.0)), default=0.0)


def xids(log: str, *, since: float) -> list[Xid]:
    """The driver's errors in a kernel log as `dmesg` prints it, after `since` by the log's own clock."""
    result = ((seconds, XID.search(text)) for seconds, text in _lines(log, since))
    return [Xid(seconds, match[1], int(match[2]), match[3].strip()) for seconds, match in result if match]


def xid_findings(errors: list[Xid], rules: Rules) -> list[Finding]:
    return [
        Finding(
            "xid",
            "fail" if error.code in rules.xid_fail else "warn",
            f"Xid {error.code} of GPU {error.bus}: {error.text[:200]}",
            rules.xid_remedy.get(str(error.code), ""),
        )
        for error in errors
    ]


def killed_for_memory(log: str, *, since: float) -> dict[int, str]:
    """Processes that the kernel killed because memory was used up: process id and name."""
    result = (KILLED.search(text) for _, text in _lines(log, since))
    return {int(match[1]): match[2] for match in result if match}


def flap_findings(log: str, rules: Rules, *, since: float) -> list[Finding]:
    """Links that went down, by the kernel log; often enough is a fault."""
    return [_flapped(name, times, rules) for name, times in sorted(flaps(log, since=since).items())]


def flaps(log: str, *, since: float) -> Counter[str]:
    """How often each link went down, by a kernel log in the form of `dmesg`."""
    return Counter(match[1] for _, text in _lines(log, since) if (match := LINK_DOWN.search(text)))


def port_findings(before: Mapping[str, Port], now: Mapping[str, Port], rules: Rules) -> list[Finding]:
    """Ports that were active and are not, or whose link went down since."""
    results = []
    for name, was in sorted(before.items()):
        port = now.get(name)
        if was.active and (port is None or not port.active):
            state = port.state if port else "gone"
            results.append(
                Finding("link", "fail", f"port {name} is {state}, it was {was.state}", "Check cable and switch port.")
            )
        elif port and port.downed > was.downed:
            results.append(_flapped(name, port.downed - was.downed, rules))
    return results


def port_of(files: Mapping[str, str]) -> Port:
    """A port by the files of /sys/class/infiniband/DEVICE/ports/N: state, phys_state, rate, link_downed."""
    state, physical = (files.get(key, "").partition(":")[2].strip() for key in ("state", "phys_state"))
    downed = _number(files.get("link_downed")) or 0
    return Port(state == "ACTIVE" and physical == "LinkUp", state or "unknown", files.get("rate", "").strip(), downed)


def _flapped(name: str, times: int, rules: Rules) -> Finding:
    level: Literal["fail", "warn"] = "fail" if times >= rules.flaps_fail else "warn"
    return Finding("link", level, f"the link of {name} went down {times} times", "Check cable and switch port.")


def _lines(log: str, since: float) -> list[tuple[float, str]]:
    stamped = (STAMP.match(line) for line in log.splitlines())
    return [(float(match[1]), match[2]) for match in stamped if match and float(match[1]) > since]


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None


def _yes(text: str | None) -> bool:
    return (text or "").strip().lower() in ("yes", "1")
