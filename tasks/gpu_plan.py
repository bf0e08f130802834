"""A training on machines with GPUs, as the stage `plan` judges it: predicted as it is configured, and the nearest that would fit.

The prediction is tasks/planned_case.py's, as in `headway plan`. Machines without GPUs are reckoned by tasks/plan.py itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tasks.artifacts import Cluster
from tasks.case_of_config import case_of_training
from tasks.hardware.machines import machine_of_sku
from tasks.planned_case import planned
from tasks.planning_config import PlanningConfig
from tasks.training_config import ExecutionConfig, TrainingConfig


@dataclass(frozen=True)
class GpuPlan:
    """What the stage takes of a prediction."""

    memory: float
    """Bytes of the fullest GPU."""
    usable: float
    """Bytes of one GPU that training can take."""
    step_seconds: float
    fits: bool
    nearest: str
    """What would fit; empty where it does."""


def plan_on_gpus(
    training: TrainingConfig, limits: PlanningConfig, how: ExecutionConfig, on: Cluster, *, vocab_size: int, home: Path
) -> GpuPlan | None:
    """The prediction; None for machines without GPUs or of which too little is known, and for adapters.

    Raises ValueError, by value and remedy, for a training that cannot be divided as it is configured.
    """
    if not on.config.gpus_per_node or not on.sku or training.lora.rank or not _known(on.sku, home):
        return None
    case = case_of_training(training, how, limits, sku=on.sku, gpus=on.world_size, vocab_size=vocab_size)
    case = case.model_copy(update={"max_days": None, "max_cost": None})  # the stage judges them itself, with failures
    made = planned(case, home=home, region=limits.spending.region, allreduce_bus_bandwidth=_measured(on))
    found = made.plan or made.found.closest
    if found is None:
        return None
    return GpuPlan(
        memory=found.memory.total,
        usable=made.machine.usable_memory_bytes,
        step_seconds=found.step_seconds,
        fits=made.plan is not None,
        nearest=made.found.nearest,
    )


def _known(sku: str, home: Path) -> bool:
    """Whether the file of a size has the numbers of its GPUs: that of `headway qualify --record` may have none."""
    try:
        machine_of_sku(sku, home / "hardware")
    except ValueError:
        return False
    return True


def _measured(on: Cluster) -> float:
    """Bus bandwidth, bytes a second, of all machines together, as the qualification measured it; 0: it did not."""
    return on.allreduce_gigabytes_per_second * 1e9
