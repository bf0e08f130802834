"""A verdict as the checks of a gate, and as the plain values that `headway qualify --json` and its history tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.artifacts import Check
from tasks.common.names import Verdict
from tasks.qualification.remaining import Remaining
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, Reason

OPEN: tuple[Verdict, ...] = ("healthy", "degraded")
PAIR = {"a", "b", "busbw_gb_s", "verdict", "said"}
REMEDY = "Repair or replace what is named, set benchmark.spare_nodes, or lower benchmark.act.min_nodes."


def gate_checks(verdict: ClusterVerdict, left: Remaining, *, needed: int) -> tuple[Check, ...]:
    """Healthy passes, degraded is warned, failed and unknown close the gate, unless the machine is left out and enough remain."""
    sound = len(usable(verdict, left))
    passed = left.enough and sound >= needed
    enough = Check(
        name="machines that qualified",
        measured=float(sound),
        limit=f">= {needed}",
        passed=passed,
        warned=passed and bool(left.excluded),
        remedy="" if passed else REMEDY,
    )
    # Whether a machine's verdict is no concern of the runs to come.
    nodes = tuple(
        check for node in verdict.nodes for check in _of_node(node, spared=left.enough and node.name not in left.nodes)
    )
    checks = (enough, *nodes, *(_check(reason, spared=False) for reason in left.reasons))
    if left.verdict in OPEN or not all(check.passed for check in checks):
        return checks
    return (
        *checks,
        Check(name="verdict", measured=left.verdict, limit="healthy or degraded", passed=False, remedy=REMEDY),
    )


def usable(verdict: ClusterVerdict, left: Remaining) -> tuple[str, ...]:
    """Machines that are left and sound, healthiest first; where none can be left out, some that are left are not."""
    sound = set(verdict.named(*OPEN))
    return tuple(name for name in left.nodes if name in sound)


def as_reason(reason: Reason) -> dict[str, Any]:
    """One reason; the sentence is for people."""
    shown = {
        "measured": reason.measured if reason.measured is not None else reason.said or None,
        "sentence": reason.sentence,
    }
    payload = reason.model_dump(
        mode="json", include={"check", "where", "measured", "unit", "limit", "source", "verdict", "remedy"}
    )
    return {**payload, **shown}


def as_told(verdict: ClusterVerdict) -> dict[str, Any]:
    """A verdict as `--json` has it, whether it is of a measurement or of logs."""
    return {
        "verdict": verdict.verdict,
        "sku": verdict.sku,
        "nodes": [as_node(node) for node in verdict.nodes],
        "pairs": [pair.model_dump(mode="json", include=PAIR) for pair in verdict.pairs],
        "reasons": [as_reason(reason) for reason in verdict.reasons],
    }


def as_node(node: NodeVerdict) -> dict[str, Any]:
    """A machine as `--json` has it."""
    return {
        "name": node.name,
        "verdict": node.verdict,
        "reasons": [as_reason(reason) for reason in node.reasons],
        "rates": node.rates,
    }


def _of_node(node: NodeVerdict, *, spared: bool) -> Iterator[Check]:
    if not node.reasons:
        sound = node.verdict in OPEN
        yield Check(name=node.name, measured=node.verdict, limit="healthy", passed=sound or spared, warned=spared)
    for reason in node.reasons:
        yield _check(reason, spared=spared)


def _check(reason: Reason, *, spared: bool) -> Check:
    passed = reason.verdict in OPEN or spared
    return Check(
        name=" ".join(part for part in (reason.node, reason.where, reason.check) if part),
        measured=reason.measured if reason.measured is not None else (reason.said or "nothing was measured"),
        limit=f"{reason.limit} {reason.unit}".strip(),
        passed=passed,
        warned=passed,
        remedy=reason.remedy,
    )
