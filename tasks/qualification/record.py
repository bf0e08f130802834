"""A baseline that was measured: what runs on sound machines reached, as a file of hardware that later runs are judged by.

The run that was recorded stays judged by what it was judged by: its verdict and the digest of its baseline were there before, and
a run that is judged by the new file is another one, as the digest tells. The form of a file is tasks/hardware/sku.py.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tasks.config.qualification import FULL, BenchmarkConfig
from tasks.hardware.files import CHECKS, known_skus, read_sku
from tasks.hardware.sku import BusBandwidth, Limit, Sku, Source, plain_name
from tasks.qualification.judge import judge
from tasks.qualification.measured import Measurement, Sweep

# What machines reached in one run or several, as limits: medians with margins.


RATES = (
    *(name for name, unit in CHECKS.items() if unit == "TFLOP/s" and name.startswith("matmul_")),
    *("memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer"),
    *("scratch_write", "scratch_read", "scratch_files_written", "scratch_files_read"),
)
"""What a machine reaches by itself; what the store and the network that is trained reach is not its property."""
COUNTS = ("gpu_count", "cpu_count", "nvme_count")
FLOORS = ("ib_ports_active", "ib_rate")
MEMORY_FLOOR = 0.97
"""Of memory_gib, as AzNHC's files have it for most sizes."""
BOUND = 0.5
"""Messages from which on a bus bandwidth is limited: those that reach this share of the largest."""


class Margins(NamedTuple):
    """Shares of the median."""

    warn: float
    fail: float


GPU, CPU = Margins(0.95, 0.90), Margins(0.75, 0.50)
"""GPU machines are lent whole; ranks on CPUs share cores with other work."""
LOWEST = Margins(0.98, 0.90)
"""Shares of the lowest that was measured, so that the recorded machines themselves are sound by it."""


def margins_of(sku: Sku) -> Margins:
    """Those of a kind of machine."""
    return CPU if sku.vendor == "cpu" else GPU


def limits(measurements: Sequence[Measurement], based_on: Sku, *, source: str) -> Iterator[tuple[str, Limit]]:
    """What was measured of single machines, by check; without what the machines were judged by more sharply.

    Raises ValueError where machines differ in what they have.
    """
    for check, limit in _limits(measurements, margins_of(based_on), source):
        base = based_on.limits.get(check)
        if base is None or base.better != limit.better or not isinstance(base.fail, float):
            sharper = True
        else:
            sharper = isinstance(limit.fail, float) and limit.fail > base.fail
        if sharper:
            yield check, limit


def _limits(measurements: Sequence[Measurement], margins: Margins, source: str) -> Iterator[tuple[str, Limit]]:
    for check in (*RATES, *COUNTS, *FLOORS, "memory_gib"):
        values = list(_measured(measurements, check))
        if not values:
            continue
        unit = CHECKS[check]
        if check in COUNTS:
            yield check, Limit(unit=unit, better="equal", fail=_same(check, values), source=source)
        elif check in FLOORS:
            yield check, Limit(unit=unit, norm=_same(check, values), fail=_same(check, values), source=source)
        elif check == "memory_gib":
            fail = _rounded(MEMORY_FLOOR * min(values))
            yield check, Limit(unit=unit, norm=_rounded(min(values)), fail=fail, source=source)
        else:
            norm, warn, fail = _levels(values, margins)
            yield check, Limit(unit=unit, norm=norm, warn=warn, fail=fail, source=source)


def _measured(measurements: Iterable[Measurement], check: str) -> Iterator[float]:
    """What was measured of a check, once a machine's part; the best where it was measured again."""
    for measurement in measurements:
        best: dict[tuple[int, str], float] = {}
        for report in measurement.ranks:
            for probe in report.probes:
                if probe.check == check and isinstance(probe.measured, float):
                    key = (report.rank, probe.where)
                    best[key] = max(probe.measured, best.get(key, probe.measured))
        yield from best.values()


def _same(check: str, values: list[float]) -> float:
    if len(set(values)) > 1:
        shown = ", ".join(f"{value:g}" for value in sorted(set(values)))
        raise ValueError(f"record: the machines differ in {check}: {shown}; a baseline is of equal machines")
    return values[0]


def _levels(values: list[float], margins: Margins) -> tuple[float, float, float]:
    norm, lowest = statistics.median(values), min(values)
    warn, fail = min(margins.warn * norm, LOWEST.warn * lowest), min(margins.fail * norm, LOWEST.fail * lowest)
    return _rounded(norm), _rounded(warn), _rounded(min(warn, fail))


