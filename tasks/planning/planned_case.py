"""A case planned whole: its machines, the best division, checkpoints and goodput, money and quota; and all of it as JSON.

What each part says is pure (tasks/planning); here are the files that they need: sizes (tasks/hardware), prices
(tasks/planning/prices). Who reads cases and shows plans is deployments/cli/planning/plan.py. See docs/planning.md.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.planning import PriceKind, SpendingConfig
from tasks.hardware.machine import Machine
from tasks.hardware.machines import machine_of_gpu, machine_of_sku, of_qualification
from tasks.planning import counts
from tasks.planning.case import Case, Network
from tasks.planning.checkpointing import CheckpointPlan, checkpoint_bytes, expected_goodput, plan_of_bytes
from tasks.planning.counts import parameters
from tasks.planning.failures import Range, failure_rates
from tasks.planning.money import Cost, MachinePrice, Spending, cost, hourly, kept_in
from tasks.planning.prediction import Prediction
from tasks.planning.prices.book import machine_price, open_book, storage_prices
from tasks.planning.search import MOST_GPUS, Found, search
from tasks.planning.storing import Choice, Need, choose_storage

# What if: a case planned again with other numbers of GPUs, on Spot, and with other depths of its network.
#
# One case is tasks/planning/planned_case.py; the pictures are tasks/report/plan_pictures.py. See docs/planning.md,
# "Plan a case".


DOUBLINGS = 3
"""Up and down from the case's own number."""
INTERVALS = tuple(2.0 ** (power / 4) for power in range(-16, 17))
"""Times the interval that was chosen."""
USEFUL = 0.05
"""A plan with less goodput is no choice: its days would be years."""


@dataclass(frozen=True)
class Point:
    """One plan of many that differ in one thing."""

    gpus: int
    parameters: float
    tokens_per_second: float
    """Of all GPUs, without failures."""
    tflops: float
    """Of one GPU, the model's operations."""
    days: float | None
    """With failures; None without tokens."""
    cost: float | None
    """None where a price is not known."""


@dataclass(frozen=True)
class WhatIf:
    """The curves; one without points is left out of the pictures."""

    by_gpus: tuple[Point, ...]
    by_gpus_on_spot: tuple[Point, ...]
    by_depth: tuple[Point, ...]
    by_interval: dict[str, tuple[tuple[float, float], ...]]
    """Of each rate of failures, `low` failing most: seconds between saves, and goodput."""
    chosen: Point
    interval_seconds: float


def what_if(made: Planned, *, home: Path, region: str = "") -> WhatIf:
    """Plan around a plan that fits. Raises ValueError for one that does not."""
    if made.plan is None or made.checkpoints is None:
        raise ValueError(f"--plots of {made.case.name or 'a case'} that does not fit: {made.found.reason}")
    gpus, case = made.plan.division.gpus, _open(made.case)

    def points(cases: Iterable[Case]) -> tuple[Point, ...]:
        return tuple(_until_none_fits(cases, home, region))

    def around(one: Case) -> tuple[Point, ...]:
        fewer = points(_on(one, gpus >> power) for power in range(1, DOUBLINGS + 1) if gpus >> power)
        more = points(_on(one, gpus << power) for power in range(DOUBLINGS + 1) if gpus << power <= MOST_GPUS)
        return (*reversed(fewer), *more)

    spot = case.model_copy(update={"cluster": case.cluster.model_copy(update={"spot": True})})
    dedicated = case.model_copy(update={"cluster": case.cluster.model_copy(update={"spot": False})})
    local = _on(case, gpus)
    shallower = points(
        _deep(local, 1 / 2**power) for power in range(1, DOUBLINGS + 1) if (local.network.layers % (2**power) == 0)
    )
    deeper = points(_deep(local, 2.0**power) for power in range(DOUBLINGS + 1))
    return WhatIf(
        by_gpus=around(dedicated),
        by_gpus_on_spot=around(spot),
        by_depth=(*reversed(shallower), *deeper),
        by_interval=_intervals(made.checkpoints),
        chosen=_point(made),
        interval_seconds=made.checkpoints.interval.seconds,
    )


