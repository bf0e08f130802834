"""What the vendors' tools say of a machine's GPUs before a run, beyond the light look of gpu_health.py. Pure.

nvidia-smi tells clocks, persistence and NVLink (https://docs.nvidia.com/deploy/nvidia-smi/); who asks is
tasks/jobs/qualify/health_nvidia.py. Of AMD GPUs it is rocm-smi, amd-smi and the amdgpu driver's files, which
tasks/jobs/qualify/health_amd.py reads. Error counters are read from the driver's files, for
`rocm-smi --showrasinfo --json` has nothing to report (ROCm issue 4374).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.formats.gpu_health import GPU_FIELDS, Finding, Rules

FIELDS = (
    *GPU_FIELDS,
    "name",
    "driver_version",
    "persistence_mode",
    "clocks.max.graphics",
    "clocks.applications.graphics",
    "clocks.max.memory",
    "clocks.applications.memory",
    "ecc.errors.corrected.aggregate.sram",
    "ecc.errors.uncorrected.aggregate.sram",
    "retired_pages.single_bit_ecc.count",
    "retired_pages.double_bit.count",
    "gpu_recovery_action",
)
"""Of `nvidia-smi --query-gpu`; what a driver does not know is left out."""
GPU = re.compile(r"^GPU (\d+): (.*?)(?: \(UUID: .*\))?\s*$", re.MULTILINE)
LINK = re.compile(r"Link (\d+): (<inactive>|[\d.]+ GB/s)", re.IGNORECASE)
ALL_INACTIVE = "all links are inactive"
NOTHING_TO_DO = ("", "none", "n/a", "not supported", "unknown error")


@dataclass(frozen=True)
class Links:
    """NVLinks of one GPU."""

    active: int
    inactive: int
    all_down: bool = False
    """nvidia-smi says only that all are inactive, and not how many there are."""


@dataclass(frozen=True)
class Clock:
    """One clock of a GPU, in MHz."""

    maximum: float
    application: float | None
    """What programs get; None where the driver has no application clocks any more (they are deprecated)."""

    @property
    def in_force(self) -> float:
        return self.maximum if self.application is None else self.application


def listed(text: str) -> int:
    """GPUs in the answer to `nvidia-smi --list-gpus`; one that has fallen off the bus is a line of another form."""
    return len(GPU.findall(text))


def clocks(gpu: Mapping[str, str], kind: str) -> Clock | None:
    """The `graphics` or `memory` clock of a row of FIELDS; None where the driver says nothing."""
    maximum = number(gpu.get(f"clocks.max.{kind}"))
    return None if maximum is None else Clock(maximum, number(gpu.get(f"clocks.applications.{kind}")))


def set_clocks_command(gpu: Mapping[str, str]) -> tuple[str, ...]:
    """What sets a GPU's application clocks to their maximum; lost at a restart of the machine or its driver."""
    highest = f"{gpu['clocks.max.memory']},{gpu['clocks.max.graphics']}"
    return ("nvidia-smi", "-i", gpu["index"], "-ac", highest)


def links(text: str) -> dict[str, Links]:
    """The answer to `nvidia-smi nvlink --status`, by GPU; empty where no GPU has NVLink."""
    result = {}
    starts = [*GPU.finditer(text)]
    ends = [*(start.start() for start in starts[1:]), len(text)]
    for start, end in zip(starts, ends, strict=False):  # nothing starts in an empty answer
        block = text[start.end() : end]
        states = [match[2].startswith("<") for match in LINK.finditer(block)]
        all_down = ALL_INACTIVE in block.lower()
        if states or all_down:
            result[start[1]] = Links(states.count(False), states.count(True), all_down)
    return result


def down(links_of: Mapping[str, Links]) -> dict[str, int]:
    """Links by GPU that should be active, judged by the GPU of the same machine that has most. At least 1 when all are down."""
    most = max((links.active + links.inactive for links in links_of.values()), default=0)
    return {
        gpu: (most or 1) if links.all_down else max(links.inactive, most - links.active)
        for gpu, links in links_of.items()
    }


def ecc_findings(gpu: Mapping[str, str], rules: Rules) -> list[Finding]:
    """Errors since the GPU was made, beside those since the driver was loaded (gpu_health.gpu_findings)."""
    results = []
    for kind in ("uncorrected", "corrected"):
        count, limit = number(gpu.get(f"ecc.errors.{kind}.aggregate.sram")), rules.ecc[f"sram_{kind}"]
        if count is not None and count > limit:
            message = f"{name(gpu)}: {count:.0f} {kind} errors of its SRAM in its life, the limit is {limit}"
            results.append(Finding("ecc", "fail", message, "Drain the machine and have the GPU replaced."))
    return results


