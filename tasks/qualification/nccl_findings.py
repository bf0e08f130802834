"""A run of nccl-tests by itself: did it end, was it read, do its figures agree, and is it of this hardware at all.

Whether the figures are good is sweeps.py's. Here is what must hold before figures count: what does not is unknown, except for
what the run itself says is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tasks.config.qualification import COLLECTIVES, Verdict
from tasks.formats.nccl_run import FACTORS, NcclRun
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Row, Sweep
from tasks.qualification.verdicts import Reason

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
    numbers = sorted({rank.group for rank in run.ranks})
    groups = [tuple(dict.fromkeys(rank.host for rank in run.ranks if rank.group == number)) for number in numbers]
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
        for nodes in groups or [hosts]
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