def cheapest_by_time(points: Iterable[Point]) -> tuple[Point, ...]:
    """The Pareto front, quickest first: of these, none is both quicker and cheaper than another."""
    known = [point for point in points if point.days is not None and point.cost is not None]
    front: list[Point] = []
    for point in sorted(known, key=lambda one: (one.days or 0.0, one.cost or 0.0)):
        if not front or (point.cost or 0.0) < (front[-1].cost or 0.0):
            front.append(point)
    return tuple(front)


def _open(case: Case) -> Case:
    """Without what would forbid other numbers of GPUs."""
    return case.model_copy(
        update={
            "goal": "fastest", "max_days": None, "max_cost": None,
            "parallel": case.parallel.model_copy(update={"dp": None}),
        }
    )  # fmt: skip


def _on(case: Case, gpus: int) -> Case:
    return case.model_copy(update={"cluster": case.cluster.model_copy(update={"gpus": gpus, "nodes": None})})


def _deep(case: Case, factor: float) -> Case:
    network: Network = case.network.model_copy(update={"layers": round(case.network.layers * factor)})
    return case.model_copy(update={"network": network})


def _until_none_fits(cases: Iterable[Case], home: Path, region: str) -> Iterator[Point]:
    for case in cases:
        try:
            made = planned(case, home=home, region=region)
        except ValueError:
            return  # cannot be divided so, and not when doubled again
        if made.plan is None:
            return
        if made.checkpoints and made.checkpoints.goodput.mid >= USEFUL:
            yield _point(made)


def _point(made: Planned) -> Point:
    assert made.plan is not None
    whole = parameters(made.case.network, made.case.sequence).total
    gpus = made.plan.division.gpus
    return Point(
        gpus=gpus,
        parameters=whole,
        tokens_per_second=made.plan.tokens_per_second_per_gpu * gpus,
        tflops=made.plan.tflops_model,
        days=made.days_with_failures,
        cost=made.cost.total if made.cost else None,
    )


def _intervals(made: CheckpointPlan) -> dict[str, tuple[tuple[float, float], ...]]:
    means = {"low": made.rates.together.low, "mid": made.rates.together.mid, "high": made.rates.together.high}
    tried = [made.interval.seconds * factor for factor in INTERVALS]
    return {
        level: tuple((seconds, expected_goodput(seconds, made.cost, made.recovery, mean)) for seconds in tried)
        for level, mean in means.items()
    }


# Where a training's data and scratch lie: what is needed of each, and the storage that is chosen. Pure.
#
# Checkpoints go where checkpointing.py says, which weighs goodput; how a storage is chosen is storing.py.


SMALL_VOCABULARY = 65_500
"""Up to so many ids Megatron's token files have two bytes a token, and four above (indexed_dataset.py, `best_fitting_dtype`)."""
LOCAL_CHECKPOINTS = 2
"""On the machines' own disks: the newest, and the one that is written."""
AHEAD = 10.0
"""Times the rate at which tokens are used that storage must give: many machines read at the same moment."""


