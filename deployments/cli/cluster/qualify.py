"""`headway qualify`: a cluster measured and judged; existing logs judged; a machine's history; drained machines put back.

What is measured and how it is judged: docs/qualification.md. With `--from`, a cluster that Headway cannot reach is judged by
logs that are there, and nothing is run or kept: tasks/qualification/from_logs.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from deployments.cli.operations.users import As, Reason, asked
from deployments.cli.options import Config, Json, Set, parameters_of
from deployments.cli.output import CommandError, aligned, say
from tasks.common.errors import GateFailed, Missing, Unknown
from tasks.common.home import home
from tasks.common.redaction import redact, redact_value
from tasks.compute import machines_of
from tasks.compute.nodes import Drained, Machines
from tasks.config.cluster import ClusterConfig
from tasks.config.qualification import BenchmarkConfig
from tasks.hardware.files import find_sku, read_sku
from tasks.security.audit import audit, audited
from tasks.storage import open_store

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tasks.config.flows import QualifyConfig
    from tasks.qualification import verdicts
    from tasks.qualification.from_logs import JudgedLog, LogsVerdict

COLOURS = {"healthy": "green", "degraded": "dark_orange3", "failed": "red", "unknown": "magenta"}
OF_SLURM = ("-c", "--set", "--reason")
MODES = {"--from": ("--sku",), "--history": (), "--drain": OF_SLURM, "--resume": OF_SLURM}
"""What goes with each; all the rest is of measuring."""
EARLIER = 10
"""Healthy runs before the newest that a recorded baseline is the median of, at most."""

Quick = Annotated[bool, typer.Option("--quick", help="Measure health, rates, collectives and pairs. The default.")]
Standard = Annotated[
    bool, typer.Option("--standard", help="Measure every rate several times and more pairs, to detect small faults.")
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Measure everything: every collective and pair, storage, a training probe, a soak."),
]
Nodes = Annotated[
    str,
    typer.Option(
        "--nodes", metavar="LIST", help="Measure exactly these machines, separated by commas; with Slurm, ssh and Ray."
    ),
]
Record = Annotated[
    str,
    typer.Option(
        "--record", metavar="NAME", help="Write what was measured as the hardware NAME, for later runs to be judged by."
    ),
]
Replace = Annotated[bool, typer.Option("--replace", help="With --record: replace an existing file of that name.")]
From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="PATH...", help="Judge existing logs, files or folders, and measure nothing."),
]
SkuName = Annotated[
    str, typer.Option("--sku", help="With --from: the hardware, a name from `headway hardware` or a YAML file.")
]
History = Annotated[
    str, typer.Option("--history", metavar="NODE", help="Show the verdicts of earlier qualifications on a machine.")
]
Drain = Annotated[
    bool,
    typer.Option("--drain", help="Drain the named machines in Slurm, when more failed than are drained automatically."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Resume drained machines in Slurm: the named ones, or all that Headway drained."),
]
More = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH|NODE]...", help="More paths for --from, or the machines for --drain and --resume."),
]


def qualify(
    more: More = None,
    config: Config = None,
    set_: Set = None,
    quick: Quick = False,
    standard: Standard = False,
    full: Full = False,
    nodes: Nodes = "",
    record: Record = "",
    replace: Replace = False,
    from_: From = None,
    sku: SkuName = "",
    history: History = "",
    drain: Drain = False,
    resume: Resume = False,
    reason: Reason = "",
    as_: As = "",
    as_json: Json = False,
) -> None:
    """Measure the cluster now, and judge every machine by the limits of its hardware.

    The verdict is healthy, degraded, failed or unknown. The exit code is 0 for the first two, 3 for the others.
    """
    given = {
        "--from": from_, "--history": history, "--drain": drain, "--resume": resume, "--quick": quick,
        "--standard": standard, "--full": full, "--nodes": nodes,
        "--record": record, "--replace": replace, "--sku": sku, "--reason": reason, "-c": config, "--set": set_,
    }  # fmt: skip
    names = more or []
    _require_sense([name for name, value in given.items() if value], names)
    if from_:
        judge_logs([*from_, *map(Path, names)], sku=sku, as_json=as_json)
    elif history:
        _past_of(history, as_json=as_json)
    elif drain:
        cluster = _settings(config, set_).cluster
        if why := cluster.capabilities.cannot_drain:
            raise ValueError(f"backend {cluster.backend} drains no machines: {why}")
        if not names:
            raise ValueError("--drain names no machine: say which, as Slurm calls them")
        if not reason.strip():
            raise ValueError("--drain needs --reason TEXT: it goes into Slurm and into the audit log")
        reasons = dict.fromkeys(names, reason)
        _change([cluster], "drain", ", ".join(names), reason, as_, lambda one: one.drain(reasons), as_json=as_json)
    elif resume:
        where = [_settings(config, set_).cluster] if config or set_ else _drained_by_us(names)
        whose = ", ".join(names) or "all that Headway drained"
        _change(where, "resume", whose, reason, as_, lambda one: one.resume(names), as_json=as_json)
    else:
        depth = "full" if full else "standard" if standard else "quick" if quick else ""
        changed = [f"benchmark.depth={depth}"] if depth else []
        if listed := [name.strip() for name in nodes.split(",") if name.strip()]:
            changed.append(f"benchmark.nodes={json.dumps(listed)}")
        changed += set_ or []
        settings = _settings(config, changed)
        what = f"qualify {settings.cluster.name}"
        with asked("run", as_, what=what):
            from deployments.cli.running import run_and_tell

            audit(open_store(home()), "start run", right="run", what=what)
            look = partial(_preflight, settings, record, replace)
            run_and_tell("qualify", settings, {}, preflight=look, as_json=as_json, show=_table)
        if record:
            _record(settings, record, replace)


def _require_sense(given: list[str], more: list[str]) -> None:
    """Raise ValueError for options that do not go together."""
    modes = [name for name in MODES if name in given]
    if len(modes) > 1:
        raise ValueError(f"{modes[0]} and {modes[1]} are different things: give one of them")
    mode = modes[0] if modes else ""
    if more and mode not in ("--from", "--drain", "--resume"):
        raise ValueError(f"{more[0]!r} belongs to no option: give machines with --nodes, logs with --from")
    alone = [
        name for name in given if name != mode and (name not in MODES[mode] if mode else name in ("--sku", "--reason"))
    ]
    if alone:
        remedy = "set benchmark.sku" if alone[0] == "--sku" else "leave it out"
        raise ValueError(f"{alone[0]} does not go with {mode or 'a measurement'}: {remedy}")
    depths = [name for name in ("--quick", "--standard", "--full") if name in given]
    if len(depths) > 1:
        raise ValueError(f"{depths[0]} and {depths[1]} are two depths: give one of them")
    if "--replace" in given and "--record" not in given:
        raise ValueError("--replace is of --record NAME")
    if mode == "--from" and "--sku" not in given:
        raise ValueError("--from needs --sku: say as which hardware the logs are judged; `headway hardware` lists them")


def _settings(config: list[str] | None, set_: list[str] | None) -> QualifyConfig:
    from tasks.config.flows import QualifyConfig

    return QualifyConfig.model_validate(parameters_of("qualify", config, "", set_)["config"])


def _preflight(settings: QualifyConfig, record: str, replace: bool) -> None:
    """What can be known to be wrong before anything is spent."""
    from tasks.benchmark import hardware_of
    from tasks.orchestration.node_exclusion import require_possible
    from tasks.qualification.record import place

    require_possible(settings.cluster, settings.benchmark)
    judged_by = hardware_of(settings.cluster, settings.benchmark)
    if record and record in (judged_by.name, settings.benchmark.sku):
        raise ValueError(
            f"--record {record}: this run is judged by it, and a run never writes what it is judged by. Give another name"
        )
    if record:
        place(record, home() / "hardware", replace=replace)


def _record(settings: QualifyConfig, name: str, replace: bool) -> None:
    """Only of a cluster whose gate opened: `run_and_tell` has raised for any other."""
    from tasks.benchmark import hardware_of, sku_digest
    from tasks.qualification.record import record
    from tasks.registry.qualifications import healthy_measurements, newest_measurement

    store, cluster, config = open_store(home()), settings.cluster, settings.benchmark
    based_on, folder = hardware_of(cluster, config), home() / "hardware"
    newest = newest_measurement(store, cluster.name)
    earlier = [*islice(healthy_measurements(store, cluster.name, sku_digest(based_on)), EARLIER)]
    path = record(name, [newest], based_on=based_on, folder=folder, replace=replace, config=config, earlier=earlier)
    typer.echo(f"Recorded as {path}; judge by it with --set benchmark.sku={name}", err=True)


def _table(fields: dict[str, Any]) -> RenderableType:
    """For people: the verdict, each machine, and the sentences."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not fields.get("verdict"):
        return Text()
    table = Table("machine", "verdict", "", box=None, pad_edge=False)
    for node in fields["nodes"]:
        used = node["name"] in fields["usable"] and fields["verdict"] in ("healthy", "degraded")
        use = "left out" if node["name"] in fields["excluded"] else "used" if used else ""
        table.add_row(node["name"], Text(node["verdict"], COLOURS[node["verdict"]]), use)
    sentences = [reason["sentence"] for node in fields["nodes"] for reason in node["reasons"]]
    sentences += [reason["sentence"] for reason in fields["reasons"]]
    done = [f"{one['node']}: {'drained' if one['done'] else 'not drained'}: {one['said']}" for one in fields["drained"]]
    asks = [
        f"{one['node']}: a request to {one['what']} it is in the qualification; nothing was sent"
        for one in fields["requests"]
    ]
    last = f"{fields['verdict']}, as {fields['sku']}, until {fields['expires']}; page: {fields['page']}"
    return Group(table, *(Text(line, overflow="fold") for line in (*sentences, *done, *asks, last)))


