"""What rocm-smi, amd-smi and the amdgpu driver's files say of a machine's AMD GPUs.

Pure: who asks is tasks/jobs/qualify/health_amd.py. Error counters are read from the driver's files, for
`rocm-smi --showrasinfo --json` has nothing to report (ROCm issue 4374).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

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
