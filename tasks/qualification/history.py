"""A machine against its own past: warnings that come back, failures that come and go, a rate that it once had.

On one published cluster the three worst of 63 machines caused more than half of all exclusions (arXiv 2605.09370): what failed
and recovered by itself is likely to fail again.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator, Mapping, Sequence

from tasks.hardware.sku import Sku
from tasks.qualification.limits import tolerances
from tasks.qualification.verdicts import NodeVerdict, Reason, Value

WARNINGS = 3
"""The same warning so many times in a row, this time included, has failed."""
WINDOW, RELAPSES = 5, 2
"""Failures among the last verdicts that leave a doubt."""
EARLIER = 2
"""Fewest earlier figures to compare with."""
PAST = "its past"
SETTINGS = ("vm_size", "version_", "sm_clock", "memory_clock", "persistence", "sriov", "time_skew", "scratch_free")
"""Beginnings of checks of how a machine was set up: a warning stays until somebody changes that, and nothing wears out."""
SOURCE = "Headway: the machine's earlier qualifications"


class Past(Value):
    """An earlier verdict on a machine."""

    time: datetime.datetime
    verdict: NodeVerdict


def of_past(now: NodeVerdict, history: Sequence[Past], sku: Sku) -> Iterator[Reason]:
    """What the past says of a machine as it is now."""
    mine = sorted(
        (p for p in history if p.verdict.name == now.name), key=lambda p: (p.time, p.verdict.model_dump_json())
    )
    earlier = [past.verdict for past in mine]
    yield from _again(now, earlier)
    failed = sum(verdict.verdict == "failed" for verdict in earlier[-WINDOW:])
    if failed >= RELAPSES and now.verdict in ("healthy", "degraded"):
        yield Reason(
            node=now.name,
            check=f"failures in {PAST}",
            measured=float(failed),
            unit=f"of the last {len(earlier[-WINDOW:])}",
            limit=f"<= {RELAPSES - 1}",
            source=SOURCE,
            verdict="degraded",
            said="it comes and goes",
            remedy="Do not give it a long run before its parts were looked at (`headway qualify --history NODE`).",
        )
    yield from _slower(now, [past.rates for past in earlier], tolerances(sku).own_warn)


def _warned(verdict: NodeVerdict) -> set[str]:
    return {
        r.check
        for r in verdict.reasons
        if r.verdict == "degraded" and r.source != SOURCE and not r.check.startswith(SETTINGS)
    }


def _again(now: NodeVerdict, earlier: Sequence[NodeVerdict]) -> Iterator[Reason]:
    last = earlier[1 - WARNINGS :]
    if len(last) < WARNINGS - 1:
        return
    for check in sorted(_warned(now).intersection(*map(_warned, last))):
        yield Reason(
            node=now.name,
            check=f"{check} in {PAST}",
            measured=float(WARNINGS),
            unit="warnings in a row",
            limit=f"<= {WARNINGS - 1}",
            source=SOURCE,
            verdict="failed",
            said="a warning that stays is a fault",
            remedy="Take the machine out and have it repaired or replaced.",
        )


def _slower(now: NodeVerdict, earlier: Sequence[Mapping[str, float]], least: float) -> Iterator[Reason]:
    for check, rate in sorted(now.rates.items()):
        before = [rates[check] for rates in earlier if check in rates]
        usual = statistics.median(before) if len(before) >= EARLIER else 0.0
        if usual > 0 and rate < least * usual:
            yield Reason(
                node=now.name,
                check=f"{check} against {PAST}",
                measured=rate,
                limit=f">= {least * usual:.4g}",
                source=SOURCE,
                verdict="degraded",
                said=f"{rate / usual:.0%} of its median of {len(before)} earlier qualifications, {usual:.4g}",
                remedy="See what changed: driver, clocks, power cap, temperature, other work on the machine.",
            )