def collectives(measurements: Sequence[Measurement], based_on: Sku, *, source: str) -> Iterator[BusBandwidth]:
    """Those of the file, and one for each size that was measured; of small messages only the norm. Of two the sharper stays."""
    margins, result = margins_of(based_on), {_key(limit): limit for limit in based_on.collectives}
    kinds = {kind for one in measurements for sweep in one.sweeps if (kind := _kind(sweep))}
    for kind in sorted(kinds, key=lambda kind: (kind[0], kind[1], kind[2] or 0)):
        for limit in _curve(kind, measurements, margins, source):
            base = result.get(_key(limit))
            if base is None or base.fail is None or (limit.fail or 0.0) > base.fail:
                result[_key(limit)] = limit
    yield from result.values()


def _key(limit: BusBandwidth) -> tuple[str, str, int | None, int]:
    return limit.collective, limit.scope, limit.nodes, limit.bytes


Kind = tuple[str, str, int | None]


def _kind(sweep: Sweep) -> Kind | None:
    """Collective, scope and machines, as limits have them; all of one machine are a node."""
    if sweep.scope == "part":
        return None
    scope = "node" if len(sweep.nodes) == 1 else sweep.scope
    return sweep.collective, scope, len(sweep.nodes) if scope == "all" else None


def _curve(kind: Kind, measurements: Sequence[Measurement], margins: Margins, source: str) -> Iterator[BusBandwidth]:
    """A limit holds from its message on, so it is no higher than what larger messages keep."""
    sizes = _by_size(kind, measurements)
    medians = {size: statistics.median(values) for size, values in sizes.items()}
    best = max(medians.values(), default=0.0)
    for size in sorted(sizes):
        fields: dict[str, Any] = {
            "collective": kind[0],
            "scope": kind[1],
            "nodes": kind[2],
            "bytes": size,
            "source": source,
        }
        fields["norm"] = _rounded(medians[size])
        if medians[size] >= BOUND * best > 0:
            held = min((values for larger, values in sizes.items() if larger >= size), key=statistics.median)
            _, fields["warn"], fields["fail"] = _levels(held, margins)
        yield BusBandwidth.model_validate(fields)


def _by_size(kind: Kind, measurements: Sequence[Measurement]) -> dict[int, list[float]]:
    """Bus bandwidths by message, one a run and set of machines; the best where it was measured again."""
    best: dict[tuple[int, int, tuple[str, ...]], float] = {}
    for number, measurement in enumerate(measurements):
        for sweep in (sweep for sweep in measurement.sweeps if _kind(sweep) == kind):
            for row in (row for row in sweep.rows if row.busbw):
                key = (row.bytes, number, sweep.nodes)
                best[key] = max(row.busbw or 0.0, best.get(key, 0.0))
    result: dict[int, list[float]] = {}
    for (size, _, _), busbw in best.items():
        result.setdefault(size, []).append(busbw)
    return result


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


NAME = r"[A-Za-z0-9][A-Za-z0-9_-]*"


