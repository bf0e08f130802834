"""The verdict on a cluster that Headway cannot reach, by logs that others wrote there.

Each log is judged by itself. All together are judged as a measurement of ours is (judge.py). What is new here: a
log that says nothing is unknown and closes the gate, a machine of which no log says anything good is unknown, and a log that
the hardware's file has no figure for neither clears nor condemns. Runs on fewer GPUs than the file's limits hold for are compared
with each other: that condemns, and clears a machine of being slower than the others; whether all of them are slow is unknown.

Files of logs, read: which files of a folder are logs, what is in each, and which machines it is of.

A log that is missing, empty, or of nothing that is known is a value too, with the reason: it must not be forgotten.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from tasks.config.qualification import BenchmarkConfig, Verdict
from tasks.formats.aznhc import NhcRun, is_aznhc, read_aznhc
from tasks.formats.log_text import text_of
from tasks.formats.nccl_run import NcclLog, NcclRun, read_log, read_nccl_json
from tasks.formats.nccl_tests import read_nccl_tests, words_during
from tasks.formats.training_logs import MegatronRun, read_megatron
from tasks.hardware.sku import Sku, plain_name
from tasks.qualification import aznhc_findings, nccl_findings
from tasks.qualification.judge import judge
from tasks.qualification.limits import all_gpus, bandwidths, cited, of_probe
from tasks.qualification.measured import Measurement, RankReport, Sweep, TrainingPoint
from tasks.qualification.peers import of_training
from tasks.qualification.sweeps import Merged, merged, of_sweep, of_transport
from tasks.qualification.verdicts import ClusterVerdict, NodeVerdict, PairVerdict, Reason, worst

# Which machines a log is of, where it does not say: by the names of its file and folder. One name of a machine for
# several.


_PARTS = re.compile(r"[_+,@=\s]+|-vs-|\.")
_MACHINE = re.compile(
    r"(?=.*\d)(?:(?:[a-z]*vm|[a-z]*node|host|gpu|compute|worker|hpc|ip|slurm|nd|aks|batch)[a-z]*-?[\w-]*\d|[a-z][a-z\d]*(?:-[a-z\d]+)*-\d+)",
    re.IGNORECASE,
)
"""Names that machines have in clusters: vm-07, mynode-042, ip-0A000004, hpc-1, aks-gpu-123-vmss000001."""
_NO_MACHINE = re.compile(
    r"(?:nd|nc|hb)\d+\w*|(?:job|run|test|try|round|slurm|part|pair|step)-?\d+|nodes?\d*|\d+[a-z]*", re.IGNORECASE
)


def machines_of(path: str, known: Iterable[str] = ()) -> tuple[str, ...]:
    """Machines that a path names: those that are known from other logs, else what looks like one; none is no guess."""
    pure = PurePath(path)
    for text in (pure.name, pure.parent.name):
        results = [
            name
            for name in sorted(known, key=len, reverse=True)
            if (re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])|(?:^|_){re.escape(name)}(?=_|$)", text) is not None)
        ]
        if results:
            return tuple(sorted(results, key=text.lower().index))
    for text in (pure.name, pure.parent.name):
        results = [part for part in _PARTS.split(text) if _MACHINE.fullmatch(part) and not _NO_MACHINE.fullmatch(part)]
        if results:
            return tuple(dict.fromkeys(results))
    return ()


def one_name(names: Iterable[str]) -> dict[str, str]:
    """Each name's own: vm-1.internal.cloudapp.net is vm-1 where both are there."""
    known = set(names)
    return {name: name.split(".")[0] if name.split(".")[0] in known else name for name in known}


NO_LOGS = (
    ".md", ".py", ".sh", ".sbatch", ".slurm", ".yaml", ".yml", ".csv", ".png", ".svg", ".html", ".xml", ".conf", ".cfg", ".toml",
    ".pdf", ".zip", ".tar", ".sha256",
)  # fmt: skip
"""Files that lie beside logs; one that is named itself is read all the same."""
ERRORS = (".err", ".stderr")


@dataclass(frozen=True)
class Log:
    """One log: a run of nccl-tests, the AzNHC runs of a file, a training, NCCL's words alone, or nothing."""

    path: str
    tool: str = ""
    """Empty: nothing is known of it."""
    nodes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read of it."""
    written: datetime.datetime | None = None
    nccl: NcclRun | None = None
    words: NcclLog | None = None
    """NCCL's own, said during the run."""
    aznhc: tuple[NhcRun, ...] = ()
    training: MegatronRun | None = None