def _past_of(node: str, *, as_json: bool) -> None:
    """Say what earlier qualifications said of a machine. Raises Unknown."""
    from tasks.qualification.remaining import as_node
    from tasks.registry.qualifications import stored

    results, lines = [], []
    for one in stored(open_store(home())):
        for verdict in one.verdict.nodes:
            if verdict.name != node:
                continue
            payload = {key: value for key, value in as_node(verdict).items() if key != "name"}
            time = one.time.isoformat(timespec="seconds")
            results.append({"time": time, "qualification": one.manifest.ref, "sku": one.verdict.sku, **payload})
            rates = ", ".join(f"{check} {value:.4g}" for check, value in payload["rates"].items())
            lines.append(f"{time}  {payload['verdict']:<9} {rates}".rstrip())
            lines += [f"  {reason['sentence']}" for reason in payload["reasons"]]
    if not results:
        remedy = "`headway qualify` measures it; a machine is called as its scheduler calls it."
        raise Unknown(f"no qualification knows a machine {node!r}", remedy=remedy)
    say({"node": node, "history": results}, "\n".join(lines), as_json=as_json)


def _drained_by_us(names: list[str]) -> list[ClusterConfig]:
    """The clusters on which earlier qualifications drained these machines, or any, as jobs of this home reached them.

    Raises ValueError when there is none, and for one that no job of this home went to: the store does not say how it is reached.
    """
    from tasks.compute.jobs_book import known_cluster
    from tasks.registry.qualifications import drained

    results = [name for name, nodes in drained(open_store(home())).items() if not names or nodes & set(names)]
    if not results:
        what = ", ".join(names) or "any machine"
        raise ValueError(f"no qualification of this home has drained {what}: say on which cluster, with -c CONFIG")
    clusters = {name: known_cluster(home(), name) for name in results}
    if unknown := [name for name, cluster in clusters.items() if cluster is None]:
        raise ValueError(
            f"no job of this home went to the cluster {', '.join(unknown)}: say how it is reached, with -c CONFIG"
        )
    return [cluster for cluster in clusters.values() if cluster]


