"""What a run of AzNHC says of a machine, as probes: its findings with their fault codes, its figures, and what it did not say.

Azure's script ends with 0 where it has no checks for the size, and its throttling check never fails: here both count.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import tasks.hardware
from tasks.formats.aznhc import NhcResult, NhcRun
from tasks.formats.gpu_health import read_rules
from tasks.qualification.measured import Probe

CHECK = "aznhc"


_TIMED_OUT = re.compile(r"timed out|timeout while", re.IGNORECASE)


def probes_of(run: NhcRun) -> tuple[Probe, ...]:
    """All that it says: one probe a finding, one a figure, and one for the run as a whole."""
    results = [probe for result in run.results if result.level != "passed" for probe in _of_result(result)]
    readings = [
        Probe(check=reading.check, where=reading.where, measured=reading.measured, unit="GB/s", source="AzNHC")
        for reading in run.readings
    ]
    return (*results, *readings, _whole(run))


def fault_of(result: NhcResult) -> str:
    """Code and category, such as NHC2009 HpcMissingGpu: the line's own, else that of its check; empty where there is neither."""
    known = _dictionary()
    code = result.code or known["checks"].get(result.check, "")
    return f"{code} {known['faults'].get(code, '')}".strip()


def impact_of(code: str) -> str:
    """The category of a Guest Health Report, such as Resource.Hpc.Unhealthy.NvLink; empty for what is none."""
    known = _dictionary()
    category = known["faults"].get(code, "")
    return f"{known['prefix']}{category}" if category else ""


@cache
def _dictionary() -> dict[str, Any]:
    output: dict[str, Any] = json.loads(_data("aznhc.json"))
    return output


def _data(name: str) -> str:
    return (Path(tasks.hardware.__file__).parent / name).read_text(encoding="utf-8")


def _of_result(result: NhcResult) -> list[Probe]:
    if result.throttled:
        return _throttled(*result.throttled, result.said)
    if result.code == _dictionary()["setup"]:
        return [
            _probe(
                result,
                status="failed",
                remedy="This is a fault of the check's setup, not of the machine: fix the setup.",
            )
        ]
    if result.level == "failed" and _TIMED_OUT.search(result.said):
        return [_probe(result, status="timed out")]
    return [_probe(result, finding="fail" if result.level == "failed" else "warn")]


def _probe(result: NhcResult, **output: Any) -> Probe:
    fault = fault_of(result)
    measured = result.measured if result.measured is not None else fault or result.said[:120]
    return Probe(
        check=CHECK,
        where=result.check,
        measured=None if output.get("status") else measured,
        unit=result.unit,
        said=result.said[:500],
        source=f"AzNHC {result.check or 'health check'}{': ' + fault if fault else ''}",
        limit="" if result.limit is None else f"{'>=' if result.unit else '='} {result.limit:g}",
        **output,
    )


def _throttled(gpu: str, mask: str, text: str) -> list[Probe]:
    """AzNHC only warns; a slowdown of the hardware, or by heat, is a fault here as it is in our own check."""
    rules = read_rules(_data("health.json"))
    reasons = [word for bit, word in rules.throttle.items() if int(mask, 16) & int(bit, 16)]
    return [
        Probe(
            check="throttle",
            where=gpu,
            measured=", ".join(reasons) or mask,
            finding="fail" if reasons else "warn",
            said=text,
            source="AzNHC check_gpu_clock_throttling, which never fails; NVIDIA NVML, nvmlClocksEventReasons",
        )
    ]


def _whole(run: NhcRun) -> Probe:
    """Whether it ran, ended, and looked at anything."""
    if run.unsupported:
        return _silent(
            "missing", f"AzNHC has no checks for {run.unsupported}: nothing was looked at, and it ended with 0"
        )
    if run.summary:
        if run.summary == "no results":
            return _silent(
                "missing", "No results reported: the machine is unreachable, or the checks did not run there"
            )
        return Probe(
            check=CHECK, measured="Healthy" if run.summary == "healthy" else "ERROR", source="AzNHC, its summary"
        )
    if run.exit_code is None:
        return _silent("failed", "the log has no exit code: the checks did not come to their end")
    if run.exit_code and not run.failed:
        return _silent("failed", f"it ended with {run.exit_code} and names no check that failed")
    if not run.results:
        return _silent("missing", "it ended with 0 and names no check that ran")
    if not run.exit_code and run.failed:
        return _silent("failed", "it ended with 0 although a check failed: two runs in one, or a log that was changed")
    return Probe(check=CHECK, measured=f"{len(run.passed)} passed", source="AzNHC")


def _silent(status: Any, text: str) -> Probe:
    remedy = "Run AzNHC on the machine by hand (run-health-checks.sh -a) and read its log."
    return Probe(check=CHECK, status=status, said=text, source="Headway: what was not seen is unknown", remedy=remedy)