def stored(
    case: Case,
    plan: Prediction,
    machine: Machine,
    checkpoints: CheckpointPlan,
    *,
    gb_month: Mapping[str, float | None] | None = None,
) -> dict[str, Choice | None]:
    """The choice for `data` and for `scratch`; None where nothing is enough. Without `tokens` in the case there is no data."""
    machines = -(-plan.division.gpus // machine.gpus)
    width = 2 if case.network.vocab < SMALL_VOCABULARY else 4
    used = plan.tokens_per_second_per_gpu * plan.division.gpus * width
    needs = [
        Need("data", case.tokens * width, AHEAD * used) if case.tokens else None,
        Need("scratch", LOCAL_CHECKPOINTS * checkpoints.bytes, checkpoints.bytes / checkpoints.interval_seconds),
    ]
    return {
        need.purpose: choose_storage(need, machine, machines, gb_month=gb_month, local_bytes=machine.nvme_bytes)
        for need in needs
        if need
    }


GIB, TIB = 1 << 30, 1 << 40
DAY = 86400.0
DIGITS = 6


@dataclass(frozen=True)
class Planned:
    """A case and what became of it. `plan` is None where nothing fits; then `found.nearest` says what would."""

    case: Case
    machine: Machine
    found: Found
    plan: Prediction | None
    checkpoints: CheckpointPlan | None
    cost: Cost | None
    warnings: tuple[str, ...]
    storages: dict[str, Choice | None]
    """Of data and scratch; empty where nothing fits."""

    @property
    def days_with_failures(self) -> float | None:
        """Useful time over goodput, at the expected rate of failures."""
        if self.plan is None or self.plan.days is None:
            return None
        return self.plan.days / self.checkpoints.goodput.mid if self.checkpoints else self.plan.days


def planned(
    case: Case,
    *,
    home: Path,
    region: str = "",
    paid: SpendingConfig | None = None,
    allreduce_bus_bandwidth: float = 0.0,
    hours_between_failures: float | None = None,
) -> Planned:
    """Plan a case. Raises ValueError, by value and remedy, for one that names what is not there or cannot be divided.

    `paid` says how machines are paid for; without it on demand, or Spot. `allreduce_bus_bandwidth` is what a qualification
    measured over all machines, in bytes a second; 0: the size's number holds. `hours_between_failures` is of the whole job; None:
    the published rates hold.
    """
    machine = machine_of(case, home)
    gpus = _gpus(case, machine)
    nodes = -(-gpus // machine.gpus) if gpus else 1
    machine = of_qualification(machine, allreduce_bus_bandwidth=allreduce_bus_bandwidth, nodes=nodes)
    price = machine_price(open_book(home), machine.name, region=region, gpus=machine.gpus, today=_today())
    paid = paid or SpendingConfig(price="spot" if case.cluster.spot else "on-demand")
    hour = hourly(price, {paid.price: 1.0}, _discounts(paid))
    match = search(case, machine, gpus=gpus, per_gpu_hour=hour / machine.gpus if hour is not None else None)
    plan = match.plans[0] if match.plans else None
    checkpoints = _checkpoints(case, machine, plan, hours_between_failures) if plan else None
    spent = _cost(case, machine, plan, checkpoints, price, paid, region, home) if plan and checkpoints else None
    messages = [
        *(plan.warnings if plan else ()),
        *(checkpoints.warnings if checkpoints else ()),
        *(spent.warnings if spent else ()),
    ]
    messages = list(dict.fromkeys([*messages, *_limits(case, machine, plan)]))
    prices = storage_prices(open_book(home), region=region, today=_today()).gb_month
    lie = stored(case, plan, machine, checkpoints, gb_month=prices) if plan and checkpoints else {}
    return Planned(case, machine, match, plan, checkpoints, spent, tuple(messages), lie)


def machine_of(case: Case, home: Path) -> Machine:
    """Of a size's file, the home's before ours, or of a GPU's name."""
    return machine_of_sku(case.cluster.sku, home / "hardware") if case.cluster.sku else machine_of_gpu(case.cluster.gpu)


def plain(made: Planned) -> dict[str, Any]:
    """The plan as JSON; what a case does not give is null. Units are in the names."""
    plan = made.plan or made.found.closest
    return {
        "name": made.case.name,
        "fits": made.plan is not None,
        "fit": plan.fit if plan else "does not fit",
        "needs": list(plan.needs) if plan else [],
        "gpus": plan.division.gpus if plan else None,
        "parameters": counts.parameters(made.case.network, made.case.sequence).total,
        "memory_gib": _memory(made, plan),
        "step_seconds": _round(plan.step_seconds) if plan else None,
        "step_parts_seconds": {name: _round(value) for name, value in plan.time.__dict__.items()} if plan else None,
        "tokens_per_second_per_gpu": _round(plan.tokens_per_second_per_gpu) if plan else None,
        "tflops_per_gpu": {"hardware": _round(plan.tflops_hardware), "model": _round(plan.tflops_model)}
        if plan
        else None,
        "mfu": _round(plan.mfu) if plan else None,
        "days": _round(plan.days) if plan else None,
        "days_with_failures": _round(made.days_with_failures),
        "cost": _money(made.cost),
        "checkpoint": _checkpoint(made.checkpoints),
        "storage": {name: _storage(choice) for name, choice in made.storages.items()},
        "goodput": {name: _round(value) for name, value in made.checkpoints.goodput.__dict__.items()}
        if made.checkpoints
        else None,
        "limits": list(plan.binds) if plan else [],
        "warnings": list(made.warnings),
        "parallel": _parallel(plan) if plan else None,
        "machine": {"name": made.machine.name, "gpu": made.machine.gpu, "gpus": made.machine.gpus},
        "goal": made.found.goal,
        "reason": made.found.reason,
        "nearest": made.found.nearest or None,
        "others": [_other(other) for other in made.found.plans[1:]],
    }


def _gpus(case: Case, machine: Machine) -> int | None:
    if case.cluster.nodes is not None:
        return case.cluster.nodes * machine.gpus
    gpus = case.cluster.gpus
    if case.cluster.sku and gpus is not None and gpus > machine.gpus and gpus % machine.gpus:
        raise ValueError(f"cluster.gpus {gpus} are not whole machines of {machine.gpus}: give a multiple of it")
    return gpus  # of a GPU by name, machines may have been smaller


def _checkpoints(case: Case, machine: Machine, plan: Prediction, hours: float | None) -> CheckpointPlan:
    size = checkpoint_bytes(
        counts.parameter_count(case.network, case.sequence), precision=case.precision, engine=case.engine
    )
    gpus = plan.division.gpus
    if hours is None:
        rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus, spot=case.cluster.spot)
    else:
        of_all = Range(hours, hours, hours).times(gpus)
        rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus, gpu_hours=of_all)
    return plan_of_bytes(size, machine, rates)