def row_findings(gpu: Mapping[str, str], rules: Rules) -> list[Finding]:
    """A row of `--query-remapped-rows`: more uncorrectable errors than rows can be remapped for."""
    count = number(gpu.get("remapped_rows.uncorrectable"))
    if count is None or count <= rules.rows_fail:
        return []
    message = f"GPU {gpu.get('gpu_bus_id', '?')}: {count:.0f} uncorrectable errors, the limit is {rules.rows_fail}"
    return [Finding("rows", "fail", message, "Have the GPU replaced.")]


def page_findings(gpu: Mapping[str, str], rules: Rules) -> list[Finding]:
    """V100: the table of retired pages is full, and one more waits."""
    counts = [number(gpu.get(f"retired_pages.{kind}.count")) for kind in ("single_bit_ecc", "double_bit")]
    pages = sum(count for count in counts if count is not None)
    if pages < rules.pages_fail or gpu.get("retired_pages.pending", "").lower() not in ("yes", "1"):
        return []
    message = f"{name(gpu)}: {pages:.0f} pages are retired and more wait, the limit is {rules.pages_fail}"
    return [Finding("rows", "fail", message, "Have the GPU replaced.")]


def recovery(gpu: Mapping[str, str]) -> str:
    """What the driver itself asks for: Reset, Reboot, Drain P2P, Drain and Reset. Empty: nothing."""
    asked = gpu.get("gpu_recovery_action", "").strip("[] ")
    return "" if asked.lower() in NOTHING_TO_DO else asked


def name(gpu: Mapping[str, str]) -> str:
    """A GPU as findings name it."""
    return f"GPU {gpu.get('index', '?')} ({gpu.get('pci.bus_id', '?')})"


def is_read(text: str | None) -> bool:
    """Whether a field has a value: [N/A] and other words in brackets are none."""
    return bool(text) and not str(text).strip().startswith("[")


def number(text: str | None) -> float | None:
    """A field's value; None for [N/A], [Not Supported], [Requested functionality has been deprecated]."""
    try:
        return float((text or "").strip())
    except ValueError:
        return None


COUNT = re.compile(r"^(ue|ce|de):\s*(\d+)", re.MULTILINE)
LEVEL = re.compile(r"^\d+:\s*(\d+)\s*Mhz", re.MULTILINE | re.IGNORECASE)
FAULT = re.compile(
    r"amdgpu (?P<bus>[0-9a-f:.]+): .*?(?:uncorrectable hardware errors? detected|poison is consumed)", re.IGNORECASE
)
FREE_LEVELS = ("", "auto", "high")
"""Of power_dpm_force_performance_level: the driver chooses its clock up to the highest."""


def cards(text: str) -> int:
    """GPUs in the answer to `rocm-smi --showid --json`, or to `amd-smi list --json`. Raises ValueError when it is neither."""
    result = _json(text)
    if isinstance(result, dict) and "gpu_data" in result:
        result = result["gpu_data"]
    if isinstance(result, list):
        return len(result)
    return sum(1 for key in result if str(key).lower().startswith("card"))


def throttled(text: str) -> dict[str, str]:
    """The answer to `amd-smi metric --power --json`: what is throttled, by GPU."""
    result = _json(text)
    gpus = result.get("gpu_data", []) if isinstance(result, dict) else result
    states = {str(gpu.get("gpu")): str((gpu.get("power") or {}).get("throttle_status", "")) for gpu in gpus}
    return {gpu: state for gpu, state in states.items() if state.upper().startswith("THROTTLED")}


def errors(files: Mapping[str, str]) -> tuple[int, int]:
    """Uncorrected and corrected errors of one GPU, by the files ras/BLOCK_err_count (`ue: 0`, `ce: 0`)."""
    counts = [(kind, int(count)) for text in files.values() for kind, count in COUNT.findall(text)]
    return sum(n for kind, n in counts if kind == "ue"), sum(n for kind, n in counts if kind == "ce")


def highest(levels: str) -> float | None:
    """The highest clock of pp_dpm_sclk or pp_dpm_mclk, in MHz; None where the file says none."""
    return max((float(level) for level in LEVEL.findall(levels)), default=None)


def faults(log: str) -> list[tuple[str, str]]:
    """Bus and line of the driver's errors in a kernel log."""
    return [(match["bus"], line.strip()) for line in log.splitlines() if (match := FAULT.search(line))]


def _json(text: str) -> Any:
    """Some versions print warnings before the JSON."""
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0:
        raise ValueError(f"no JSON: {text.strip()[:200] or 'nothing was said'}")
    return json.JSONDecoder().raw_decode(text[start:])[0]
