"""What was measured against what the hardware must show, and against the other machines."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tasks.hardware.sku import BusBandwidth, Limit, Sku
from tasks.qualification.history import Past
from tasks.qualification.measured import Measurement, Probe, RankReport, Sweep
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, Reason, worst
from tasks.qualification_config import BenchmarkConfig
from tasks.qualification_names import Verdict
from tasks.settings import digest


def judge(measurement: Measurement, sku: Sku, config: BenchmarkConfig, history: Sequence[Past] = ()) -> ClusterVerdict:
    """The verdict on every machine, and on what they did together. What is missing is unknown."""
    nodes = tuple(_node(name, measurement, sku, config) for name in measurement.nodes)
    reasons = tuple(_of_all(measurement, sku))
    absent = measurement.expected_nodes - len(nodes)
    unknown: tuple[Verdict, ...] = ("unknown",) if absent > 0 or not nodes else ()
    return ClusterVerdict(
        verdict=worst(*unknown, *(node.verdict for node in nodes), *(reason.verdict for reason in reasons)),
        sku=sku.name,
        sku_digest=digest(sku.model_dump(mode="json")),
        nodes=nodes,
        reasons=reasons,
    )


def _node(name: str, measurement: Measurement, sku: Sku, config: BenchmarkConfig) -> NodeVerdict:
    mine = [report for report in measurement.ranks if report.node == name]
    reasons = [
        reason
        for report in mine
        for probe in report.probes
        for reason in (*_absolute(report, probe, sku), *_relative(report, probe, measurement, config))
    ]
    if len(mine) < measurement.ranks_per_node:
        missing = f"{len(mine)} of {measurement.ranks_per_node} ranks have a result"
        reasons.append(
            Reason(
                node=name,
                check="result",
                measured=missing,
                limit="all",
                source="Headway",
                verdict="unknown",
                remedy="Read the job's logs.",
            )
        )
    return NodeVerdict(name=name, verdict=worst(*(reason.verdict for reason in reasons)), reasons=tuple(reasons))


def _absolute(report: RankReport, probe: Probe, sku: Sku) -> Iterator[Reason]:
    limit = sku.limits.get(probe.check)
    if limit and isinstance(probe.measured, float) and isinstance(limit.fail, float) and probe.measured < limit.fail:
        yield _reason(report, probe, limit)


def _reason(report: RankReport, probe: Probe, limit: Limit) -> Reason:
    return Reason(
        node=report.node,
        where=probe.where,
        check=probe.check,
        measured=probe.measured,
        unit=probe.unit,
        limit=f">= {limit.fail}",
        source=limit.source,
        verdict="failed",
    )


def _relative(report: RankReport, probe: Probe, measurement: Measurement, config: BenchmarkConfig) -> Iterator[Reason]:
    others = [
        p.peers
        for r in measurement.ranks
        if r.rank != report.rank
        for p in r.probes
        if p.check == probe.check and p.peers
    ]
    if not others or probe.peers is None:
        return
    limit = config.min_of_peers * statistics.median(others)
    if probe.peers < limit:
        yield Reason(
            node=report.node,
            where=probe.where,
            check=f"{probe.check} against its peers",
            measured=probe.peers,
            unit=probe.unit,
            limit=f">= {limit:.4g}",
            source="median of the others",
            verdict="failed",
            remedy="Slower than its peers while it had its core: throttled, or a bad part? Take the machine out.",
        )


def _of_all(measurement: Measurement, sku: Sku) -> Iterator[Reason]:
    for sweep in measurement.sweeps:
        for limit in sku.collectives:
            if (limit.collective, limit.scope) == (sweep.collective, sweep.scope):
                yield from _busbw(sweep, limit)


def _busbw(sweep: Sweep, limit: BusBandwidth) -> Iterator[Reason]:
    for row in sweep.rows:
        if row.wrong:
            remedy = "A wrong sum is silent data corruption."
            yield _together(sweep, "wrong elements", float(row.wrong), "", "0", "correctness", remedy)
        if row.bytes >= limit.bytes and limit.fail and (row.busbw or 0.0) < limit.fail:
            remedy = "Look at the network."
            yield _together(sweep, "bus bandwidth", row.busbw, "GB/s", f">= {limit.fail}", limit.source, remedy)


def _together(
    sweep: Sweep, what: str, measured: float | None, unit: str, limit: str, source: str, remedy: str
) -> Reason:
    return Reason(
        node="",
        check=f"{sweep.collective}: {what}",
        measured=measured,
        unit=unit,
        limit=limit,
        source=source,
        verdict="failed",
        remedy=remedy,
    )
