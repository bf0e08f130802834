"""`headway plan`: whether a training fits, how fast, how long, what it costs, before anything is spent. See docs/planning.md.

Reading cases and showing plans; what is planned is tasks/planning/planned_case.py, what a lifecycle's configuration asks for,
tasks/planning/configured.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from deployments.cli.options import Config, Set, look_at_gpus
from deployments.cli.output import say, say_list

if TYPE_CHECKING:
    from tasks.artifacts import Cluster
    from tasks.common.errors import Missing
    from tasks.config.flows import RetrainConfig
    from tasks.planning.case import Case
    from tasks.planning.planned_case import Planned, Point
    from tasks.storage.store import Store

BAR = 40
PARTS = {"weights": "w", "gradients": "g", "optimizer": "o", "activations": "a", "other": "."}


def page(payload: dict[str, Any]) -> str:
    """A plan as people read it in a terminal, one line a fact: the verdict, the numbers, memory as a bar, what else would do."""
    return "\n".join(_lines(payload))


def _lines(payload: dict[str, Any]) -> Iterator[str]:
    name = f"{payload['name']}: " if payload["name"] else ""
    verdict = {"fits": "it fits", "tight": "it fits, tightly", "does not fit": "it does not fit"}[payload["fit"]]
    if payload["fit"] != "does not fit" and not payload["fits"]:
        verdict = "it fits in memory, and not within max_days and max_cost"
    size, gpus = payload["parameters"] / 1e9, payload["gpus"] or "?"
    yield f"{name}{size:,.3g} B parameters on {gpus} x {payload['machine']['gpu']}: {verdict}"
    if payload["parallel"]:
        yield f"  divided     {_division(payload['parallel'])}"
        yield f"              {payload['reason']}"
    if payload["nearest"]:
        yield f"  would fit   {payload['nearest']}"
    if payload["memory_gib"]:
        memory = payload["memory_gib"]
        scale = BAR / max(memory["usable"], memory["total"])
        bar = "".join(mark * round(memory[part] * scale) for part, mark in PARTS.items())
        text = ", ".join(f"{part} {memory[part]:.1f}" for part in PARTS)
        yield f"  memory      {memory['total']:.1f} of {memory['usable']:.1f} GiB a GPU: {text}"
        yield f"              |{bar.ljust(round(memory['usable'] * scale))}|"
    if payload["fit"] == "does not fit":
        return
    rates = payload["tflops_per_gpu"]
    yield (
        f"  a step      {payload['step_seconds']:.4g} s, {payload['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU; "
        f"TFLOP/s a GPU {rates['hardware']:.1f} by the hardware, {rates['model']:.1f} of the model, MFU {payload['mfu']:.1%}"
    )
    shares = [(seconds / payload["step_seconds"], name) for name, seconds in payload["step_parts_seconds"].items()]
    large = sorted((pair for pair in shares if pair[0] >= 0.005), reverse=True)
    yield "  it goes to  " + ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for share, name in large)
    if payload["days"]:
        failing = f", {payload['days_with_failures']:.3g} with failures" if payload["days_with_failures"] else ""
        yield f"  takes       {payload['days']:.3g} days{failing}"
    checkpoint, goodput = payload["checkpoint"], payload["goodput"]
    if checkpoint:
        yield (
            f"  checkpoint  {checkpoint['gib']:,.4g} GiB every {checkpoint['interval_seconds'] / 60:.3g} min, written in "
            f"{checkpoint['write_seconds']:.3g} s to {checkpoint['storage']}"
        )
        yield f"  goodput     {goodput['mid']:.1%} ({goodput['low']:.1%} to {goodput['high']:.1%} by how often machines fail)"
    yield from (f"  stored      {choice['reason']}" for choice in payload["storage"].values() if choice)
    if cost := payload["cost"]:
        total = "not known" if cost["total"] is None else f"{cost['total']:,.0f} {cost['currency']}"
        yield f"  costs       {total}" + (f" (prices of {cost['price_date']})" if cost["price_date"] else "")
    for other in payload["others"][:3]:
        needs = f"{other['step_seconds']:.4g} s a step, {other['memory_gib']:.1f} GiB, {other['fit']}"
        yield f"  instead     {_division(other['parallel'])}: {needs}"
    yield from (f"  warning     {value}" for value in payload["warnings"])


def _division(parallel: dict[str, Any]) -> str:
    shown = {
        name: size
        for name, size in parallel.items()
        if name in ("dp", "zero", "micro", "recompute") or size not in (1, "none")
    }
    return ", ".join(
        name.replace("_", " ") if size is True else f"{name} {size}"
        for name, size in shown.items()
        if size is not False
    )


GIB = 1 << 30
DAY = 86_400.0


def before_start(settings: RetrainConfig) -> tuple[dict[str, Any], str] | None:
    """The plan of a configuration and its words, before anything is sent: of machines whose VM size is known, else None.

    Raises ValueError for what cannot be planned.
    """
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.planning.configured import assumptions, case_of
    from tasks.planning.planned_case import plain, planned
    from tasks.planning.spending import paid_for

    cluster = settings.cluster
    if not (settings.benchmark.sku or cluster.size):
        return None
    if not cluster.gpus_per_node:
        return _of_known_ranks(settings)
    try:
        case = case_of(settings)
    except Missing:
        return None  # a base model: the stage `plan` counts with its own network
    paid = paid_for(settings.planning.spending, cluster)
    entry = plain(
        planned(
            case,
            home=home(),
            region=paid.region,
            paid=paid,
            allreduce_bus_bandwidth=_measured(cluster.name),
            hours_between_failures=settings.planning.mean_hours_between_failures,
        )
    )
    entry["warnings"] += assumptions(settings)
    return entry, page(entry)


def _of_known_ranks(settings: RetrainConfig) -> tuple[dict[str, Any], str] | None:
    """The same of machines without GPUs; of a size without a file, None and a note: the run measures them before it trains."""
    from tasks.common.home import home
    from tasks.hardware.files import is_known

    try:
        return of_ranks(settings)
    except ValueError:
        size = settings.cluster.size
        if not size or is_known(size, home() / "hardware"):
            raise
        text = (
            f"`headway hardware` does not list {size}, so its plan comes later: the qualification measures the machines"
        )
        typer.echo(f"headway: note: {text}", err=True)
        return None


def of_ranks(settings: RetrainConfig) -> tuple[dict[str, Any], str] | None:
    """The plan of a configuration for machines without GPUs, and its words; None where nothing is known of them.

    The newest qualification counts, when it vouches for as many ranks; else the file of the VM size. The stage `plan` judges
    all of it again.
    """
    from tasks.artifacts import Qualification
    from tasks.common.errors import Missing
    from tasks.common.home import home
    from tasks.planning.configured import unmeasured
    from tasks.registry.records import newest
    from tasks.storage import open_store

    cluster = settings.cluster
    opened = open_store(home())
    store: Store | None = opened
    try:
        record = newest(opened, "benchmark", of=lambda one: bool(one.value["subject"]["name"] == cluster.name))
    except Missing as error:
        _planned_without(error)
        store, record = None, None
    measured = Qualification.model_validate(record.value) if record else None
    vouched = (
        measured is not None
        and measured.passed
        and measured.subject.world_size == cluster.nodes * cluster.ranks_per_node
    )
    on = measured.subject if measured and vouched else unmeasured(cluster, home())
    if on is None:
        return None
    payload = _reckoned(settings, on, store, qualification=measured.ref if measured and vouched else None)
    memory, seconds = payload["memory_gib"], payload["days"] * DAY
    verdict = {"fits": "it fits", "does not fit": "it does not fit"}[payload["fit"]]
    corrected = payload["correction"]
    runs = "run" if corrected["runs"] == 1 else f"{corrected['runs']} runs"
    by = f", times {corrected['factor']:.2f} as the last {runs} here took" if corrected["runs"] else ""
    where = f"{payload['ranks']} ranks of cluster {payload['machine']['name']}"
    rates = (
        f"{payload['machine']['gflops_per_rank']:.3g} GFLOP/s a rank, all-reduce "
        f"{payload['machine']['allreduce_gigabytes_per_second']:.3g} GB/s"
    )
    lines = [
        f"{payload['name']}: {payload['parameters']:,} parameters on {where}: {verdict}",
        f"  memory      {memory['total']:.3g} of {memory['usable']:.3g} GiB a rank",
        f"  a step      {payload['step_seconds']:.3g} s{by}",
        f"  takes       {seconds / 60:.3g} minutes for {payload['steps']:,} steps",
        f"  checkpoint  {payload['checkpoint']['gib']:.3g} GiB every {payload['checkpoint']['every_steps']:,} steps",
        f"  goodput     {payload['goodput']['mid']:.1%}",
        f"  measured    {rates}"
        if vouched
        else f"  assumed     {rates}, by the file of {on.sku}; `headway qualify` measures it",
    ]
    cost = payload["cost"]
    if cost and cost["total"] is not None:
        lines.append(f"  costs       {_amount(cost['total'])} {cost['currency']} (prices of {cost['price_date']})")
        hour, limit = cost["machine_hour"] * cluster.nodes, cluster.time_limit_minutes
        most = f"; a submission of at most {limit:g} minutes, {_amount(hour * limit / 60)}" if limit else ""
        lines.append(f"  an hour     {_amount(hour)} {cost['currency']}{most}")
    if not vouched:
        lines.append(
            "  warning     nobody has measured these machines; a small network takes longer than its operations"
        )
    return payload, "\n".join([*lines, *([f"  warning     {payload['reason']}"] if payload["reason"] else [])])


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.01 else "less than 0.01"


def _reckoned(settings: RetrainConfig, on: Cluster, store: Any, *, qualification: str | None) -> dict[str, Any]:
    from tasks.common.home import home
    from tasks.plan import PAST_RUNS, reckon
    from tasks.planning.spending import Use, cost_of
    from tasks.planning.spent import measured_on
    from tasks.registry.records import StoreJournal

    journal, limits = StoreJournal(store) if store else None, settings.planning
    keys = sorted(journal.list(measured_on(on.name)))[-PAST_RUNS:] if journal else []
    numbers = reckon(
        settings.training,
        limits,
        settings.execution,
        on,
        vocab_size=settings.preprocessing.tokenizer.vocab_size,
        train_tokens=0,
        home=home(),
        past=[result for key in keys if journal and (result := journal.get(key))],
    )
    usable = numbers.rank.usable / GIB
    memory = numbers.memory_per_rank / GIB
    use = Use(numbers.seconds, numbers.goodput, numbers.checkpoint * limits.checkpoint.keep)
    spent = cost_of(use, limits.spending, on, home=home())
    reasons = []
    if math.isfinite(limits.max_minutes) and numbers.seconds > limits.max_minutes * 60:
        reasons.append(f"it takes longer than planning.max_minutes {limits.max_minutes:g}")
    if limits.spending.max_cost is not None and spent.hour is not None and spent.known > limits.spending.max_cost:
        reasons.append(f"it costs more than planning.spending.max_cost {limits.spending.max_cost:g}")
    return {
        "name": settings.training.model,
        "fits": memory <= usable and not reasons,
        "fit": "fits" if memory <= usable else "does not fit",
        "ranks": on.world_size,
        "parameters": numbers.parameters,
        "memory_gib": {"total": memory, "usable": usable},
        "step_seconds": numbers.step_seconds,
        "steps": settings.training.steps,
        "days": numbers.seconds / DAY,
        "days_with_failures": numbers.seconds / numbers.goodput / DAY,
        "checkpoint": {"gib": numbers.checkpoint / GIB, "every_steps": numbers.checkpoint_every_steps},
        "goodput": {"mid": numbers.goodput},
        "correction": {
            "factor": numbers.correction,
            "runs": numbers.corrected_by_runs,
            "said": numbers.correction_said,
        },
        "cost": None if spent.hour is None else spent.plain(),
        "machine": {
            "name": on.name,
            "gflops_per_rank": on.matmul_gflops_per_rank,
            "allreduce_gigabytes_per_second": on.allreduce_gigabytes_per_second,
            "qualification": qualification,
        },
        "reason": "; ".join(reasons),
    }


LEVELS = {"low": "fails most", "mid": "as expected", "high": "fails least"}


def draw(made: Sequence[Planned], folder: Path, *, home: Path, region: str) -> list[Path]:
    """Write the pictures of every case, in a folder of its own where there are several. Raises ValueError before writing."""
    from tasks.planning.planned_case import cheapest_by_time, what_if
    from tasks.report import pictures as picture

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--plots {str(folder)!r} is a file: give a folder")
    results = [what_if(one, home=home, region=region) for one in made]
    written = []
    for number, (one, curves) in enumerate(zip(made, results, strict=True), start=1):
        place = folder / str(number) if len(made) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        if curves.by_gpus:
            rates = [(point.gpus, point.tokens_per_second) for point in curves.by_gpus]
            written.append(picture.draw_by_gpus(place / "gpus.png", rates, curves.chosen.gpus))
        kinds = {"on demand": _priced(curves.by_gpus), "Spot": _priced(curves.by_gpus_on_spot)}
        kinds = {name: points for name, points in kinds.items() if points}
        if kinds:
            front = cheapest_by_time((*curves.by_gpus, *curves.by_gpus_on_spot))
            line = [(days, cost) for days, cost, _ in _priced(front)]
            currency = one.cost.currency if one.cost else "USD"
            written.append(picture.draw_cost(place / "cost.png", kinds, line, currency))
        if curves.by_depth:
            sizes = [(point.parameters, point.tflops) for point in curves.by_depth]
            written.append(picture.draw_by_depth(place / "depth.png", sizes))
        shares = {LEVELS[level]: points for level, points in curves.by_interval.items()}
        written.append(picture.draw_by_interval(place / "interval.png", shares, curves.interval_seconds))
    return written


def _priced(points: Sequence[Point]) -> list[tuple[float, float, int]]:
    return [(p.days, p.cost, p.gpus) for p in points if p.days is not None and p.cost is not None]


CASES = Path(__file__).parents[2] / "cases"
MOST_BYTES = 1 << 20
MOST_CASES = 500
CaseFile = Annotated[
    str,
    typer.Option(
        "--case",
        metavar="CASE",
        help="A YAML file with one or more cases, or the name of a shipped one (gpt3-175b), instead of a configuration.",
    ),
]


def plan(
    config: Config = None,
    set_: Set = None,
    case: CaseFile = "",
    goal: Annotated[
        str, typer.Option(metavar="GOAL", help="fastest, cheapest or smallest; by default the case's.")
    ] = "",
    region: Annotated[
        str, typer.Option("--region", help="The Azure region, for prices; by default that of the price list.")
    ] = "",
    write: Annotated[str, typer.Option(metavar="FILE", help="Write the best division as settings for `-c FILE`.")] = "",
    plots: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Plot variations: other numbers of GPUs, Spot, depths, intervals. Takes some seconds more.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON to stdout: one object, or a list for several cases.")
    ] = False,
) -> None:
    """Plan a training: whether it fits, its speed, time and cost, and how often it will fail. Starts nothing, needs no GPU.

    Of a configuration (-c), or of a case by itself (--case): network, sequence, cluster, batch; what `parallel` leaves out is
    searched.
    """
    from tasks.common.home import home
    from tasks.config.files import load
    from tasks.planning.case import Goal
    from tasks.planning.configured import assumptions, case_of
    from tasks.planning.planned_case import plain, planned
    from tasks.planning.spending import paid_for

    bandwidth, paid, hours = 0.0, None, None
    assumed: tuple[str, ...] = ()
    if case:
        cases = read_cases(case)
    else:
        settings = load(config or "local", set_ or [])
        look_at_gpus(settings.cluster)
        without_gpus = not settings.cluster.gpus_per_node and not (goal or write or plots)
        if without_gpus and (result := of_ranks(settings)):
            say(*result, as_json=as_json)
            return
        cases, bandwidth = [case_of(settings, search=bool(goal))], _measured(settings.cluster.name)
        paid = paid_for(settings.planning.spending, settings.cluster)
        region = region or paid.region
        hours, assumed = settings.planning.mean_hours_between_failures, assumptions(settings)
    if goal and goal not in get_args(Goal):
        raise ValueError(f"--goal {goal!r}: give one of {', '.join(get_args(Goal))}")
    make = partial(
        planned, home=home(), region=region, paid=paid, allreduce_bus_bandwidth=bandwidth, hours_between_failures=hours
    )
    made = []
    for each in cases:
        try:
            made.append(make(each.model_copy(update={"goal": goal}) if goal else each))
        except ValueError as error:  # a mistake of one case of many says of which
            raise ValueError(f"{each.name}: {error}" if each.name else str(error)) from error
    entries = [plain(each) for each in made]
    for entry in entries:
        entry["warnings"] += assumed
    if write:
        _write(made, Path(write))
    if plots:
        draw(made, Path(plots), home=home(), region=region)
    words = "\n\n".join(map(page, entries))
    if len(entries) > 1:
        say_list(entries, words, as_json=as_json)
    else:
        say(entries[0], words, as_json=as_json)


def read_cases(named: str) -> list[Case]:
    """The cases of a file, or of a shipped one that is named without a folder and an ending: one, a list, `cases: [...]`, or
    several documents. Raises ValueError with file, key and value."""
    import yaml
    from pydantic import ValidationError

    from tasks.common.validation import explain
    from tasks.config.files import Loader
    from tasks.planning.case import Case

    path = Path(named)
    shipped = {one.stem: one for one in sorted(CASES.glob("*.yaml"))}
    if named in shipped and not path.exists():
        path = shipped[named]
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(
                f"--case {str(path)!r}: {path.stat().st_size} bytes; a file of cases has at most {MOST_BYTES}"
            )
        documents = [value for value in yaml.load_all(path.read_text(encoding="utf-8"), Loader) if value is not None]
    except FileNotFoundError as error:
        raise ValueError(
            f"--case {named!r}: no such file, and not one of the shipped cases: {', '.join(shipped)}"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"--case {str(path)!r}: {error}") from error
    listed = [value["cases"] if isinstance(value, dict) and set(value) == {"cases"} else value for value in documents]
    results = [one for value in listed for one in (value if isinstance(value, list) else [value])]
    if not 0 < len(results) <= MOST_CASES:
        raise ValueError(
            f"--case {str(path)!r}: {len(results)} cases; give 1 to {MOST_CASES}, each with network, sequence, cluster, batch"
        )
    cases = []
    for number, value in enumerate(results, start=1):
        try:
            cases.append(Case.model_validate(value))
        except ValidationError as error:
            name = value.get("name") if isinstance(value, dict) else None
            raise ValueError(f"{path}, case {name or number}: {explain(error, Case)}") from error
    return cases


def _measured(cluster: str) -> float:
    """Bus bandwidth, bytes a second, that the cluster's newest qualification measured over all machines; 0: there is none."""
    from tasks.common.errors import Missing, Unknown
    from tasks.common.home import home
    from tasks.storage import open_store
    from tasks.storage.store import find

    try:
        manifest = find(open_store(home()), "qualification", cluster)
    except Unknown:
        return 0.0
    except Missing as error:
        _planned_without(error)
        return 0.0
    return 1e9 * manifest.provenance.metrics.get("allreduce_gigabytes_per_second", 0.0)


def _planned_without(error: Missing) -> None:
    """A store that cannot be read, or not without a login, keeps nobody from planning."""
    typer.echo(f"headway: {error.message}: planned without what was measured on these machines", err=True)


def _write(made: list[Planned], path: Path) -> None:
    import yaml

    from tasks.planning.configured import settings_of

    if len(made) != 1 or made[0].plan is None:
        raise ValueError(
            f"--write {str(path)!r}: {len(made)} cases, or one that does not fit: one plan is written that fits"
        )
    path.write_text(
        yaml.safe_dump(settings_of(made[0].plan.division, made[0].plan.needs), sort_keys=False), encoding="utf-8"
    )
