"""Settings of the stage `plan`: what a training run may take of memory, time and money before it is not started.

The whole tree is tasks/config/flows.py. See docs/planning.md.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.config.base import Fraction, Settings
from tasks.config.training import CheckpointConfig

PriceKind = Literal["on-demand", "spot", "low-priority", "reserved-1y", "reserved-3y", "savings-1y", "savings-3y"]


class SpendingConfig(Settings):
    """What the machines cost, and what a run may. `headway prices` shows the prices."""

    max_cost: float | None = Field(None, gt=0)
    """Most that a training run may cost, in the prices' currency, failures included; empty: no limit. It needs a price of the
    machines, and training ends with a checkpoint when it is spent."""
    price: PriceKind = "on-demand"
    """How the machines are paid for."""
    discount: float = Field(0.0, ge=0, lt=1)
    """Off the on-demand price, as your contract says: 0.4 is 40 %. Above 0 it stands in place of the list's price."""
    region: str = ""
    """Azure's region, as eastus, for prices and quota; empty: the usual one of the price list."""
    ask_above: float = Field(100.0, ge=0)
    """`headway retrain` at a terminal shows the plan and asks before a training that costs more; `--yes` answers."""


class PlanningConfig(Settings):
    """Limits that a training run must keep; the gate of the plan."""

    max_minutes: float = Field(60.0, gt=0)
    """Longest time that training may take by the measured rate."""
    memory_per_rank_gib: float | None = Field(None, gt=0)
    """Memory that one rank may use, in GiB; empty: `cluster.memory_gib`, or what the benchmark found, divided by the ranks."""
    mean_hours_between_failures: float | None = Field(None, gt=0)
    """Expected time between interruptions of the whole job, for the checkpoint interval and the goodput; empty: by the published
    rates of so many GPUs and, of machines that may be taken away, of evictions; without GPUs 24 hours, evictions beside it."""
    min_goodput: Fraction | None = None
    """Least share of the time that must be useful, by the best checkpoint interval there is; empty: no limit."""
    spending: SpendingConfig = SpendingConfig()
    """What the machines cost, and what a run may."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """How often training is saved: it changes no model, so it is in no key of training."""
