"""The verdict on a cluster that Headway cannot reach, by logs that others wrote there.

Each log is judged by itself (one_log.py). All together are judged as a measurement of ours is (judge.py). What is new here: a
log that says nothing is unknown and closes the gate, a machine of which no log says anything good is unknown, and a log that
the hardware's file has no figure for neither clears nor condemns. Runs on fewer GPUs than the file's limits hold for are compared
with each other: that condemns, and clears a machine of being slower than the others; whether all of them are slow is unknown.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tasks.common.names import Verdict
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku
from tasks.qualification import megatron_findings
from tasks.qualification.judge import judge
from tasks.qualification.log_files import Log, one_name
from tasks.qualification.measured import Measurement
from tasks.qualification.one_log import FEWER, SOURCE, JudgedLog, judged_log, seen
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict, Reason, worst

COMPARED = 3
"""Runs of the same kind on other machines before they are a comparison."""
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
    soft, compared = all(log.soft for log in judged), _compared(judged)
    own = (reason for log in judged if soft or not log.soft for reason in log.own)
    doubts = [reason for reason in own if not reason.check.endswith(FEWER)]
    doubts += [*together.reasons, *_levels(judged, compared, sku)]
    nodes = tuple(_node(name, judged, together.nodes, doubts, compared) for name in _names(judged))
    of_all = [*doubts, *_of_one_log(judged, doubts)]
    reasons = tuple(dict.fromkeys(reason for reason in of_all if not reason.node and _says_something(reason, judged)))
    return LogsVerdict(
        verdict=_of_cluster(judged, together, nodes, compared),
        sku=sku.name,
        expires=min((log.written for log in logs if log.written), default=now)
        + datetime.timedelta(hours=config.max_age_hours),
        nodes=nodes,
        pairs=_pairs(judged, together.pairs, compared),
        reasons=reasons,
        logs=tuple(judged),
    )


def _compared(judged: Sequence[JudgedLog]) -> set[str]:
    """Machines whose runs on fewer GPUs can be compared with the same on others."""
    alike: dict[tuple[object, ...], set[tuple[str, ...]]] = {}
    for log in judged:
        for sweep in log.sweeps if log.fewer else ():
            kind = (sweep.collective, sweep.scope, len(sweep.nodes), sweep.ranks, max(row.bytes for row in sweep.rows))
            alike.setdefault(kind, set()).add(tuple(sorted(sweep.nodes)))
    return {name for runs in alike.values() if len(runs) >= COMPARED for nodes in runs for name in nodes}


def _levels(judged: Sequence[JudgedLog], compared: set[str], sku: Sku) -> Iterator[Reason]:
    """What a comparison does not say."""
    proven = {name for log in judged for name in log.log.nodes if _clears(log, name)}
    if compared - proven:
        yield Reason(
            node="",
            check="level of all machines",
            measured="compared with each other alone",
            limit=f"runs on all {int(sku.specs['gpus'].value)} GPUs of a machine, for which {sku.name} has limits",
            source=SOURCE,
            verdict="unknown",
            said="which machine is slower than the others is known; whether all of them are slow is not",
            remedy="Bring logs of runs on all GPUs of the machines, or measure them: `headway qualify`.",
            nodes=tuple(sorted(compared - proven)),
        )


def _of_one_log(judged: Sequence[JudgedLog], doubts: Sequence[Reason]) -> Iterator[Reason]:
    """What is bad in one log and good in another of the same machines: the better one is not the last word."""
    messages = {(reason.check, reason.limit) for reason in doubts}
    for log in judged:
        for reason in () if log.soft else log.figures:
            if not reason.node and (reason.check, reason.limit) not in messages:
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
    name: str, judged: Sequence[JudgedLog], nodes: Sequence[NodeVerdict], doubts: Sequence[Reason], compared: set[str]
) -> NodeVerdict:
    """A machine's: its own reasons; what is said of several it shares unless another log clears it; no good word is unknown."""
    result = next((node for node in nodes if node.name == name), NodeVerdict(name=name, verdict="healthy"))
    of_logs = (reason for log in judged if not log.soft for reason in log.figures if reason.node == name)
    mine = [*result.reasons, *of_logs, *(reason for reason in doubts if reason.node == name)]
    good = name in compared or any(_clears(log, name) for log in judged)
    for reason in doubts:
        if not reason.node and name in reason.nodes and (reason.verdict == "degraded" or not good):
            mine.append(_shared(reason, name))
    mine = list({(r.check, r.where, r.said if r.measured is None else str(r.measured)): r for r in mine}.values())
    mine.sort(key=lambda reason: ORDER.index(reason.verdict))
    if not mine and not good:
        mine = [
            reason for log in judged if name in log.log.nodes for reason in log.reasons if reason.node in ("", name)
        ]
    return result.model_copy(update={"verdict": seen(mine), "reasons": tuple(mine)})


def _clears(log: JudgedLog, name: str) -> bool:
    """Whether a log has a good word for a machine: it was judged, and neither it nor all of the log's together is bad."""
    about = [reason for reason in log.reasons if reason.node in ("", name)]
    return name in log.log.nodes and not (log.soft or log.fewer) and seen(about) in ("healthy", "degraded")


def _shared(reason: Reason, name: str) -> Reason:
    """What several machines did badly together is unknown of each."""
    verdict: Verdict = "degraded" if reason.verdict == "degraded" else "unknown"
    output = f"{reason.said}; it is one of {len(reason.nodes)} machines, and no log clears it".lstrip("; ")
    return reason.model_copy(update={"node": name, "nodes": (), "verdict": verdict, "said": output})


def _pairs(judged: Sequence[JudgedLog], pairs: Sequence[PairVerdict], compared: set[str]) -> tuple[PairVerdict, ...]:
    """Pairs by their figures, and no better than the logs that they come from."""
    result = {(pair.a, pair.b): pair for pair in pairs}
    logs: dict[tuple[str, str], list[JudgedLog]] = {}
    for log in judged:
        if log.log.nccl and len(log.log.nodes) == 2 and log.log.nccl.groups < 2:
            a, b = sorted(log.log.nodes)
            logs.setdefault((a, b), []).append(log)
    for (a, b), mine in logs.items():
        pair = result.get((a, b), PairVerdict(a=a, b=b, busbw_gb_s=None, verdict="healthy"))
        hard = [seen(log.faults) for log in mine if not log.soft or (log.fewer and {a, b} <= compared)] or ["unknown"]
        verdict = "failed" if "failed" in (pair.verdict, *hard) else worst(pair.verdict, *hard)
        result[a, b] = pair.model_copy(update={"verdict": verdict})
    return tuple(pair for _, pair in sorted(result.items()))


def _of_cluster(
    judged: Sequence[JudgedLog], together: ClusterVerdict, nodes: Sequence[NodeVerdict], compared: set[str]
) -> Verdict:
    """The worst of what logs, machines and all machines together show; a machine that nothing speaks for is unknown, and so are
    machines that were only compared with each other, unless one of them failed."""
    hard = [log for log in judged if not log.soft]
    named = {name for log in hard if not log.fewer for name in log.log.nodes}
    messages = [reason for reason in together.reasons if _says_something(reason, judged)]
    jointly = [seen(reasons) for reasons in (messages, *(node.reasons for node in together.nodes))]
    shown = worst(*(seen(log.faults) for log in hard), *jointly)
    silent = {node.name for node in nodes} - named
    if not silent and hard:
        return shown
    return "failed" if shown == "failed" and silent <= compared else "unknown"
