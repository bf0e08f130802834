"""`headway simulate`: a training played through with its failures: goodput in bands, where the time goes, how often to save.

What the options mean together, the playing, and what is printed. See docs/failures.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deployments.cli.options import Json
from deployments.cli.output import aligned, say

if TYPE_CHECKING:
    from tasks.hardware.machines import Machine
    from tasks.planning.case import Case
    from tasks.planning.checkpointing import Interval, Saving
    from tasks.planning.failures import Range, Rates
    from tasks.planning.simulation import Band, Failing, Simulated

GENERIC_MACHINE = 8
"""GPUs of a machine, where none is named."""
MOST_GPUS = 1_000_000
LEVELS = ("low", "mid", "high")


@dataclass(frozen=True)
class Words:
    """The options as typed; None or empty: not given."""

    gpus: int | None = None
    days: float = 30.0
    gpu: str = ""
    sku: str = ""
    case: str | None = None
    interval: str = "auto"
    checkpoint_gib: float | None = None
    storage: str = ""
    stall_seconds: float | None = None
    write_seconds: float | None = None
    mtbf_gpu_hours: tuple[float, float, float] | None = None
    spot: str | None = None
    spares: int | None = None
    elastic: bool = False
    fewest: int = 1
    unit: int = 1
    detection_seconds: float | None = None
    restart_seconds: float | None = None
    repair_hours: float = 24.0
    shape: float = 1.0
    lemons: bool = False


@dataclass(frozen=True)
class Question:
    """What is played, and what is said beside it."""

    simulated: Simulated
    failing: Mapping[str, Failing]
    gpu_hours: Range
    interval: Interval | None
    """None: given."""
    gpus: int
    said: str
    """The machines, in words."""
    checkpoint_gib: float | None
    warnings: tuple[str, ...] = ()


def question(words: Words) -> Question:
    """Raises ValueError for what cannot be, by name and value."""
    from tasks.planning.checkpointing import DETECTION_SECONDS, RESTART_SECONDS, Recovery, chosen_interval
    from tasks.planning.failures import DEDICATED, Range, failure_rates

    case = None
    if words.case:
        from deployments.cli.planning.plan import read_cases

        cases = read_cases(words.case)
        if len(cases) != 1:
            raise ValueError(f"--case {words.case}: {len(cases)} cases; simulate takes a file with one")
        case = cases[0]
    machine = _machine(words, case)
    per_machine = machine.gpus if machine else GENERIC_MACHINE
    gpus = words.gpus
    if gpus is None and case is not None:
        gpus = case.cluster.gpus or (case.cluster.nodes or 0) * per_machine
    if gpus is None:
        raise ValueError("give --gpus, or --case with a cluster")
    if not 1 <= gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {gpus}: give 1 to {MOST_GPUS:,}")
    hours = DEDICATED if words.mtbf_gpu_hours is None else Range(*words.mtbf_gpu_hours)
    spot = words.spot is not None or bool(case and case.cluster.spot)
    spot_class = "" if words.spot in (None, "unknown") else str(words.spot)
    gpu = machine.gpu if machine else words.gpu or "A100"
    rates = failure_rates(gpu, gpus, per_machine=per_machine, gpu_hours=hours, spot=spot, spot_class=spot_class)
    cost, gib, notes = _saving(words, case, machine, rates)
    # Reading a checkpoint is taken to last as long as writing it.
    restart = RESTART_SECONDS + cost.lag_seconds if words.restart_seconds is None else words.restart_seconds
    recovery = Recovery(DETECTION_SECONDS if words.detection_seconds is None else words.detection_seconds, restart)
    interval = chosen_interval(cost, recovery, rates.together.mid) if words.interval == "auto" else None
    seconds = interval.seconds if interval else _seconds(words.interval)
    failing = _failing(words, rates, spot_class if spot else None)
    from tasks.planning.simulation import Replacing, Simulated, require_number, spares_for

    repair = words.repair_hours * 3600
    require_number("--repair-hours", words.repair_hours)
    enough = 0 if words.elastic else spares_for(rates.machines, failing["low"], repair_seconds=repair)
    replacing = Replacing(
        enough if words.spares is None else words.spares,
        repair,
        elastic=words.elastic,
        fewest=words.fewest,
        unit=words.unit,
    )
    asked = Simulated(rates.machines, words.days, seconds, failing["mid"], cost, recovery, replacing)
    text = f"{gpus:,} {gpu if machine or words.gpu else 'GPUs'} in {rates.machines:,} machines"
    known = rates.warnings if machine or words.gpu else tuple(one for one in rates.warnings if "published" not in one)
    return Question(asked, failing, hours, interval, gpus, text, gib, (*known, *notes))


def _machine(words: Words, case: Case | None) -> Machine | None:
    sku = words.sku or (case.cluster.sku if case and not words.gpu else "")
    gpu = words.gpu or (case.cluster.gpu if case else "")
    if words.sku and words.gpu:
        raise ValueError(f"--sku {words.sku} and --gpu {words.gpu}: give one of the two")
    if not sku and not gpu:
        return None
    from tasks.common.home import home
    from tasks.hardware.machines import machine_of_gpu, machine_of_sku

    return machine_of_sku(sku, home() / "hardware") if sku else machine_of_gpu(gpu)


def _saving(
    words: Words, case: Case | None, machine: Machine | None, rates: Rates
) -> tuple[Saving, float | None, tuple[str, ...]]:
    """What a save costs: as measured and given; else by the size of a checkpoint and where it goes; else a cautious guess."""
    from tasks.planning.checkpointing import SNAPSHOT_OVERHEAD_SECONDS, Saving, checkpoint_bytes, plan_checkpoints
    from tasks.planning.storages import GIB, storage_named

    storage = storage_named(words.storage).name if words.storage else ""
    size = _positive(words.checkpoint_gib, "--checkpoint-gib", 1e9)
    bytes_ = None if size is None else int(size * GIB)
    if bytes_ is None and case is not None:
        from tasks.planning.counts import parameters

        whole = int(parameters(case.network, case.sequence).total)
        bytes_ = checkpoint_bytes(whole, precision=case.precision, engine=case.engine)
    stall, write = words.stall_seconds, words.write_seconds
    notes: tuple[str, ...] = ()
    if bytes_ is not None and machine is not None and (stall is None or write is None):
        plan = plan_checkpoints(bytes_, machine, rates, storage=storage)
        stall = plan.cost.stall_seconds if stall is None else stall
        write = plan.cost.lag_seconds if write is None else write
        notes = (plan.reason, *(one for one in plan.warnings if one not in rates.warnings))
    elif stall is None:
        notes = (
            f"a save is taken to stall {SNAPSHOT_OVERHEAD_SECONDS:g} s: give --stall-seconds, or a size and --gpu",
        )
    gib = None if bytes_ is None else bytes_ / GIB
    return Saving(SNAPSHOT_OVERHEAD_SECONDS if stall is None else stall, write or 0.0), gib, notes


def _failing(words: Words, rates: Rates, spot_class: str | None) -> dict[str, Failing]:
    from tasks.planning.failures import HARDWARE_SHARE, LEMON_SHARE, LEMON_TIMES, eviction_hazard, spot_shares
    from tasks.planning.simulation import Failing

    shares = None if spot_class is None else spot_shares(spot_class)
    evicted = (0.0, 0.0, 0.0) if shares is None else tuple(map(eviction_hazard, (shares.high, shares.mid, shares.low)))
    means = (rates.failures.low, rates.failures.mid, rates.failures.high)
    return {
        level: Failing(
            mean * rates.machines,
            words.shape,
            lemon_share=LEMON_SHARE if words.lemons else 0.0,
            lemon_times=LEMON_TIMES if words.lemons else 1.0,
            hardware_share=HARDWARE_SHARE,
            eviction_hazard=hazard,
        )
        for level, mean, hazard in zip(LEVELS, means, evicted, strict=True)
    }


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        raise ValueError(f"--interval-seconds {word!r}: give seconds, or auto") from None
    return _positive(seconds, "--interval-seconds", 1e9) or 0.0


def _positive(value: float | None, name: str, most: float) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise ValueError(f"{name} {value:g}: give a number above 0 and at most {most:,.0f}")
    return value


CAUSES = {
    "useful": "useful",
    "stalled": "saving",
    "lost": "work lost",
    "detecting": "not noticed yet",
    "waiting": "waiting for a machine",
    "restarting": "restarting",
    "slowed": "stragglers",
    "shrunk": "fewer machines",
}
WAITED = 0.01
"""Of all time; more than this is printed with what would reduce it."""
Swept = Sequence[tuple[float, "Band"]]


def simulate(
    gpus: Annotated[int | None, typer.Option(help="GPUs that train together.")] = None,
    days: Annotated[float, typer.Option(help="Wall-clock days to simulate.")] = 30.0,
    gpu: Annotated[str, typer.Option(help="Such as H100; sets how fast a checkpoint leaves it.")] = "",
    sku: Annotated[str, typer.Option(help="An Azure VM size, instead of --gpu.")] = "",
    case: Annotated[
        str | None, typer.Option(metavar="CASE", help="A case as for `headway plan --case`: network and GPUs.")
    ] = None,
    interval_seconds: Annotated[str, typer.Option(help="Computing time between two saves; auto: the best.")] = "auto",
    checkpoint_gib: Annotated[
        float | None, typer.Option(help="Size of a checkpoint; by default from the case's network.")
    ] = None,
    storage: Annotated[
        str,
        typer.Option(help="Where checkpoints are stored, such as lustre-250; by default the slowest that suffices."),
    ] = "",
    stall_seconds: Annotated[
        float | None, typer.Option(help="How long training stands still for a save, as measured.")
    ] = None,
    write_seconds: Annotated[float | None, typer.Option(help="From then until the save can be restored.")] = None,
    mtbf_gpu_hours: Annotated[
        tuple[float, float, float] | None,
        typer.Option(metavar="LOW MID HIGH", help="GPU-hours per interruption: worst, expected, best."),
    ] = None,
    spot: Annotated[
        str | None,
        typer.Option(help="Spot machines, with their eviction class, such as 5-10 (percent per hour), or unknown."),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Spare machines; by default enough, or none with --elastic.")
    ] = None,
    elastic: Annotated[bool, typer.Option(help="Continue with fewer machines instead of waiting.")] = False,
    fewest: Annotated[int, typer.Option(help="The smallest number of machines that an elastic training needs.")] = 1,
    unit: Annotated[
        int, typer.Option(help="Machines per copy of the network: an elastic training shrinks by this many.")
    ] = 1,
    detection_seconds: Annotated[float | None, typer.Option(help="Seconds until a failure is detected.")] = None,
    restart_seconds: Annotated[float | None, typer.Option(help="Seconds from then until training continues.")] = None,
    repair_hours: Annotated[float, typer.Option(help="Hours until a failed machine is back, on average.")] = 24.0,
    shape: Annotated[float, typer.Option(help="Weibull's shape parameter: below 1, new machines fail most.")] = 1.0,
    lemons: Annotated[bool, typer.Option(help="Let a few machines fail again and again.")] = False,
    runs: Annotated[
        int | None, typer.Option(help="Simulated trainings per rate; by default as many as take a moment.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulation: the same seed gives the same result.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Write a picture as PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a training with failures, at three rates: what share of its time is useful, and what took the rest."""
    from tasks.planning.simulation import FEWEST_RUNS, bands, default_runs, swept

    asked = question(
        Words(
            gpus, days, gpu, sku, case, interval_seconds, checkpoint_gib, storage, stall_seconds, write_seconds,
            mtbf_gpu_hours, spot, spares, elastic, fewest, unit, detection_seconds, restart_seconds, repair_hours,
            shape, lemons,
        )
    )  # fmt: skip
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ValueError(f"--picture {picture}: there is no folder {picture.absolute().parent}")
    count = default_runs(asked.simulated) if runs is None else runs
    result = bands(asked.simulated, asked.failing, runs=count, seed=seed)
    sweep = swept(asked.simulated, runs=max(1, min(count, count // 5 + (count > FEWEST_RUNS))), seed=seed)
    if picture is not None:
        from tasks.report.pictures import draw

        draw(picture, f"{asked.said}, {days:g} days", result, sweep)
    fields = {"simulation": _fields(asked, result, sweep, seed=seed)}
    say(fields, "\n".join(_page(asked, result, sweep, seed=seed, picture=picture)), as_json=as_json)


def _fields(asked: Question, result: Mapping[str, Band], sweep: Swept, *, seed: int) -> dict[str, Any]:
    from tasks.planning.simulation import best_interval

    played = asked.simulated
    return {
        "gpus": asked.gpus,
        "machines": played.machines,
        "spares": played.replacing.spares,
        "days": played.days,
        "seed": seed,
        "interval_seconds": played.interval,
        "interval_reason": asked.interval.reason if asked.interval else "given",
        "interval_formulas": dict(asked.interval.all) if asked.interval else {},
        "checkpoint": {
            "gib": asked.checkpoint_gib,
            "stall_seconds": played.saving.stall_seconds,
            "write_seconds": played.saving.lag_seconds,
        },
        "recovery": asdict(played.recovery),
        "gpu_hours_per_interruption": asdict(asked.gpu_hours),
        "goodput": {
            "low": result["low"].goodput.p5,
            "mid": result["mid"].goodput.p50,
            "high": result["high"].goodput.p95,
        },
        "bands": {level: asdict(result[level]) for level in LEVELS},
        "sweep": [{"interval_seconds": at, **asdict(one.goodput), "expected": one.expected} for at, one in sweep],
        "best_interval_seconds": best_interval(sweep),
        "warnings": _notes(asked, result),
    }


def _notes(asked: Question, result: Mapping[str, Band]) -> list[str]:
    """What the figures themselves call for."""
    from tasks.planning.simulation import spares_for

    played, output = asked.simulated, list(asked.warnings)
    waited, short = max(one.shares["waiting"] for one in result.values()), min(one.days for one in result.values())
    if waited > WAITED and not played.failing.eviction_hazard:
        enough = spares_for(played.machines, asked.failing["low"], repair_seconds=played.replacing.repair_seconds)
        output.append(f"up to {waited:.1%} of the time is waited for a machine: with {enough:,} spare ones, none")
    if short < played.days * (1 - 1e-9):
        output.append(
            f"interrupted so often that only {short:.3g} days were played: its share of useful time stands by then"
        )
    return output


def _page(
    asked: Question, result: Mapping[str, Band], sweep: Swept, *, seed: int, picture: Path | None
) -> Iterator[str]:
    """For people."""
    from tasks.planning.simulation import best_interval

    played, size = asked.simulated, f"{asked.checkpoint_gib:,.0f} GiB, " if asked.checkpoint_gib else ""
    spares = f"{played.replacing.spares:,} spare ones"
    yield f"{asked.said} and {spares}, {played.days:g} days, {result['mid'].runs} trainings of each rate, seed {seed}"
    yield (
        f"checkpoint: {size}stands still {_time(played.saving.stall_seconds)}, written {_time(played.saving.lag_seconds)} later; "
        f"a failure is noticed in {_time(played.recovery.detection_seconds)}, restarting takes "
        f"{_time(played.recovery.restart_seconds)}"
    )
    reason = f": {asked.interval.reason}" if asked.interval else ", as given"
    yield f"saved every {_time(played.interval)} of computing{reason}"
    yield ""
    rows: list[tuple[str, ...]] = []
    levels = [result[level] for level in LEVELS]
    hours = asdict(asked.gpu_hours)
    rows.append(("", "fails most", "as expected", "fails least"))
    rows.append(("GPU-hours a failure", *(f"{hours[level]:,.0f}" for level in LEVELS)))
    rows.append(("between interruptions", *(_time(one.mean_seconds) for one in levels)))
    rows.append(
        (
            "interruptions",
            *(f"{n.p50:,.0f}  ({n.p5:,.0f} to {n.p95:,.0f})" for n in (one.interruptions for one in levels)),
        )
    )
    rows.append(
        ("goodput", *(f"{one.goodput.p50:.1%}  ({one.goodput.p5:.1%} to {one.goodput.p95:.1%})" for one in levels))
    )
    rows.append(("by formula", *(f"{one.expected:.1%}" for one in levels)))
    for cause, words in CAUSES.items():
        if any(one.shares[cause] > 0 for one in levels):
            rows.append((f"  {words}", *(f"{one.shares[cause]:.2%}" for one in levels)))
    yield from aligned(rows)
    yield ""
    low, mid, high = result["low"].goodput.p5, result["mid"].goodput.p50, result["high"].goodput.p95
    days = f"{played.days / mid:,.1f}" if mid > 0 else "forever"
    yield f"goodput {low:.1%} to {high:.1%}, {mid:.1%} as expected: {played.days:g} days of work take {days}"
    best = best_interval(sweep)
    yield f"best interval of {len(sweep)} tried: {_time(best)}, goodput {dict(sweep)[best].goodput.p50:.1%}"
    yield from (f"note: {note}" for note in _notes(asked, result))
    if picture is not None:
        yield f"picture: {picture}"


def _time(seconds: float) -> str:
    """In the largest unit that leaves a number above one."""
    for unit, size in (("days", 172800.0), ("h", 7200.0), ("min", 120.0)):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:,.3g} {unit}"
    return f"{seconds:.3g} s"
