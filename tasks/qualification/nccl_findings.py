"""A run of nccl-tests by itself: did it end, was it read, do its figures agree, and is it of this hardware at all.

Whether the figures are good is sweeps.py's. Here is what must hold before figures count: what does not is unknown, except for
what the run itself says is wrong.

What a run of AzNHC says of a machine, as probes: its findings with their fault codes, its figures, and what it did not say.

Azure's script ends with 0 where it has no checks for the size, and its throttling check never fails: here both count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tasks.hardware
from tasks.common.names import COLLECTIVES, Verdict
from tasks.formats.aznhc import NhcResult, NhcRun
from tasks.formats.gpu_health import read_rules
from tasks.formats.nccl_run import FACTORS, NcclRun
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Probe, Row, Sweep
from tasks.qualification.verdicts import Reason

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


SOURCE = "Headway: what was not measured is unknown"
DEFINITION = "NVIDIA/nccl-tests doc/PERFORMANCE.md"
_BROKE = re.compile(r"Test (?:NCCL|CUDA|HIP|RCCL) failure|: Test failure |exited on signal|Segmentation fault")
_GPU = re.compile(r"\b(V100|A100|H100|H200|H20|B200|B300|GB200|GB300|MI\d{3}[A-Z]?|L40S?|A10)\b", re.IGNORECASE)
_ROUNDED = 0.02
"""Share by which a ratio of two printed figures may be off."""


def sweeps_of(run: NcclRun, hosts: tuple[str, ...], transport: tuple[str, ...]) -> tuple[Sweep, ...]:
    """The run as our own job leaves one: with NCCL_TESTS_SPLIT one for each group, whose figures are all groups' mean.

    Ranks only where the log lists those of one group: by the figures alone they are not certain.
    """
    collective = next((name for name in COLLECTIVES if name == run.collective), None)
    if not collective or not run.rows or run.world == 1:
        return ()
    groups = _hosts_of_groups(run) or [hosts]
    return tuple(
        Sweep(
            collective=collective,
            scope="node" if len(nodes) == 1 else "pair" if len(nodes) == 2 else "all",
            nodes=nodes,
            ranks=(run.world or 0) if run.ranks and run.groups == 1 else 0,
            backend="rccl" if run.tool.startswith("rccl") else "nccl",
            tool=f"{run.tool} {run.version}".strip(),
            rows=rows_of(run),
            transport=transport,
        )
        for nodes in groups
        if nodes
    )


def rows_of(run: NcclRun) -> tuple[Row, ...]:
    """Its rows in the order of the log."""
    return tuple(
        Row(
            bytes=row.bytes,
            microseconds=row.out.microseconds,
            algbw=row.out.algbw,
            busbw=row.out.busbw,
            wrong=row.out.wrong,
            microseconds_in_place=row.in_place.microseconds,
            algbw_in_place=row.in_place.algbw,
            busbw_in_place=row.in_place.busbw,
            wrong_in_place=row.in_place.wrong,
        )
        for row in run.rows
    )


def _hosts_of_groups(run: NcclRun) -> list[tuple[str, ...]]:
    groups = sorted({rank.group for rank in run.ranks})
    return [tuple(dict.fromkeys(rank.host for rank in run.ranks if rank.group == group)) for group in groups]


def findings(run: NcclRun, sku: Sku, hosts: tuple[str, ...]) -> tuple[Reason, ...]:
    """What keeps its figures from counting, and what it says is wrong, about all its machines together."""
    results = [*_ended(run), *_read(run), *(_agrees(run) if run.rows else ()), *_same_hardware(run, sku, hosts)]
    return tuple(reason.model_copy(update={"nodes": hosts}) for reason in results)


def _ended(run: NcclRun) -> Iterator[Reason]:
    broke = [line for line in run.failures if _BROKE.search(line)]
    if broke:
        yield _reason(run, "run", "failed", broke[0], "no failure", "the test itself", len(broke))
    elif run.failures:
        yield _reason(run, "run", "unknown", run.failures[0], "no failure", "the launcher", len(run.failures))
    if not run.rows:
        text = "the columns are there and no row" if run.header else "there is no row"
        yield _reason(run, "rows", "unknown", text, "rows, and the average after them", SOURCE)
    elif run.out_of_bounds is None or run.average_printed is None:
        text = f"{len(run.rows)} rows and no end: the run was cut off, or the log"
        yield _reason(run, "end", "unknown", text, "Out of bounds values and Avg bus bandwidth", SOURCE)
    if run.out_of_bounds:
        yield _reason(run, "out of bounds values", "failed", float(run.out_of_bounds), "= 0", "nccl-tests' own check")
    if run.average_accepted is False:
        yield _reason(
            run, "average", "failed", run.average_printed, ">= 0.9 of NCCL_TESTS_MIN_BW", "the run's own setting"
        )


def _read(run: NcclRun) -> Iterator[Reason]:
    if run.unread:
        yield _reason(run, "rows", "unknown", run.unread[0], "a row", "Headway: not readable", len(run.unread))
    if not run.collective:
        yield _reason(run, "collective", "unknown", "nothing says which it is", "a name", SOURCE)
    elif run.rows and run.collective not in COLLECTIVES:
        yield _reason(run, "collective", "unknown", run.collective, f"one of {', '.join(COLLECTIVES)}", SOURCE)


def _agrees(run: NcclRun) -> Iterator[Reason]:
    """Average, factor and ranks, each beside what the rows say."""
    if not run.averages_agree:
        limit = f"= {run.average:.6g}, the mean of the rows"
        yield _reason(run, "average as printed", "unknown", run.average_printed, limit, DEFINITION, unit="GB/s")
    if run.world == 1 or run.processes > 1:
        text = f"{run.processes} processes of one rank each, which nccl-tests are when they are built without MPI=1"
        yield _reason(
            run,
            "ranks",
            "unknown",
            text if run.processes > 1 else 1.0,
            ">= 2",
            "nothing was communicated, so nothing was seen",
        )
    elif not _factor_fits(run):
        k = FACTORS[run.collective]
        limit = "= 1" if not k else f"= {k if k > 1 else ''}(n-1)/n"
        yield _reason(run, "busbw by algbw", "unknown", run.ratio, limit, DEFINITION)
    elif _ranks_listed(run) > (run.world_by_figures or run.world or 0) * (1 + _ROUNDED) and _precise(run):
        limit = f"= {run.world_by_figures}, by busbw and algbw"
        yield _reason(run, "ranks", "unknown", float(_ranks_listed(run)), limit, DEFINITION)
    if all(row.out.wrong is None and row.in_place.wrong is None for row in run.rows) and not run.out_of_bounds:
        yield _reason(run, "correctness", "degraded", "not checked", "-c 1", "Headway: results that nobody compared")


def _factor_fits(run: NcclRun) -> bool:
    """Whether the ratio is one that this collective can have with two ranks or more."""
    if run.ratio is None or run.collective not in FACTORS:
        return True
    k = FACTORS[run.collective]
    least, most = (k / 2, k) if k else (1.0, 1.0)
    return least * (1 - _ROUNDED) <= run.ratio <= most * (1 + _ROUNDED)


def _ranks_listed(run: NcclRun) -> int:
    return len({rank.rank for rank in run.group})


def _precise(run: NcclRun) -> bool:
    """Whether the figures tell the number of ranks: for few, of a factor that depends on it."""
    return bool(FACTORS.get(run.collective)) and (run.world_by_figures or 99) < 16


def _same_hardware(run: NcclRun, sku: Sku, hosts: tuple[str, ...]) -> Iterator[Reason]:
    wanted = sku.specs.get("gpu")
    expected = _GPU.search(str(wanted.value)) if wanted else None
    seen = sorted({match[1].upper() for rank in run.ranks if (match := _GPU.search(rank.name))})
    if expected and seen and seen != [expected[1].upper()]:
        yield _reason(run, "gpu", "unknown", ", ".join(seen), f"= {expected[1]}", f"{sku.name}: what --sku says")
    gpus = sku.specs.get("gpus")
    world, machines = run.world or 0, len(hosts)
    if gpus and run.ranks and run.groups == 1 and world > int(gpus.value) * machines:
        limit = f"<= {int(gpus.value) * machines}: {machines} machines have no more GPUs"
        yield _reason(run, "ranks", "unknown", float(world), limit, sku.name)


def _reason(
    run: NcclRun,
    what: str,
    verdict: Verdict,
    measured: float | str | None,
    limit: str,
    source: str,
    more: int = 1,
    unit: str = "",
) -> Reason:
    """`more`: lines that say the same, of which the first is shown."""
    shown = measured if more < 2 else f"{measured} (and {more - 1} more)"
    name = run.collective or run.tool
    return Reason(
        node="", check=f"{name} {what}", measured=shown, unit=unit, limit=limit, source=source, verdict=verdict,
        remedy="Read the log; run the test again.",
    )  # fmt: skip
