"""What machines reached in one run or several, as limits: medians with margins. Who writes them into a file is record.py."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tasks.hardware.sku import BusBandwidth, Limit, Sku
from tasks.hardware.units import CHECKS
from tasks.qualification.measured import Measurement, Sweep

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
        if _sharper(limit, based_on.limits.get(check)):
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


def _sharper(limit: Limit, base: Limit | None) -> bool:
    if base is None or base.better != limit.better or not isinstance(base.fail, float):
        return True
    return isinstance(limit.fail, float) and limit.fail > base.fail


def collectives(measurements: Sequence[Measurement], based_on: Sku, *, source: str) -> Iterator[BusBandwidth]:
    """Those of the file, and one for each size that was measured; of small messages only the norm. Of two the sharper stays."""
    margins, found = margins_of(based_on), {_key(limit): limit for limit in based_on.collectives}
    for kind in _kinds(measurements):
        for limit in _curve(kind, measurements, margins, source):
            base = found.get(_key(limit))
            if base is None or base.fail is None or (limit.fail or 0.0) > base.fail:
                found[_key(limit)] = limit
    yield from found.values()


def _key(limit: BusBandwidth) -> tuple[str, str, int | None, int]:
    return limit.collective, limit.scope, limit.nodes, limit.bytes


Kind = tuple[str, str, int | None]


def _kind(sweep: Sweep) -> Kind | None:
    """Collective, scope and machines, as limits have them; all of one machine are a node."""
    if sweep.scope == "part":
        return None
    scope = "node" if len(sweep.nodes) == 1 else sweep.scope
    return sweep.collective, scope, len(sweep.nodes) if scope == "all" else None


def _kinds(measurements: Sequence[Measurement]) -> list[Kind]:
    found = {kind for measurement in measurements for sweep in measurement.sweeps if (kind := _kind(sweep))}
    return sorted(found, key=lambda kind: (kind[0], kind[1], kind[2] or 0))


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
    found: dict[int, list[float]] = {}
    for (size, _, _), busbw in best.items():
        found.setdefault(size, []).append(busbw)
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
