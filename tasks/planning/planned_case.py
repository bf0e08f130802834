"""A case planned whole: its machines, the best division, checkpoints and goodput, money and quota; as JSON; and what if.

What each part says is pure (tasks/planning); here are the files that they need: sizes (tasks/hardware), prices
(tasks/planning/prices). What if is the case planned again with other numbers of GPUs, on Spot, and with other depths of its
network; the pictures of that are tasks/report/pictures.py. Who reads cases and shows plans is
deployments/cli/planning/plan.py. See docs/planning.md, "Plan a case".
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.config.planning import SpendingConfig
from tasks.hardware.machines import Machine, machine_of_gpu, machine_of_sku, of_qualification
from tasks.planning.case import Case
from tasks.planning.checkpointing import CheckpointPlan, checkpoint_bytes, expected_goodput, plan_checkpoints
from tasks.planning.counts import parameter_count, parameters
from tasks.planning.failures import DEDICATED, Range, failure_rates
from tasks.planning.money import Cost, MachinePrice, Spending, StoragePrices, cost, discounts_of, hourly, kept_in
from tasks.planning.prediction import GIB, Prediction
from tasks.planning.prices.book import machine_price, open_book, storage_prices
from tasks.planning.search import MOST_GPUS, Found, search
from tasks.planning.storages import TIB, Choice, Need, choose_storage

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
    gpus, checkpoints = made.plan.division.gpus, made.checkpoints
    parallel = made.case.parallel.model_copy(update={"dp": None})
    case = made.case.model_copy(update={"goal": "fastest", "max_days": None, "max_cost": None, "parallel": parallel})

    def on(number: int, *, spot: bool) -> Case:
        cluster = case.cluster.model_copy(update={"gpus": number, "nodes": None, "spot": spot})
        return case.model_copy(update={"cluster": cluster})

    def deep(factor: float) -> Case:
        network = case.network.model_copy(update={"layers": round(case.network.layers * factor)})
        return on(gpus, spot=case.cluster.spot).model_copy(update={"network": network})

    def points(cases: Iterable[Case]) -> tuple[Point, ...]:
        results = []
        for each in cases:
            try:
                one = planned(each, home=home, region=region)
            except ValueError:
                break  # cannot be divided so, and not when doubled again
            if one.plan is None:
                break
            if one.checkpoints and one.checkpoints.goodput.mid >= USEFUL:
                results.append(_point(one))
        return tuple(results)

    def around(*, spot: bool) -> tuple[Point, ...]:
        fewer = points(on(gpus >> power, spot=spot) for power in range(1, DOUBLINGS + 1) if gpus >> power)
        more = points(on(gpus << power, spot=spot) for power in range(DOUBLINGS + 1) if gpus << power <= MOST_GPUS)
        return (*reversed(fewer), *more)

    shallower = points(deep(1 / 2**power) for power in range(1, DOUBLINGS + 1) if case.network.layers % 2**power == 0)
    deeper = points(deep(2.0**power) for power in range(DOUBLINGS + 1))
    together = checkpoints.rates.together
    tried = [checkpoints.interval.seconds * factor for factor in INTERVALS]
    return WhatIf(
        by_gpus=around(spot=False),
        by_gpus_on_spot=around(spot=True),
        by_depth=(*reversed(shallower), *deeper),
        by_interval={
            level: tuple((at, expected_goodput(at, checkpoints.cost, checkpoints.recovery, mean)) for at in tried)
            for level, mean in (("low", together.low), ("mid", together.mid), ("high", together.high))
        },
        chosen=_point(made),
        interval_seconds=checkpoints.interval.seconds,
    )


def cheapest_by_time(points: Iterable[Point]) -> tuple[Point, ...]:
    """The Pareto front, quickest first: of these, none is both quicker and cheaper than another."""
    known = [point for point in points if point.days is not None and point.cost is not None]
    front: list[Point] = []
    for point in sorted(known, key=lambda one: (one.days or 0.0, one.cost or 0.0)):
        if not front or (point.cost or 0.0) < (front[-1].cost or 0.0):
            front.append(point)
    return tuple(front)


def _point(made: Planned) -> Point:
    assert made.plan is not None
    gpus = made.plan.division.gpus
    return Point(
        gpus=gpus,
        parameters=parameters(made.case.network, made.case.sequence).total,
        tokens_per_second=made.plan.tokens_per_second_per_gpu * gpus,
        tflops=made.plan.tflops_model,
        days=made.days_with_failures,
        cost=made.cost.total if made.cost else None,
    )


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
    sku, gpus = case.cluster.sku, case.cluster.gpus
    machine = machine_of_sku(sku, home / "hardware") if sku else machine_of_gpu(case.cluster.gpu)
    if case.cluster.nodes is not None:
        gpus = case.cluster.nodes * machine.gpus
    elif sku and gpus is not None and gpus > machine.gpus and gpus % machine.gpus:
        # Of a GPU by name, machines may have been smaller.
        raise ValueError(f"cluster.gpus {gpus} are not whole machines of {machine.gpus}: give a multiple of it")
    nodes = -(-gpus // machine.gpus) if gpus else 1
    machine = of_qualification(machine, allreduce_bus_bandwidth=allreduce_bus_bandwidth, nodes=nodes)
    book, today = open_book(home), datetime.datetime.now(datetime.UTC).date()
    price = machine_price(book, machine.name, region=region, gpus=machine.gpus, today=today)
    storage = storage_prices(book, region=region, today=today)
    paid = paid or SpendingConfig(price="spot" if case.cluster.spot else "on-demand")
    hour = hourly(price, {paid.price: 1.0}, discounts_of(paid))
    match = search(case, machine, gpus=gpus, per_gpu_hour=hour / machine.gpus if hour is not None else None)
    if not match.plans:
        return Planned(case, machine, match, None, None, None, (), {})
    plan = match.plans[0]
    gpus = plan.division.gpus
    hours = hours_between_failures
    of_all = DEDICATED if hours is None else Range(hours, hours, hours).times(gpus)
    spot = case.cluster.spot and hours is None
    rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus, gpu_hours=of_all, spot=spot)
    size = checkpoint_bytes(parameter_count(case.network, case.sequence), precision=case.precision, engine=case.engine)
    checkpoints = plan_checkpoints(size, machine, rates)
    spent = _cost(plan, checkpoints, machine, price, storage, paid)
    messages = [*plan.warnings, *checkpoints.warnings, *(spent.warnings if spent else ())]
    if machine.family:
        nodes = -(-gpus // machine.gpus)
        kind = "low-priority" if case.cluster.spot else machine.family
        quota = f"`headway quota {machine.name} --nodes {nodes}` compares"
        messages.append(f"it takes {nodes * machine.vcpus} vCPUs of {kind}: {quota}")
    lie = stored(case, plan, machine, checkpoints, gb_month=storage.gb_month)
    return Planned(case, machine, match, plan, checkpoints, spent, tuple(dict.fromkeys(messages)), lie)


def _cost(
    plan: Prediction,
    checkpoints: CheckpointPlan,
    machine: Machine,
    price: MachinePrice,
    storage: StoragePrices,
    paid: SpendingConfig,
) -> Cost | None:
    """None without tokens."""
    if plan.days is None:
        return None
    ordered = (checkpoints.tib or 0.0) * TIB / 1e9
    kept, gb, output = kept_in(storage, checkpoints.storage.name, gb=2 * checkpoints.bytes / 1e9, ordered_gb=ordered)
    spending = Spending(
        machines=-(-plan.division.gpus // machine.gpus),  # whole ones: a part of a machine cannot be rented
        train_seconds=plan.days * DAY,
        goodput=max(checkpoints.goodput.mid, 1e-9),
        mix={paid.price: 1.0},
        discounts=discounts_of(paid),
        checkpoint_gb=gb,
        checkpoint_storage=kept,
    )
    spent = cost(spending, price, storage)
    return replace(spent, warnings=(*spent.warnings, output)) if output else spent


FIELDS = (
    "name", "fits", "fit", "needs", "gpus", "parameters", "memory_gib", "step_seconds", "step_parts_seconds",
    "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu", "days", "days_with_failures", "cost", "checkpoint", "storage",
    "goodput", "limits", "warnings", "parallel", "machine", "goal", "reason", "nearest", "others",
)  # fmt: skip


def plain(made: Planned) -> dict[str, Any]:
    """The plan as JSON; what a case does not give is null. Units are in the names."""
    plan, checkpoints, machine = made.plan or made.found.closest, made.checkpoints, made.machine
    result = dict.fromkeys(FIELDS) | {
        "name": made.case.name,
        "fits": made.plan is not None,
        "fit": "does not fit",
        "needs": [],
        "parameters": parameters(made.case.network, made.case.sequence).total,
        "days_with_failures": _round(made.days_with_failures),
        "cost": made.cost.plain() if made.cost else None,
        "storage": {name: _storage(choice) for name, choice in made.storages.items()},
        "limits": [],
        "warnings": list(made.warnings),
        "machine": {"name": machine.name, "gpu": machine.gpu, "gpus": machine.gpus},
        "goal": made.found.goal,
        "reason": made.found.reason,
        "nearest": made.found.nearest or None,
        "others": [
            {
                "parallel": _parallel(other),
                "gpus": other.division.gpus,
                "step_seconds": _round(other.step_seconds),
                "memory_gib": _round(other.memory.total / GIB),
                "fit": other.fit,
            }
            for other in made.found.plans[1:]
        ],
    }
    if plan:
        parts = ("weights", "gradients", "optimizer", "activations", "other", "total")
        memory = {name: getattr(plan.memory, name) for name in parts} | {"usable": machine.usable_memory_bytes}
        result |= {
            "fit": plan.fit,
            "needs": list(plan.needs),
            "gpus": plan.division.gpus,
            "memory_gib": {name: _round(value / GIB) for name, value in memory.items()},
            "step_seconds": _round(plan.step_seconds),
            "step_parts_seconds": {name: _round(value) for name, value in plan.time.__dict__.items()},
            "tokens_per_second_per_gpu": _round(plan.tokens_per_second_per_gpu),
            "tflops_per_gpu": {"hardware": _round(plan.tflops_hardware), "model": _round(plan.tflops_model)},
            "mfu": _round(plan.mfu),
            "days": _round(plan.days),
            "limits": list(plan.binds),
            "parallel": _parallel(plan),
        }
    if checkpoints:
        result |= {
            "checkpoint": {
                "gib": _round(checkpoints.gib),
                "write_seconds": _round(checkpoints.write_seconds),
                "interval_seconds": _round(checkpoints.interval_seconds),
                "storage": checkpoints.storage.name,
                "storage_reason": checkpoints.reason,
            },
            "goodput": {name: _round(value) for name, value in checkpoints.goodput.__dict__.items()},
        }
    return result


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
    return {name: value for name, value in plan.division.__dict__.items() if name not in ("precision", "engine")}


def _round(value: float | None) -> float | None:
    """Six digits: more would say that more is known."""
    return None if value is None else float(f"{value:.{DIGITS}g}")
