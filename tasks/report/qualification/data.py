"""What the page of a qualification shows, read from `qualification.json`, and the few things that all of its parts ask of it.

Judging does not live here (tasks/qualification), nor how it looks (report.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from tasks.config.qualification import Verdict
from tasks.hardware.sku import Sku
from tasks.qualification.measured import Measurement, Probe, RankReport
from tasks.qualification.verdicts import WORST, ClusterVerdict, NodeVerdict, Reason
from tasks.report.data import number

STYLES: dict[Verdict, str] = {"healthy": "good", "degraded": "warn", "failed": "bad", "unknown": "unknown"}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


@dataclass(frozen=True)
class Found:
    """A qualification: the verdict, what was measured, and what it was held against."""

    verdict: ClusterVerdict
    measured: Measurement
    sku: Sku
    name: str = ""
    """Of the cluster."""
    expires: str = ""
    usable: tuple[str, ...] = ()
    """Machines that the jobs to come may use."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Those that they may not, each with why."""
    drained: tuple[tuple[str, bool, str], ...] = ()
    """Machine, whether it is drained now, and what the scheduler said."""
    requests: tuple[Mapping[str, Any], ...] = ()
    """That somebody may send to Azure: what, method, url, body."""

    @cached_property
    def nodes(self) -> tuple[NodeVerdict, ...]:
        """Machines, worst first; also those of which there is no verdict."""
        judged = {node.name for node in self.verdict.nodes}
        others = (NodeVerdict(name=name, verdict="unknown") for name in self.measured.nodes if name not in judged)
        return tuple(
            sorted((*self.verdict.nodes, *others), key=lambda node: (WORST.index(node.verdict), by_number(node.name)))
        )

    @cached_property
    def absent(self) -> int:
        """Machines that were asked for, of which nobody knows a name."""
        return max(0, self.measured.expected_nodes - len(self.nodes))

    @cached_property
    def answered(self) -> int:
        """Machines of which any rank left a word."""
        return len({report.node for report in self.measured.ranks})

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Every sentence of the verdict: those on the cluster, then those on machines, worst first."""
        together = sorted(self.verdict.reasons, key=lambda reason: WORST.index(reason.verdict))
        return (*together, *(reason for node in self.nodes for reason in node.reasons))

    @property
    def open(self) -> bool:
        """Whether anything may run."""
        return self.verdict.verdict in ("healthy", "degraded")

    def holds(self, reason: Reason) -> bool:
        """Whether it is said of machines that are used, and not of one that is left out, or of all with it."""
        who = {reason.node} if reason.node else set(reason.nodes)
        return not who & set(self.excluded)

    @cached_property
    def suspects(self) -> frozenset[str]:
        """Machines that are not healthy."""
        return frozenset(node.name for node in self.nodes if node.verdict != "healthy")

    def source(self, key: str) -> str:
        """What the hardware's file says of one of its sources; any other as it is."""
        return self.sku.cite(key)

    def probes(self) -> Iterator[tuple[RankReport, Probe]]:
        """Everything that was looked at, and who looked."""
        return ((report, probe) for report in self.measured.ranks for probe in report.probes)


def found(payload: Mapping[str, Any]) -> Found:
    """A qualification out of the content of `qualification.json`. Raises ValueError when it is none."""
    left = payload.get("remaining") or {}
    drained = ((str(one["node"]), bool(one["done"]), str(one["said"])) for one in payload.get("drained") or ())
    return Found(
        verdict=ClusterVerdict.model_validate(payload.get("verdict")),
        measured=Measurement.model_validate(payload.get("measured")),
        sku=Sku.model_validate(payload.get("sku")),
        name=str(payload.get("name") or ""),
        expires=str(payload.get("expires") or ""),
        usable=tuple(left.get("nodes") or ()),
        excluded=left.get("excluded") or {},
        drained=tuple(drained),
        requests=tuple(payload.get("requests") or ()),
    )


def finite(value: object) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def by_number(name: str) -> list[tuple[int, str]]:
    """By which names are sorted: hpc-9 stands before hpc-10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def brief(value: float | str) -> str:
    """A number with four digits; words as they are."""
    return number(float(f"{value:.4g}")) if isinstance(value, float) else number(value)


def rate(value: float | None, unit: str = "", none: str = "N/A") -> str:
    """What was measured, with four digits."""
    return none if finite(value) is None else f"{brief(float(value or 0.0))}{unit}"


def size_text(size: float) -> str:
    """Bytes for people: 16 MB is 16 x 10^6."""
    factor, unit = next((pair for pair in UNITS if size >= pair[0]), UNITS[-1])
    return f"{number(round(size / factor, 3 - len(str(int(size / factor)))))} {unit}"


def count(number: int, what: str, many: str = "") -> str:
    """`1 machine`, `512 machines`."""
    return f"{number:,} {what if number == 1 else many or f'{what}s'}"


def people(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def until(expires: str) -> str:
    """A time for people: 2026-11-23 10:00 UTC."""
    try:
        return datetime.fromisoformat(expires).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return expires