def read_logs(paths: Sequence[Path]) -> list[Log]:
    """All logs of files and folders. Machines that only a file's name tells are found with the names that the others say."""
    files = [file for path in paths for file in _files(path)]
    logs = [log for file in dict.fromkeys(files) for log in read_file(file)]
    known = {name for log in logs for name in log.nodes}
    return [log if log.nodes else replace(log, nodes=machines_of(log.path, known)) for log in logs]


def read_file(path: Path) -> list[Log]:
    """All that is in one file; a Log with a problem where that is nothing."""
    try:
        raw, written = path.read_bytes(), datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    except OSError as error:
        return [Log(str(path), problems=(f"it cannot be read: {error.strerror or error}",))]
    text = text_of(raw)
    if not text.text:
        return [Log(str(path), problems=text.problems, written=written)]
    results = [*_nccl(path, text.text), *_others(path, text.text)] or [_unknown(path, text.text)]
    return [replace(log, problems=(*log.problems, *text.problems), written=written) for log in results]


def _files(path: Path) -> list[Path]:
    """Logs of a folder and the folders in it; the path itself where it is no folder, also when it is not there."""
    if not path.is_dir():
        return [path]
    results = sorted(file for file in path.rglob("*") if file.is_file() and not _is_aside(file, path))
    return results or [path / "*"]


def _is_aside(file: Path, root: Path) -> bool:
    """Hidden, no log by its ending, or the empty error output beside a job's log."""
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    empty = (
        file.suffix in ERRORS
        and file.stat().st_size == 0
        and any(other != file and other.stem == file.stem for other in file.parent.iterdir())
    )
    return hidden or file.suffix.lower() in NO_LOGS or empty


def _nccl(path: Path, text: str) -> list[Log]:
    written = read_nccl_json(text, path.name) if text.lstrip().startswith("{") else None
    if written:
        return [Log(str(path), written.tool, written.hosts, nccl=written)]
    runs = read_nccl_tests(text, path.name)
    logs = []
    for run, part in zip(runs, words_during(text, runs), strict=True):
        words = read_log(part)
        hosts = run.hosts or tuple(dict.fromkeys(host for _, host in words.ranks))
        logs.append(Log(str(path), run.tool, hosts, nccl=run, words=words))
    return logs


def _others(path: Path, text: str) -> list[Log]:
    logs = []
    # The last run of each machine: AzNHC writes each after those before.
    if is_aznhc(text) and (
        runs := list({run.host or str(number): run for number, run in enumerate(read_aznhc(text))}.values())
    ):
        named = [run.host for run in runs if run.host] or list(machines_of(str(path)))
        logs.append(Log(str(path), "aznhc", tuple(dict.fromkeys(named)), aznhc=tuple(runs)))
    if training := read_megatron(text):
        hosts = training.hosts or tuple(host for host, _ in read_log(text).by_host)
        logs.append(Log(str(path), training.tool, hosts, training=training))
    return logs


def _unknown(path: Path, text: str) -> Log:
    words = read_log(text)
    if words.by_host:
        return Log(str(path), "nccl", tuple(host for host, _ in words.by_host), words=words)
    return Log(str(path), problems=("nothing in it is of nccl-tests, rccl-tests, AzNHC or Megatron",))


# A training by Megatron as evidence about machines: how it ended, what a GPU reached, and whether that can be.
#
# Lines of iterations alone say "success" of a run that was killed while it wrote its checkpoint.


TRAINING_SOURCE = "Headway: a training counts when it came to its end"


def training_point(run: MegatronRun, hosts: tuple[str, ...]) -> TrainingPoint | None:
    """The training as the probe of our own job leaves it; None where it does not print its throughput."""
    if run.tflops is None:
        return None
    return TrainingPoint(
        nodes=hosts,
        ranks=run.world or 0,
        step_seconds=run.seconds,
        tflops_per_rank=run.tflops,
        convention="the run's own",
        engine=run.tool,
    )


def training_findings(run: MegatronRun, sku: Sku, hosts: tuple[str, ...]) -> tuple[Reason, ...]:
    """What keeps it from counting, and what it says is wrong."""
    results = [*_ended(run), *_figures(run, sku)]
    return tuple(reason.model_copy(update={"nodes": hosts}) for reason in results)


