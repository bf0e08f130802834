"""Rounds of one sweep as one: the best of each size counts, because other work comes and goes and a bad part stays.

Wrong elements of any round count, and so does the transport of the best one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from tasks.common.names import COLLECTIVES, Collective
from tasks.qualification.measured import Row, Status, Sweep

SCOPES = ("node", "pair", "part", "all")
SHORT = {"measured": 0, "failed": 1, "timed out": 2, "missing": 3, "skipped": 4}


class Point(NamedTuple):
    """One size: bandwidths in GB/s, None where nothing was measured."""

    bytes: int
    busbw: float | None
    in_place: float | None

    @property
    def rate(self) -> float | None:
        """Mean of out of place and in place, as nccl-tests' average of a single size and AzNHC's thresholds have it."""
        results = [value for value in (self.busbw, self.in_place) if value is not None]
        return sum(results) / len(results) if results else None


class Merged(NamedTuple):
    """All rounds of one collective over the same machines."""

    collective: Collective
    scope: str
    nodes: tuple[str, ...]
    points: tuple[Point, ...]
    wrong: int
    transport: tuple[str, ...]
    status: Status
    """measured when any round was."""
    said: str
    backend: str
    ranks: int = 0
    """0: nobody said."""

    @property
    def rate(self) -> float | None:
        """Of the largest message, in GB/s."""
        return self.points[-1].rate if self.points else None

    @property
    def key(self) -> tuple[int, int, tuple[str, ...], int]:
        """An order that does not depend on who reported first."""
        return SCOPES.index(self.scope), COLLECTIVES.index(self.collective), self.nodes, self.ranks


def merged(sweeps: Iterable[Sweep]) -> tuple[Merged, ...]:
    """One of each collective, set of machines and number of ranks, in a fixed order. What nobody asked for is left out."""
    groups: dict[tuple[str, str, tuple[str, ...], int], list[Sweep]] = {}
    for sweep in sweeps:
        if sweep.status != "skipped":
            groups.setdefault((sweep.collective, sweep.scope, tuple(sorted(sweep.nodes)), sweep.ranks), []).append(
                sweep
            )
    return tuple(sorted((_merge(rounds, nodes) for (_, _, nodes, _), rounds in groups.items()), key=lambda m: m.key))


def _merge(rounds: list[Sweep], nodes: tuple[str, ...]) -> Merged:
    rounds = sorted(rounds, key=lambda sweep: (sweep.round, sweep.model_dump_json())) if len(rounds) > 1 else rounds
    good = [sweep for sweep in rounds if sweep.status == "measured" and sweep.rows]
    best = max(good, key=_rate, default=None)
    shown = best or min(rounds, key=lambda sweep: SHORT[sweep.status])
    status: Status = "measured" if best else "missing" if shown.status == "measured" else shown.status
    return Merged(
        collective=shown.collective,
        scope=shown.scope,
        nodes=nodes,
        points=_points([row for sweep in good for row in sweep.rows]),
        wrong=sum((row.wrong or 0) + (row.wrong_in_place or 0) for sweep in rounds for row in sweep.rows),
        transport=tuple(sorted(set(shown.transport))),
        status=status,
        said=shown.said or ("" if best else "it has no rows"),
        backend=shown.backend,
        ranks=shown.ranks,
    )


def _rate(sweep: Sweep) -> float:
    return _points(sweep.rows)[-1].rate or 0.0


def _points(rows: Iterable[Row]) -> tuple[Point, ...]:
    result: dict[int, list[Row]] = {}
    for row in rows:
        result.setdefault(row.bytes, []).append(row)
    return tuple(
        Point(size, _best(row.busbw for row in same), _best(row.busbw_in_place for row in same))
        for size, same in sorted(result.items())
    )


def _best(values: Iterable[float | None]) -> float | None:
    """What is no number, such as the rate of a run that took no time, was not measured."""
    return max((value for value in values if value is not None and math.isfinite(value)), default=None)


def size(number: int) -> str:
    """Bytes as nccl-tests' options have them, or in MB (10^6)."""
    if number % 1_000_000 == 0:
        return f"{number // 1_000_000} MB"
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= bytes_ and number % bytes_ == 0:
            return f"{number // bytes_} {unit}"
    return f"{number / 1e6:.4g} MB"
