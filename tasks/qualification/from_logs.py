"""The verdict on a cluster that Headway cannot reach, by logs that others wrote there.

Each log is judged by itself (one_log.py). All together are judged as a measurement of ours is (judge.py). What is new here: a
log that says nothing is unknown and closes the gate, a machine of which no log says anything good is unknown, and a log that
the hardware's file has no figure for neither clears nor condemns.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tasks.hardware.sku import Sku
from tasks.qualification import megatron_findings
from tasks.qualification.judge import judge
from tasks.qualification.log_files import Log
from tasks.qualification.log_names import one_name
from tasks.qualification.measured import Measurement
from tasks.qualification.one_log import JudgedLog, judged_log, seen
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict, Reason, worst
from tasks.qualification_config import BenchmarkConfig
from tasks.qualification_names import Verdict

ORDER: tuple[Verdict, ...] = ("failed", "unknown", "degraded", "healthy")
"""Of a machine's reasons: what was seen to be bad first."""


@dataclass(frozen=True)
class LogsVerdict:
    """All of it."""

    verdict: Verdict
    sku: str
    expires: datetime.datetime
    nodes: tuple[NodeVerdict, ...] = ()
    pairs: tuple[PairVerdict, ...] = ()
    reasons: tuple[Reason, ...] = ()
    """Of no machine alone."""
    logs: tuple[JudgedLog, ...] = ()


def judge_logs(logs: Sequence[Log], sku: Sku, config: BenchmarkConfig, *, now: datetime.datetime) -> LogsVerdict:
    """The verdict on all machines that the logs name. It expires as the oldest log does."""
    judged = [judged_log(log, sku, config) for log in _same_names(logs)]
    measurement = _measurement(judged)
    together = judge(measurement, sku, config)
    soft = all(log.soft for log in judged)
    doubts = [*(reason for log in judged if soft or not log.soft for reason in log.own), *together.reasons]
    nodes = tuple(_node(name, judged, together.nodes, doubts) for name in _names(judged))
    of_all = [*doubts, *_of_one_log(judged, doubts)]
    reasons = tuple(dict.fromkeys(reason for reason in of_all if not reason.node and _says_something(reason, judged)))
    return LogsVerdict(
        verdict=_of_cluster(judged, together, nodes),
        sku=sku.name,
        expires=min((log.written for log in logs if log.written), default=now)
        + datetime.timedelta(hours=config.max_age_hours),
        nodes=nodes,
        pairs=_pairs(judged, together.pairs),
        reasons=reasons,
        logs=tuple(judged),
    )


def _of_one_log(judged: Sequence[JudgedLog], doubts: Sequence[Reason]) -> Iterator[Reason]:
    """What is bad in one log and good in another of the same machines: the better one is not the last word."""
    said = {(reason.check, reason.limit) for reason in doubts}
    for log in judged:
        for reason in () if log.soft else log.figures:
            if not reason.node and (reason.check, reason.limit) not in said:
                yield reason.model_copy(update={"where": reason.where or log.log.path})


def _same_names(logs: Sequence[Log]) -> list[Log]:
    """The logs, a machine that is named by its whole name in one and by its first part in another by the same."""
    names = one_name(name for log in logs for name in log.nodes)
    return [replace(log, nodes=tuple(dict.fromkeys(names[name] for name in log.nodes))) for log in logs]


def _measurement(judged: Sequence[JudgedLog]) -> Measurement:
    """What the logs say together; a run over some machines of a larger one is a part of it, so that faults can be located."""
    sweeps = [sweep for log in judged for sweep in log.sweeps]
    largest = {sweep.collective: {*sweep.nodes} for sweep in sorted(sweeps, key=lambda sweep: len(sweep.nodes))}
    parts = [
        sweep.model_copy(update={"scope": "part"})
        if sweep.scope == "all" and {*sweep.nodes} < largest[sweep.collective]
        else sweep
        for sweep in sweeps
    ]
    reports = [report for log in judged for report in log.reports if report.node]
    points = [megatron_findings.point_of(log.log.training, log.log.nodes) for log in judged if log.log.training]
    return Measurement(
        nodes=tuple(_names(judged)),
        ranks=tuple(report.model_copy(update={"rank": rank}) for rank, report in enumerate(reports)),
        sweeps=tuple(parts),
        training=tuple(point for point in points if point),
    )