def _cost(
    case: Case,
    machine: Machine,
    plan: Prediction,
    checkpoints: CheckpointPlan,
    price: MachinePrice,
    paid: SpendingConfig,
    region: str,
    home: Path,
) -> Cost | None:
    if plan.days is None:
        return None
    storage = storage_prices(open_book(home), region=region, today=_today())
    ordered = (checkpoints.tib or 0.0) * TIB / 1e9
    kept, gb, output = kept_in(storage, checkpoints.storage.name, gb=2 * checkpoints.bytes / 1e9, ordered_gb=ordered)
    spending = Spending(
        machines=plan.division.gpus / machine.gpus,
        train_seconds=plan.days * DAY,
        goodput=max(checkpoints.goodput.mid, 1e-9),
        mix={paid.price: 1.0},
        discounts=_discounts(paid),
        checkpoint_gb=gb,
        checkpoint_storage=kept,
    )
    spent = cost(spending, price, storage)
    return replace(spent, warnings=(*spent.warnings, output)) if output else spent


def _discounts(paid: SpendingConfig) -> dict[PriceKind, float]:
    return {paid.price: paid.discount} if paid.discount else {}


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _limits(case: Case, machine: Machine, plan: Prediction | None) -> list[str]:
    """What the account must allow, in a sentence."""
    if plan is None or not machine.family:
        return []
    nodes = -(-plan.division.gpus // machine.gpus)
    kind = "low-priority" if case.cluster.spot else machine.family
    return [
        f"it takes {nodes * machine.vcpus} vCPUs of {kind}: `headway quota {machine.name} --nodes {nodes}` compares"
    ]


def _memory(made: Planned, plan: Prediction | None) -> dict[str, float | None] | None:
    if plan is None:
        return None
    taken = plan.memory
    parts = ("weights", "gradients", "optimizer", "activations", "other", "total")
    return {
        **{name: _round(getattr(taken, name) / GIB) for name in parts},
        "usable": _round(made.machine.usable_memory_bytes / GIB),
    }


def _money(spent: Cost | None) -> dict[str, Any] | None:
    return spent.plain() if spent else None


def _checkpoint(made: CheckpointPlan | None) -> dict[str, Any] | None:
    if made is None:
        return None
    return {
        "gib": _round(made.gib),
        "write_seconds": _round(made.write_seconds),
        "interval_seconds": _round(made.interval_seconds),
        "storage": made.storage.name,
        "storage_reason": made.reason,
    }


def _storage(choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "name": choice.storage.name,
        "tib": _round(choice.tib),
        "month": _round(choice.month),
        "reason": choice.reason,
    }


def _parallel(plan: Prediction) -> dict[str, Any]:
    way = plan.division
    return {name: value for name, value in way.__dict__.items() if name not in ("precision", "engine")}


def _other(plan: Prediction) -> dict[str, Any]:
    return {
        "parallel": _parallel(plan),
        "gpus": plan.division.gpus,
        "step_seconds": _round(plan.step_seconds),
        "memory_gib": _round(plan.memory.total / GIB),
        "fit": plan.fit,
    }


def _round(value: float | None) -> float | None:
    """Six digits: more would say that more is known."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