def _change(
    where: list[ClusterConfig],
    action: Literal["drain", "resume"],
    names: str,
    reason: str,
    as_: str,
    act: Callable[[Machines], Sequence[Drained]],
    *,
    as_json: bool,
) -> None:
    """Drain or resume machines, and say what became of each. Raises CommandError where it was not what was asked for."""
    what = f"{', '.join(cluster.name for cluster in where)}: {names}"
    with (
        asked("run", as_, what=f"{action} {what}", reason=reason),
        audited(open_store(home()), action, right="run", what=what, reason=reason),
    ):
        done = [one for cluster in where for one in act(machines_of(cluster))]
    word = {"drain": "drained", "resume": "resumed"}[action]
    fields = {word: [one.node for one in done if one.done], "nodes": [one.model_dump() for one in done]}
    failed = [one for one in done if not one.done]
    if failed:
        text = "; ".join(f"{one.node}: {one.said}" for one in failed)
        raise CommandError(Missing(f"not {word}: {text}"), fields)
    lines = [f"{one.node}: {one.said}" for one in done] or ["Headway drained no machine that is still drained."]
    say(fields, "\n".join(lines), as_json=as_json)


GOOD = ("healthy", "degraded")
REMEDY = (
    "Bring the logs that are missing, repair or leave out the machines that are named, or measure: `headway qualify`."
)
SHOWN = 12
"""Most reasons of one machine or log that are shown to people."""