def _names(judged: Sequence[JudgedLog]) -> list[str]:
    return list(dict.fromkeys(name for log in judged for name in log.log.nodes))


def _says_something(reason: Reason, judged: Sequence[JudgedLog]) -> bool:
    """Not that a measurement is empty, where logs say more exactly what is missing."""
    return reason.check != "measurement" or not any(log.reasons for log in judged)


def _node(
    name: str, judged: Sequence[JudgedLog], nodes: Sequence[NodeVerdict], doubts: Sequence[Reason]
) -> NodeVerdict:
    """A machine's: its own reasons; what is said of several it shares unless another log clears it; no good word is unknown."""
    found = next((node for node in nodes if node.name == name), NodeVerdict(name=name, verdict="healthy"))
    of_logs = (reason for log in judged if not log.soft for reason in log.figures if reason.node == name)
    mine = [*found.reasons, *of_logs, *(reason for reason in doubts if reason.node == name)]
    good = any(_clears(log, name) for log in judged)
    for reason in doubts:
        if not reason.node and name in reason.nodes and (reason.verdict == "degraded" or not good):
            mine.append(_shared(reason, name))
    mine = list({(r.check, r.where, r.said if r.measured is None else str(r.measured)): r for r in mine}.values())
    mine.sort(key=lambda reason: ORDER.index(reason.verdict))
    if not mine and not good:
        mine = [
            reason for log in judged if name in log.log.nodes for reason in log.reasons if reason.node in ("", name)
        ]
    return found.model_copy(update={"verdict": seen(mine), "reasons": tuple(mine)})


def _clears(log: JudgedLog, name: str) -> bool:
    """Whether a log has a good word for a machine: it was judged, and neither it nor all of the log's together is bad."""
    about = [reason for reason in log.reasons if reason.node in ("", name)]
    return name in log.log.nodes and not log.soft and seen(about) in ("healthy", "degraded")


def _shared(reason: Reason, name: str) -> Reason:
    """What several machines did badly together is unknown of each."""
    verdict: Verdict = "degraded" if reason.verdict == "degraded" else "unknown"
    said = f"{reason.said}; it is one of {len(reason.nodes)} machines, and no log clears it".lstrip("; ")
    return reason.model_copy(update={"node": name, "nodes": (), "verdict": verdict, "said": said})


def _pairs(judged: Sequence[JudgedLog], pairs: Sequence[PairVerdict]) -> tuple[PairVerdict, ...]:
    """Pairs by their figures, and no better than the logs that they come from."""
    found = {(pair.a, pair.b): pair for pair in pairs}
    logs: dict[tuple[str, str], list[JudgedLog]] = {}
    for log in judged:
        if log.log.nccl and len(log.log.nodes) == 2 and log.log.nccl.groups < 2:
            a, b = sorted(log.log.nodes)
            logs.setdefault((a, b), []).append(log)
    for (a, b), mine in logs.items():
        pair = found.get((a, b), PairVerdict(a=a, b=b, busbw_gb_s=None, verdict="healthy"))
        hard = [log.verdict for log in mine if not log.soft] or ["unknown"]
        verdict = "failed" if "failed" in (pair.verdict, *hard) else worst(pair.verdict, *hard)
        found[a, b] = pair.model_copy(update={"verdict": verdict})
    return tuple(pair for _, pair in sorted(found.items()))


def _of_cluster(judged: Sequence[JudgedLog], together: ClusterVerdict, nodes: Sequence[NodeVerdict]) -> Verdict:
    """The worst of what logs, machines and all machines together show; a machine that nothing speaks for is unknown."""
    hard = [log for log in judged if not log.soft]
    named = {name for log in hard for name in log.log.nodes}
    silent: list[Verdict] = ["unknown"] if not hard or any(node.name not in named for node in nodes) else []
    said = [reason for reason in together.reasons if _says_something(reason, judged)]
    jointly = [seen(reasons) for reasons in (said, *(node.reasons for node in together.nodes))]
    return worst(*silent, *(log.verdict for log in hard), *jointly)
