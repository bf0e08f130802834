"""The verdict on a cluster that Headway cannot reach, by logs that others wrote there.

Each log is judged by itself: what keeps it from counting (nccl_findings.py, megatron_findings.py, aznhc_findings.py), and its
figures. All together are judged as a measurement of ours is (judge.py). What is new here: a log that says nothing is unknown and
closes the gate, a machine of which no log says anything good is unknown, and a log that the hardware's file has no figure for
neither clears nor condemns.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tasks.hardware.sku import Sku, plain_name
from tasks.qualification import aznhc_findings, megatron_findings, nccl_findings
from tasks.qualification.judge import judge
from tasks.qualification.limits import bandwidths
from tasks.qualification.log_files import Log
from tasks.qualification.log_names import one_name
from tasks.qualification.measured import Measurement, RankReport, Sweep
from tasks.qualification.merged import Merged, merged
from tasks.qualification.probes import of_probe
from tasks.qualification.sweeps import of_sweep
from tasks.qualification.training import of_training
from tasks.qualification.transports import of_transport
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict, Reason, worst
from tasks.qualification_config import BenchmarkConfig
from tasks.qualification_names import Verdict

SOURCE = "Headway: what is missing is unknown"
ORDER: tuple[Verdict, ...] = ("failed", "unknown", "degraded", "healthy")
"""Of a machine's reasons: what was seen to be bad first."""
NOTHING = "no limit"
"""Check of a reason that says that nothing is known to judge a log by."""


def seen(reasons: Iterable[Reason]) -> Verdict:
    """Of one machine or log: what was seen to be bad has failed, whatever else is unknown of it."""
    found = [reason.verdict for reason in reasons]
    return "failed" if "failed" in found else worst(*found)


@dataclass(frozen=True)
class JudgedLog:
    """A log, its verdict, and why."""

    log: Log
    own: tuple[Reason, ...] = ()
    """Of the log by itself: what keeps it from counting, what it says is wrong."""
    figures: tuple[Reason, ...] = ()
    """Of its figures, which are judged again with those of all logs."""
    sweeps: tuple[Sweep, ...] = ()
    reports: tuple[RankReport, ...] = ()

    @property
    def reasons(self) -> tuple[Reason, ...]:
        return self.own + self.figures

    @property
    def verdict(self) -> Verdict:
        return seen(self.reasons)

    @property
    def soft(self) -> bool:
        """Whether nothing is wrong with it but that there is nothing to judge it by."""
        return bool(self.reasons) and all(reason.check.endswith(NOTHING) for reason in self.reasons)


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
    judged = [_judged(log, sku, config) for log in _same_names(logs)]
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


def _judged(log: Log, sku: Sku, config: BenchmarkConfig) -> JudgedLog:
    sweeps = _sweeps(log)
    reports = tuple(_reports(log))
    own = [*_unread(log), *_of_run(log, sku), *_other_size(log, sku), *_of_words(log, sku)]
    figures = [*_of_figures(log, sweeps, sku, config)]
    for report in reports:
        found = [reason for probe in report.probes for reason in of_probe(report.node, probe, sku)]
        (figures if report.node else own).extend(found)
    if not (own or figures) and _nothing_to_judge_by(log, sweeps, sku):
        own = [_missing(log, f"{_what(log)} {NOTHING}", "no figure of it in the hardware's file", "a limit")]
    placed = [reason.model_copy(update={"where": reason.where or log.path}) for reason in own]
    return JudgedLog(log, _of_one(placed, log), _of_one(figures, log), sweeps, reports)


def _of_one(reasons: Sequence[Reason], log: Log) -> tuple[Reason, ...]:
    """What is said of all machines of a log that has one is said of that."""
    alone = log.nodes[0] if len(log.nodes) == 1 else ""
    return tuple(
        reason.model_copy(update={"node": reason.node or alone, "nodes": () if alone or reason.node else log.nodes})
        for reason in reasons
    )


def _unread(log: Log) -> Iterator[Reason]:
    for problem in log.problems:
        yield _missing(log, "log", problem, "a log that can be read")
    if (log.nccl or log.aznhc) and not log.nodes:
        yield _missing(log, "machines", "neither the log nor its file's name says which it is of", "names of machines")


def _missing(log: Log, check: str, said: str, limit: str) -> Reason:
    return Reason(
        node="", check=check, where=log.path, measured=said, limit=limit, source=SOURCE, verdict="unknown", nodes=log.nodes,
        remedy="Bring the log that belongs here, or measure again (`headway qualify`).",
    )  # fmt: skip


def _sweeps(log: Log) -> tuple[Sweep, ...]:
    """Of the run, with the machines as all logs call them."""
    if log.nccl is None:
        return ()
    names = one_name((*log.nodes, *log.nccl.hosts))
    transport = log.words.transports if log.words else ()
    sweeps = nccl_findings.sweeps_of(log.nccl, log.nodes, transport)
    return tuple(
        sweep.model_copy(update={"nodes": tuple(names.get(name, name) for name in sweep.nodes)}) for sweep in sweeps
    )


def _reports(log: Log) -> Iterator[RankReport]:
    for run in log.aznhc:
        name = one_name((*log.nodes, run.host)).get(run.host) or next(iter(log.nodes), "")
        probes = aznhc_findings.probes_of(run)
        yield RankReport(rank=0, local_rank=0, node=name, host=run.host or name, probes=probes)


def _of_run(log: Log, sku: Sku) -> Iterator[Reason]:
    if log.nccl:
        yield from nccl_findings.findings(log.nccl, sku, log.nodes)
    if log.training:
        yield from megatron_findings.findings(log.training, sku, log.nodes)


def _of_figures(log: Log, sweeps: tuple[Sweep, ...], sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    for sweep in merged(sweeps):
        found = of_sweep(sweep, sku, ours=False)
        yield from (reason.model_copy(update={"nodes": sweep.nodes}) for reason in found)
    if log.training and (point := megatron_findings.point_of(log.training, log.nodes)):
        yield from of_training(Measurement(training=(point,)), sku, config)


def _of_words(log: Log, sku: Sku) -> Iterator[Reason]:
    """NCCL's words without a test, judged as those of a sweep without rows."""
    if log.tool != "nccl" or not log.words:
        return
    used = log.words.transports
    between = len(log.nodes) > 1 or any(one.startswith("NET") for one in used)
    sweep = Merged("all_reduce", "all" if between else "node", log.nodes, (), 0, used, "measured", "", "nccl")
    for reason in of_transport(sweep, sku):
        yield reason.model_copy(update={"check": "transport"})


def _other_size(log: Log, sku: Sku) -> Iterator[Reason]:
    """AzNHC of another size checks by that size's limits."""
    names = one_name((*log.nodes, *(run.host for run in log.aznhc)))
    for run in log.aznhc:
        said = plain_name(run.about.get("sku", ""))
        if said and said not in map(plain_name, (sku.name, *sku.aliases)):
            found = _missing(log, "aznhc VM SKU", run.about["sku"], f"= {sku.name}")
            yield found.model_copy(update={"node": names.get(run.host, "")})


def _nothing_to_judge_by(log: Log, sweeps: tuple[Sweep, ...], sku: Sku) -> bool:
    if log.nccl:
        found = [one for sweep in sweeps for one in bandwidths(sku, sweep.collective, sweep.scope, len(sweep.nodes))]
        return not any(one.warn is not None or one.fail is not None for one in found)
    if log.training:
        return "training_tflops" not in sku.limits
    return log.tool == "nccl" and not any(sku.transports.values())


def _what(log: Log) -> str:
    return (log.nccl.collective if log.nccl else "") or log.tool


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
