"""What a training run costs, and whether the account may have its machines: checks of the stage `plan`.

Prices come from the lists of the home (tasks/planning/prices), sums from tasks/planning/money.py, quota from
tasks/planning/quota.py. What a training that reaches its budget does is tasks/jobs/training/stops.py. See docs/planning.md.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.artifacts import Check, Cluster
from tasks.config.cluster import BACKENDS, ClusterConfig
from tasks.config.planning import PriceKind, SpendingConfig
from tasks.hardware.files import is_known
from tasks.hardware.sku import Sku, load_sku
from tasks.planning.money import Cost, Spending, cost, discounts_of
from tasks.planning.prices.book import USUAL_REGION, machine_price, open_book, storage_prices
from tasks.planning.quota import Request, judge, read_limits

DAY = 86400.0
TAKEN_AWAY = ("spot", "low-priority")
"""Kinds of price of machines that may be taken away: they have a quota of their own."""


@dataclass(frozen=True)
class Use:
    """What a training takes."""

    seconds: float
    """Of useful steps."""
    goodput: float
    """Useful seconds of all, in (0, 1]."""
    checkpoint_bytes: float
    """Kept on average."""


def taken_away(config: SpendingConfig, on: Cluster) -> bool:
    """Whether the machines may be taken away at any time."""
    return config.price in TAKEN_AWAY or on.config.preemptible


def paid_for(config: SpendingConfig, cluster: ClusterConfig) -> SpendingConfig:
    """How the machines of a cluster are paid for: those that may be taken away are not had on demand, nor with its discount."""
    if not cluster.preemptible or config.price != "on-demand":
        return config
    return config.model_copy(update={"price": kind_of_preemptible(cluster.backend), "discount": 0.0})


def kind_of_preemptible(backend: str) -> PriceKind:
    """The kind of price of machines that may be taken away, on a backend as a record names it."""
    return BACKENDS[backend].preemptible_price if backend in BACKENDS else "spot"


def cost_of(use: Use, config: SpendingConfig, on: Cluster, *, home: Path) -> Cost:
    """What it costs on a cluster; `total` is None where a price is not known."""
    today = datetime.datetime.now(datetime.UTC).date()
    book = open_book(home)
    config = paid_for(config, on.config)
    return cost(
        Spending(
            machines=on.nodes,
            train_seconds=use.seconds,
            goodput=use.goodput,
            mix={config.price: 1.0},
            discounts=discounts_of(config),
            checkpoint_gb=use.checkpoint_bytes / 1e9,
        ),
        machine_price(book, on.sku or on.backend, region=config.region, today=today),
        storage_prices(book, region=config.region, today=today),
    )


def checks(use: Use, spent: Cost, config: SpendingConfig, on: Cluster, *, home: Path) -> tuple[Check, ...]:
    """Cost, where there is a limit, and quota, where machines are Azure's. What is not known closes a gate that asks for it."""
    return (*_within_budget(spent, config), *_within_quota(use, config, on, home=home))


def cost_per_hour(spent: Cost, on: Cluster) -> float:
    """What all machines of a cluster cost an hour; 0 when no price is known."""
    return (spent.hour or 0.0) * on.nodes


def known_cost(spent: Cost) -> dict[str, float]:
    """The cost as a metric, where it is known."""
    return {} if spent.total is None else {"cost": spent.total}


def _within_budget(spent: Cost, config: SpendingConfig) -> tuple[Check, ...]:
    if config.max_cost is None:
        return ()
    unknown = spent.hour is None  # of what else has no price, storage above all, the rest is the cost
    remedy = (
        " ".join(f"{value[:1].upper()}{value[1:]}." for value in spent.warnings)
        if unknown
        else "Train fewer steps or a smaller network, pay otherwise (planning.spending.price), or raise "
        "planning.spending.max_cost."
    )
    check = Check(
        name=f"cost, {spent.currency}",
        measured="not known" if unknown else spent.known,
        limit=f"<= {config.max_cost:g}",
        passed=not unknown and spent.known <= config.max_cost,
        warned=not unknown and spent.total is None,
        remedy=remedy,
    )
    return (check,)


def _within_quota(use: Use, config: SpendingConfig, on: Cluster, *, home: Path) -> tuple[Check, ...]:
    if not BACKENDS[on.backend].within_quota or not is_known(on.sku, home / "hardware"):
        return ()  # hardware that `benchmark.sku` names by a file is known to the qualification alone
    sku = load_sku(on.sku, home / "hardware")
    vcpus = _number(sku, "vcpus")
    if not sku.family or not vcpus:
        return ()
    days = use.seconds / use.goodput / DAY
    request = Request(
        sku=sku.name,
        family=sku.family,
        vcpus=round(vcpus),
        nodes=on.nodes,
        days=days,
        low_priority=taken_away(config, on),
        rdma=bool(_number(sku, "infiniband_ports")),
        why=f"training on {on.nodes} x {sku.name} for {days:.2g} days",
    )
    limits = read_limits(home, region=config.region or USUAL_REGION, sku=sku)
    return judge(request, replace(limits, used={}))  # what is in use may be this very cluster


def _number(sku: Sku, name: str) -> float:
    result = sku.specs.get(name)
    return float(result.value) if result and not isinstance(result.value, str) else 0.0
