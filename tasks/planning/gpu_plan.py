"""A training on machines with GPUs, as the stage `plan` judges it: predicted as it is configured, and the nearest that would fit.

The prediction is that of `headway plan` (tasks/planning/search.py). Machines without GPUs are reckoned by tasks/plan.py itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tasks.artifacts import Cluster
from tasks.config.planning import PlanningConfig
from tasks.config.training import ExecutionConfig, TrainingConfig
from tasks.hardware.machine import Machine
from tasks.hardware.machines import machine_of_sku, of_qualification
from tasks.planning.case_of_config import case_of_training
from tasks.planning.checkpointing import checkpoint_bytes, snapshot_seconds
from tasks.planning.counts import parameters
from tasks.planning.search import search

WRITER_BYTES_PER_SECOND = 200e6
"""What the writers of one machine take to a plain disk, fsync and sha256 included (tasks/plan.py)."""


@dataclass(frozen=True)
class GpuPlan:
    """What the stage takes of a prediction."""

    memory: float
    """Bytes of the fullest GPU."""
    usable: float
    """Bytes of one GPU that training can take."""
    step_seconds: float
    stall_seconds: float
    """Training stands still for one checkpoint: it is copied to the machines' memory."""
    write_seconds: float
    """From then until it is written, beside training."""
    fits: bool
    nearest: str
    """What would fit; empty where it does."""


def plan_on_gpus(
    training: TrainingConfig, limits: PlanningConfig, how: ExecutionConfig, on: Cluster, *, vocab_size: int, home: Path
) -> GpuPlan | None:
    """The prediction; None for machines without GPUs or of which too little is known, and for adapters.

    Raises ValueError, by value and remedy, for a training that cannot be divided as it is configured.
    """
    machine = _machine(on, home) if on.config.gpus_per_node and on.sku and not training.lora.rank else None
    if machine is None or training.precision not in machine.achievable_flops:
        return None
    case = case_of_training(training, how, limits, sku=on.sku, gpus=on.world_size, vocab_size=vocab_size)
    result = search(case, machine, gpus=on.world_size)
    value = result.plans[0] if result.plans else result.closest
    if value is None:
        return None
    count = round(parameters(case.network, case.sequence).total)
    size = checkpoint_bytes(count, precision=training.precision, engine=training.engine)
    return GpuPlan(
        memory=value.memory.total,
        usable=machine.usable_memory_bytes,
        step_seconds=value.step_seconds,
        stall_seconds=snapshot_seconds(size, machine, on.world_size),
        write_seconds=size / (WRITER_BYTES_PER_SECOND * on.nodes),
        fits=bool(result.plans),
        nearest=result.nearest,
    )


def _machine(on: Cluster, home: Path) -> Machine | None:
    """The cluster's machines, with the ranks of one as its GPUs and the bandwidth that was measured; None: too little is known.

    The file of `headway qualify --record` may have no numbers of GPUs.
    """
    try:
        machine = machine_of_sku(on.sku, home / "hardware")
    except ValueError:
        return None
    if machine.gpus != on.ranks_per_node:
        share = machine.gpus / on.ranks_per_node
        machine = replace(machine, gpus=on.ranks_per_node, network_bandwidth=machine.network_bandwidth * share)
    return of_qualification(machine, allreduce_bus_bandwidth=on.allreduce_gigabytes_per_second * 1e9, nodes=on.nodes)