def record(
    name: str,
    measurements: Sequence[Measurement],
    *,
    based_on: Sku,
    folder: Path,
    replace: bool = False,
    config: BenchmarkConfig | None = None,
    earlier: Sequence[Measurement] = (),
    at_least: int = 1,
) -> Path:
    """Write `folder/NAME.yaml`: medians over all machines of `at_least` or more runs; what judged them stays where it is sharper.

    Raises ValueError for a name that is taken, also by a shipped file, unless `replace`; and for a run that was not sound:
    failed, unknown or incomplete. `config` is what it was judged with. Of `earlier` runs those count that are as sound, and whose
    machines have as many parts.
    """
    path = place(name, folder, replace=replace)
    if len(measurements) < at_least or not measurements:
        raise ValueError(
            f"record {name!r}: {len(measurements)} run(s) are there, and at least {max(at_least, 1)} needed"
        )
    for number, measurement in enumerate(measurements, start=1):
        _require_sound(
            measurement,
            based_on,
            config or BenchmarkConfig(),
            what=f"record {name!r}: run {number} of {len(measurements)}",
        )
    sound = (each for each in earlier if _joins(each, measurements[0], based_on, config or BenchmarkConfig()))
    sku = _baseline(name, (*measurements, *sound), based_on)
    folder.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.new")
    fields = sku.model_copy(update={"sources": {key: sku.sources[key] for key in sorted(sku.named_sources)}})
    output = yaml.safe_dump(_filled(fields.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=130)
    new.write_text(
        f"# Written by headway qualify --record. Change what you know better, and give it a source.\n{output}",
        encoding="utf-8",
    )
    read_sku(new)
    os.replace(new, path)
    return path


def place(name: str, folder: Path, *, replace: bool) -> Path:
    """Where a name will be written. Raises ValueError for one that is no name, and for one that is taken, unless `replace`."""
    if not re.fullmatch(NAME, name):
        raise ValueError(
            f"record {name!r}: a name has letters, digits, '-' and '_', and begins with a letter or a digit"
        )
    plain = plain_name(name)
    taken = known_skus(folder).get(plain)
    if taken and not replace:
        raise ValueError(f"record {name!r}: {taken} has this name; choose another one, or replace it with --replace")
    return taken if taken and taken.parent == folder else folder / f"{plain}.yaml"


def _joins(earlier: Measurement, newest: Measurement, based_on: Sku, config: BenchmarkConfig) -> bool:
    """Whether an earlier run tells of the same machines as they are now."""
    try:
        _require_sound(earlier, based_on, config, what="")
    except ValueError:
        return False
    return _parts(earlier) == _parts(newest)


def _parts(measurement: Measurement) -> set[tuple[str, float | str | None]]:
    """What its machines have: GPUs, cores, disks, ports."""
    probes = (probe for report in measurement.ranks for probe in report.probes)
    return {(probe.check, probe.measured) for probe in probes if probe.check in (*COUNTS, *FLOORS)}


def _require_sound(measurement: Measurement, based_on: Sku, config: BenchmarkConfig, *, what: str) -> None:
    """Judged once more, by what is missing and by what the hardware must show."""
    wrong = next(_incomplete(measurement), "")
    if wrong:
        raise ValueError(f"{what} is not complete: {wrong}")
    # The groups of checks that all ranks got through, on the machines that were measured.
    done = set.intersection(*(set(report.done) for report in measurement.ranks))
    verdict = judge(
        measurement,
        based_on,
        config.model_copy(update={"checks": tuple(name for name in FULL if name in done), "nodes": ()}),
    )
    if verdict.verdict not in ("healthy", "degraded") or verdict.named("failed", "unknown"):
        reasons = [*verdict.reasons, *(reason for node in verdict.nodes for reason in node.reasons)]
        closed = [reason for reason in reasons if reason.verdict in ("failed", "unknown")]
        first = closed[0].sentence if closed else "no machine is left"
        raise ValueError(f"{what} was {verdict.verdict}: {first}")


def _incomplete(measurement: Measurement) -> Iterator[str]:
    if measurement.error:
        yield measurement.error
    if not measurement.nodes or len(measurement.nodes) < measurement.expected_nodes:
        yield f"{len(measurement.nodes)} of {measurement.expected_nodes} machines have a result"
    ranks = measurement.expected_nodes * measurement.ranks_per_node
    if len(measurement.ranks) < ranks or not measurement.ranks:
        yield f"{len(measurement.ranks)} of {ranks} ranks have a result"
    if measurement.ranks and len({report.done for report in measurement.ranks}) > 1:
        yield "some ranks did not get through all groups of checks"
    for report in measurement.ranks:
        for probe in report.probes:
            if probe.status not in ("measured", "skipped"):
                yield f"{report.node}: {probe.check} is {probe.status}: {probe.said}"
    for sweep in measurement.sweeps:
        if sweep.status != "measured" or not sweep.rows:
            yield f"{sweep.collective} of {', '.join(sweep.nodes)}: {sweep.said or 'no row'}"


def _baseline(name: str, measurements: Sequence[Measurement], based_on: Sku) -> Sku:
    margins = margins_of(based_on)
    sizes = [report.machine.get("vm_size", "") for measurement in measurements for report in measurement.ranks]
    nodes = {node for measurement in measurements for node in measurement.nodes}
    # A key of sources that is not there: what was recorded earlier keeps its own.
    keys = ("recorded", *(f"recorded_{number}" for number in range(2, len(based_on.sources) + 3)))
    source = next(key for key in keys if key not in based_on.sources)
    what = (
        f"headway qualify --record, Headway {version('headway')}: median of {len(measurements)} run(s) on {len(nodes)} "
        f"machine(s), based on {based_on.name}; warn is {margins.warn} of it and fail {margins.fail}, or {LOWEST.warn} and "
        f"{LOWEST.fail} of the lowest where that is less"
    )
    return based_on.model_copy(
        update={
            "name": name,
            "aliases": (),
            "sizes": tuple(sorted({size for size in sizes if size})),
            "based_on": "",
            "sources": {**based_on.sources, source: Source(what=what, date=datetime.now(UTC).date())},
            "limits": {**based_on.limits, **dict(limits(measurements, based_on, source=source))},
            "collectives": tuple(collectives(measurements, based_on, source=source)),
        }
    )


def _filled(value: Any) -> Any:
    """Without what says nothing."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each not in (None, "", [], {})}
    return [_filled(each) for each in value] if isinstance(value, list) else value
