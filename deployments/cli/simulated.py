"""From the words of `headway simulate` to what is played: the range of rates, a save's cost, the interval. No printing here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.hardware.machine import Machine
    from tasks.planning.case import Case
    from tasks.planning.checkpointing import Interval, Recovery, Saving
    from tasks.planning.failures import Range, Rates
    from tasks.planning.simulation.settings import Failing, Simulated

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
    case: Path | None = None
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
    from tasks.planning.checkpointing import chosen_interval
    from tasks.planning.failures import DEDICATED, Range, failure_rates

    case = _case(words.case) if words.case else None
    machine = _machine(words, case)
    gpus = _gpus(words, case, machine)
    per_machine = machine.gpus if machine else GENERIC_MACHINE
    hours = DEDICATED if words.mtbf_gpu_hours is None else Range(*words.mtbf_gpu_hours)
    spot = words.spot is not None or bool(case and case.cluster.spot)
    spot_class = "" if words.spot in (None, "unknown") else str(words.spot)
    gpu = machine.gpu if machine else words.gpu or "A100"
    rates = failure_rates(gpu, gpus, per_machine=per_machine, gpu_hours=hours, spot=spot, spot_class=spot_class)
    cost, gib, notes = _saving(words, case, machine, rates)
    recovery = _recovery(words, cost)
    interval = chosen_interval(cost, recovery, rates.together.mid) if words.interval == "auto" else None
    seconds = interval.seconds if interval else _seconds(words.interval)
    failing = _failing(words, rates, spot_class if spot else None)
    asked = _simulated(words, rates, seconds, failing, cost, recovery)
    said = f"{gpus:,} {gpu if machine or words.gpu else 'GPUs'} in {rates.machines:,} machines"
    known = rates.warnings if machine or words.gpu else tuple(one for one in rates.warnings if "published" not in one)
    return Question(asked, failing, hours, interval, gpus, said, gib, (*known, *notes))


def _case(path: Path) -> Case:
    from deployments.cli.plan import read_cases

    cases = read_cases(path)
    if len(cases) != 1:
        raise ValueError(f"--case {path}: {len(cases)} cases; simulate takes a file with one")
    return cases[0]


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


def _gpus(words: Words, case: Case | None, machine: Machine | None) -> int:
    found = words.gpus
    if found is None and case is not None:
        per_machine = machine.gpus if machine else GENERIC_MACHINE
        found = case.cluster.gpus or (case.cluster.nodes or 0) * per_machine
    if found is None:
        raise ValueError("give --gpus, or --case with a cluster")
    if not 1 <= found <= MOST_GPUS:
        raise ValueError(f"--gpus {found}: give 1 to {MOST_GPUS:,}")
    return found


def _saving(
    words: Words, case: Case | None, machine: Machine | None, rates: Rates
) -> tuple[Saving, float | None, tuple[str, ...]]:
    """What a save costs: as measured and given; else by the size of a checkpoint and where it goes; else a cautious guess."""
    from tasks.planning.checkpoint_plan import plan_of_bytes
    from tasks.planning.checkpointing import SNAPSHOT_OVERHEAD_SECONDS, Saving, checkpoint_bytes
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
        plan = plan_of_bytes(bytes_, machine, rates, storage=storage)
        stall = plan.cost.stall_seconds if stall is None else stall
        write = plan.cost.lag_seconds if write is None else write
        notes = (plan.reason, *(one for one in plan.warnings if one not in rates.warnings))
    elif stall is None:
        notes = (
            f"a save is taken to stall {SNAPSHOT_OVERHEAD_SECONDS:g} s: give --stall-seconds, or a size and --gpu",
        )
    gib = None if bytes_ is None else bytes_ / GIB
    return Saving(SNAPSHOT_OVERHEAD_SECONDS if stall is None else stall, write or 0.0), gib, notes


def _recovery(words: Words, cost: Saving) -> Recovery:
    """Reading a checkpoint is taken to last as long as writing it."""
    from tasks.planning.checkpointing import DETECTION_SECONDS, RESTART_SECONDS, Recovery

    restart = RESTART_SECONDS + cost.lag_seconds if words.restart_seconds is None else words.restart_seconds
    return Recovery(DETECTION_SECONDS if words.detection_seconds is None else words.detection_seconds, restart)


def _failing(words: Words, rates: Rates, spot_class: str | None) -> dict[str, Failing]:
    from tasks.planning.failures import HARDWARE_SHARE, LEMON_SHARE, LEMON_TIMES, eviction_hazard, spot_shares
    from tasks.planning.simulation.settings import Failing

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


def _simulated(
    words: Words, rates: Rates, seconds: float, failing: Mapping[str, Failing], cost: Saving, recovery: Recovery
) -> Simulated:
    """Spares that are not given are enough at the worst rate."""
    from tasks.planning.simulation.settings import Replacing, Simulated, require_number, spares_for

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
    return Simulated(rates.machines, words.days, seconds, failing["mid"], cost, recovery, replacing)


def _seconds(word: str) -> float:
    try:
        found = float(word)
    except ValueError:
        raise ValueError(f"--interval-seconds {word!r}: give seconds, or auto") from None
    return _positive(found, "--interval-seconds", 1e9) or 0.0


def _positive(value: float | None, name: str, most: float) -> float | None:
    if value is not None and not (math.isfinite(value) and 0 < value <= most):
        raise ValueError(f"{name} {value:g}: give a number above 0 and at most {most:,.0f}")
    return value
