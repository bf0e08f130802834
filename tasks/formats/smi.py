"""What nvidia-smi says of a machine's GPUs before a run, beyond the light look of gpu_health.py: clocks, persistence, NVLink.

Pure: who asks is tasks/jobs/qualify/health_nvidia.py. See https://docs.nvidia.com/deploy/nvidia-smi/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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