def _ended(run: MegatronRun) -> Iterator[Reason]:
    last = run.iterations[-1]
    reached = f"iteration {last.number} of {last.total}"
    if run.killed:
        while_saving = (run.complete or run.done) and not run.saved
        what = f"killed while it saved the checkpoint, after {reached}" if while_saving else f"killed at {reached}"
        yield _reason("end", "failed", what, "an end of its own", text=run.killed[0])
    elif run.saving:
        yield _reason("checkpoint", "unknown", f"begun after {reached}, and no word of its end", "saved")
    elif not (run.complete or run.done):
        yield _reason("end", "unknown", f"the log ends at {reached}", f"iteration {last.total}, or a word of the end")


def _figures(run: MegatronRun, sku: Sku) -> Iterator[Reason]:
    if run.seconds is None:
        output = run.unread[0] if run.unread else "no iteration has a time"
        yield _reason("step time", "unknown", output, "elapsed time per iteration")
    if run.lost:
        yield _reason("loss", "degraded", float(run.lost), "= 0 iterations whose loss is no number")
    ceiling = sku.specs.get("achievable_bf16_tflops") or sku.specs.get("peak_bf16_tflops")
    if run.tflops and ceiling and run.tflops > float(ceiling.value):
        result = _reason(
            "throughput", "unknown", run.tflops, f"<= {ceiling.value}, which no matmul exceeds", unit="TFLOP/s"
        )
        output = "another convention of FLOPs, other hardware, or numbers of 8 bits"
        yield result.model_copy(update={"source": cited(sku, str(ceiling.source)), "said": output})


def _reason(
    what: str, verdict: Verdict, measured: float | str, limit: str, *, text: str = "", unit: str = ""
) -> Reason:
    return Reason(
        node="",
        check=f"training {what}",
        measured=measured,
        unit=unit,
        limit=limit,
        source=TRAINING_SOURCE,
        verdict=verdict,
        said=text,
        remedy="Read the training's log.",
    )


# One log that others wrote, judged by itself: what keeps it from counting, and its figures against the hardware's file.


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
    sweeps: tuple[Sweep, ...] = ()
    if log.nccl is not None:  # its machines are named as all logs call them
        names = one_name((*log.nodes, *log.nccl.hosts))
        transport = log.words.transports if log.words else ()
        sweeps = nccl_findings.sweeps_of(log.nccl, log.nodes, transport)
        sweeps = tuple(
            sweep.model_copy(update={"nodes": tuple(names.get(name, name) for name in sweep.nodes)}) for sweep in sweeps
        )
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


def _reports(log: Log) -> Iterator[RankReport]:
    for run in log.aznhc:
        name = one_name((*log.nodes, run.host)).get(run.host) or next(iter(log.nodes), "")
        probes = aznhc_findings.probes_of(run)
        yield RankReport(rank=0, local_rank=0, node=name, host=run.host or name, probes=probes)


def _of_run(log: Log, sku: Sku) -> Iterator[Reason]:
    if log.nccl:
        yield from nccl_findings.findings(log.nccl, sku, log.nodes)
    if log.training:
        yield from training_findings(log.training, sku, log.nodes)


def _of_figures(log: Log, sweeps: tuple[Sweep, ...], sku: Sku, config: BenchmarkConfig) -> Iterator[Reason]:
    for sweep in merged(sweeps):
        result = of_sweep(sweep, sku, ours=False)
        yield from (reason.model_copy(update={"nodes": sweep.nodes}) for reason in result)
    if log.training and (point := training_point(log.training, log.nodes)):
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
    # A machine that is named by its whole name in one log and by its first part in another is one.
    names = one_name(name for log in logs for name in log.nodes)
    renamed = [replace(log, nodes=tuple(dict.fromkeys(names[name] for name in log.nodes))) for log in logs]
    judged = [judged_log(log, sku, config) for log in renamed]
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
    points = [training_point(log.log.training, log.log.nodes) for log in judged if log.log.training]
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
            # What several machines did badly together is unknown of each.
            verdict: Verdict = "degraded" if reason.verdict == "degraded" else "unknown"
            output = f"{reason.said}; it is one of {len(reason.nodes)} machines, and no log clears it".lstrip("; ")
            mine.append(reason.model_copy(update={"node": name, "nodes": (), "verdict": verdict, "said": output}))
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
