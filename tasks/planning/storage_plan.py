"""Where a training's data and scratch lie: what is needed of each, and the storage that is chosen. Pure.

Checkpoints go where checkpoint_plan.py says, which weighs goodput; how a storage is chosen is storing.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.hardware.machine import Machine
from tasks.planning.case import Case
from tasks.planning.checkpoint_plan import CheckpointPlan
from tasks.planning.prediction import Prediction
from tasks.planning.storing import Choice, Need, choose_storage

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
