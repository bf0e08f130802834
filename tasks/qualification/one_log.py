"""One log that others wrote, judged by itself: what keeps it from counting, and its figures against the hardware's file.

What all logs say together is from_logs.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tasks.common.names import Verdict
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.sku import Sku, plain_name
from tasks.qualification import aznhc_findings, megatron_findings, nccl_findings
from tasks.qualification.limits import all_gpus, bandwidths
from tasks.qualification.log_files import Log, one_name
from tasks.qualification.measured import Measurement, RankReport, Sweep
from tasks.qualification.merged import Merged, merged
from tasks.qualification.probes import of_probe
from tasks.qualification.sweeps import of_sweep, of_transport
from tasks.qualification.training import of_training
from tasks.qualification.verdicts import Reason, worst

SOURCE = "Headway: what is missing is unknown"
NOTHING = "no limit"
"""Check of a reason that says that nothing is known to judge a log by."""
FEWER = f"of fewer GPUs: {NOTHING}"
"""The same of a run on fewer GPUs than limits hold for: what it reached is compared with the same of other machines alone."""


def seen(reasons: Iterable[Reason]) -> Verdict:
    """Of one machine or log: what was seen to be bad has failed, whatever else is unknown of it."""
    results = [reason.verdict for reason in reasons]
    return "failed" if "failed" in results else worst(*results)


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

    @property
    def fewer(self) -> bool:
        """Whether it is of fewer GPUs than limits hold for."""
        return any(reason.check.endswith(FEWER) for reason in self.own)

    @property
    def faults(self) -> tuple[Reason, ...]:
        """What is wrong with it; not that there is nothing to judge it by."""
        return tuple(reason for reason in self.reasons if not reason.check.endswith(NOTHING))


def judged_log(log: Log, sku: Sku, config: BenchmarkConfig) -> JudgedLog:
    sweeps = _sweeps(log)
    reports = tuple(_reports(log))
    own = [*_unread(log), *_of_run(log, sku), *_other_size(log, sku), *_of_words(log, sku)]
    figures = [*_of_figures(log, sweeps, sku, config)]
    for report in reports:
        results = [reason for probe in report.probes for reason in of_probe(report.node, probe, sku)]
        (figures if report.node else own).extend(results)
    own += _fewer_gpus(log, sweeps, sku)
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


def _missing(log: Log, check: str, text: str, limit: str) -> Reason:
    return Reason(
        node="", check=check, where=log.path, measured=text, limit=limit, source=SOURCE, verdict="unknown", nodes=log.nodes,
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
        result = of_sweep(sweep, sku, ours=False)
        yield from (reason.model_copy(update={"nodes": sweep.nodes}) for reason in result)
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
        output = plain_name(run.about.get("sku", ""))
        if output and output not in map(plain_name, (sku.name, *sku.aliases)):
            result = _missing(log, "aznhc VM SKU", run.about["sku"], f"= {sku.name}")
            yield result.model_copy(update={"node": names.get(run.host, "")})


def _fewer_gpus(log: Log, sweeps: tuple[Sweep, ...], sku: Sku) -> Iterator[Reason]:
    fewer = [sweep for sweep in sweeps if not all_gpus(sku, sweep.ranks, len(sweep.nodes))]
    for sweep in fewer[:1]:
        all_of_them = int(sku.specs["gpus"].value) * len(sweep.nodes)
        limit = f"= {all_of_them}: limits of {sku.name} hold for all GPUs of a machine"
        yield _missing(log, f"{_what(log)} {FEWER}", f"{sweep.ranks} GPUs of {len(sweep.nodes)} machines", limit)


def _nothing_to_judge_by(log: Log, sweeps: tuple[Sweep, ...], sku: Sku) -> bool:
    if log.nccl:
        results = [one for sweep in sweeps for one in bandwidths(sku, sweep.collective, sweep.scope, len(sweep.nodes))]
        return not any(one.warn is not None or one.fail is not None for one in results)
    if log.training:
        return "training_tflops" not in sku.limits
    return log.tool == "nccl" and not any(sku.transports.values())


def _what(log: Log) -> str:
    return (log.nccl.collective if log.nccl else "") or log.tool