def judge_logs(paths: list[Path], *, sku: str, as_json: bool) -> None:
    """Judge logs, files or folders of them. Raises GateFailed in a CommandError for failed and unknown (exit code 3)."""
    from tasks.qualification import from_logs
    from tasks.qualification.from_logs import read_logs

    own = home() / "hardware"
    hardware = read_sku(find_sku(sku, own), own)
    now = datetime.datetime.now(datetime.UTC)
    result = from_logs.judge_logs(read_logs(paths), hardware, BenchmarkConfig(), now=now)
    fields = {
        "verdict": result.verdict,
        "sku": result.sku,
        "expires": result.expires.isoformat(timespec="seconds"),
        "nodes": [
            {"name": node.name, "verdict": node.verdict, "reasons": [_reason(reason) for reason in node.reasons]}
            for node in result.nodes
        ],
        "pairs": [pair.model_dump(include={"a", "b", "busbw_gb_s", "verdict"}) for pair in result.pairs],
        "reasons": [_reason(reason) | {"said": reason.said} for reason in result.reasons],
        "logs": [_log(judged) for judged in result.logs],
    }
    fields, words = redact_value(fields), redact("\n".join(_judged_words(result)))
    if result.verdict in GOOD:
        say(fields, words, as_json=as_json)
        return
    if not as_json:
        print(words)
    checks = []
    for reason in _all(result):
        if reason.verdict not in GOOD:
            name = " ".join(part for part in (reason.node, reason.check, reason.where) if part)
            measured = reason.measured if reason.measured is not None else reason.said
            checks.append({"name": name, "measured": measured, "limit": reason.limit})
    worst = next((reason for reason in _all(result) if reason.verdict == result.verdict), None)
    message = f"the logs show no sound cluster: its verdict is {result.verdict}" + (
        f". {worst.sentence}" if worst else ""
    )
    gate = GateFailed(redact(message), stage="qualify", checks=redact_value(checks), remedy=REMEDY)
    raise CommandError(gate, fields)


def _log(judged: JudgedLog) -> dict[str, Any]:
    from tasks.qualification.nccl_findings import rows_of

    log, run = judged.log, judged.log.nccl
    names = ("bytes", "algbw", "busbw", "wrong", "algbw_in_place", "busbw_in_place", "wrong_in_place")
    return {
        "path": log.path,
        "tool": log.tool or None,
        "collective": (run.collective or None) if run else None,
        "ranks": run.world if run else log.training.world if log.training else None,
        "verdict": judged.verdict,
        "rows": [{name: getattr(row, name) for name in names} for row in (rows_of(run) if run else ())],
        "average_printed": run.average_printed if run else None,
        "average_recomputed": run.average if run else None,
    }


def _judged_words(result: LogsVerdict) -> Iterator[str]:
    """For people: the verdict, machines, pairs, logs."""
    counts = f"{len(result.nodes)} machines in {len(result.logs)} logs"
    yield f"{result.verdict}: {counts}, judged as {result.sku}; until {result.expires:%Y-%m-%d %H:%M} UTC"
    logs = []
    for judged in result.logs:
        run = judged.log.nccl
        largest = max(run.rows, key=lambda row: row.bytes, default=None) if run else None
        logs.append(
            [
                judged.log.path,
                judged.verdict,
                judged.log.tool or "not read",
                (run.collective if run else "") or "-",
                f"{run.world} ranks" if run and run.world else "-",
                f"{_figure(largest.out.busbw)} at {largest.bytes}" if largest else "-",
                f"mean {_figure(run.average)}, printed {_figure(run.average_printed)}" if run and run.rows else "-",
            ]
        )
    machines = [[node.name, node.verdict] for node in result.nodes]
    pairs = [[f"{pair.a} - {pair.b}", pair.verdict, _figure(pair.busbw_gb_s)] for pair in result.pairs]
    for title, rows in (("machines", machines), ("pairs", pairs), ("logs", logs)):
        if rows:
            yield from ("", title, *(f"  {line}" for line in aligned(rows)))
    unjudged = [reason for judged in result.logs if judged.soft for reason in judged.reasons]
    sentences: dict[str, None] = {}
    for reason in (*_all(result), *unjudged):
        text = f"; {reason.said}" if reason.said and reason.measured is not None else ""
        sentences[reason.sentence + text] = None
    if sentences:
        shown = list(sentences)[: SHOWN * max(len(result.nodes), 1)]
        yield from ("", "why", *(f"  {sentence}" for sentence in shown))


def _reason(reason: verdicts.Reason) -> dict[str, Any]:
    measured = reason.measured if reason.measured is not None else reason.said or None
    return {
        "check": f"{reason.check} {reason.where}".strip() if reason.check == "aznhc" else reason.check,
        "measured": measured,
        "unit": reason.unit,
        "limit": reason.limit,
        "source": reason.source,
    }


def _all(result: LogsVerdict) -> list[verdicts.Reason]:
    return [*(reason for node in result.nodes for reason in node.reasons), *result.reasons]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GB/s"
