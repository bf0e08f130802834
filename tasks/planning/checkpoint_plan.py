"""Checkpoints of one plan: how large, where to, how often, and the goodput over a range of failure rates. Pure.

Put together of checkpointing.py, failures.py and storages.py; `checkpoint` and `goodput` in the JSON of `headway plan`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.hardware.machine import Machine
from tasks.planning.case import Engine, Precision
from tasks.planning.checkpointing import (
    RESTART_SECONDS,
    Interval,
    Recovery,
    Saving,
    Shares,
    checkpoint_bytes,
    chosen_interval,
    goodput_range,
    saving,
    snapshot_seconds,
    write_seconds,
)
from tasks.planning.failures import SPOT_NOTICE_SECONDS, Range, Rates, failure_rates
from tasks.planning.interval import daly_interval
from tasks.planning.storages import GIB, STORAGES, TIB, Storage, capacity_for, storage_named

KEPT = 3
"""Checkpoints that there is room for: two that are kept and the one that is written."""
CANDIDATES = ("blob-hot", "lustre-40", "lustre-125", "lustre-250", "lustre-500")
"""What all machines see and what outlives them, the slowest a TiB first; a faster tier of a file system costs more a TiB."""
WRITES_AN_INTERVAL = 4.0
"""A file system whose bandwidth grows with its size is ordered so large that a write takes a quarter of the best interval."""
WORTH = 0.005
"""Goodput that a faster storage must bring to be taken."""


@dataclass(frozen=True)
class CheckpointPlan:
    """Where checkpoints go and what that makes of the time."""

    bytes: int
    storage: Storage
    tib: float | None
    """To order; None: it needs no order."""
    cost: Saving
    recovery: Recovery
    write_seconds: float
    interval: Interval
    rates: Rates
    goodput: Shares
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def gib(self) -> float:
        return self.bytes / GIB

    @property
    def interval_seconds(self) -> float:
        return self.interval.seconds


def plan_checkpoints(
    parameters: int,
    machine: Machine,
    *,
    gpus: int,
    precision: Precision = "bf16",
    engine: Engine = "megatron",
    storage: str = "",
    asynchronous: bool = True,
    spot: bool = False,
    spot_class: str = "",
    gpu_hours: Range | None = None,
) -> CheckpointPlan:
    """Where to save and how often; `storage` empty: the first of CANDIDATES that costs no more than WORTH of goodput.

    Raises ValueError when the machines cannot write to the storage at all.
    """
    size = checkpoint_bytes(parameters, precision=precision, engine=engine)
    given = {} if gpu_hours is None else {"gpu_hours": gpu_hours}
    rates = failure_rates(machine.gpu, gpus, per_machine=machine.gpus, spot=spot, spot_class=spot_class, **given)
    return plan_of_bytes(size, machine, rates, storage=storage, asynchronous=asynchronous)


def plan_of_bytes(
    size: int, machine: Machine, rates: Rates, *, storage: str = "", asynchronous: bool = True
) -> CheckpointPlan:
    """The same for a checkpoint whose size is known."""
    names = (storage,) if storage else CANDIDATES
    results = [_to(storage_named(name), size, machine, rates, asynchronous=asynchronous) for name in names]
    plans = [plan for plan in results if plan is not None]
    if not plans:
        raise ValueError(
            f"checkpoints to {storage or 'any storage'}: {machine.name} cannot write there, or it cannot be had as large "
            f"as {KEPT * size / TIB:.1f} TiB; give one of {', '.join(STORAGES)}"
        )
    return _cheapest(plans)


def _cheapest(plans: Sequence[CheckpointPlan]) -> CheckpointPlan:
    best = max(plan.goodput.mid for plan in plans)
    taken = next(plan for plan in plans if plan.goodput.mid >= best - WORTH)
    more = best - taken.goodput.mid
    others = f"; a faster one would bring {more:.1%} more goodput" if more >= 0.0005 else ""
    size = f", {taken.tib:g} TiB" if taken.tib and math.isfinite(taken.tib) else ""
    reason = f"{taken.storage.said}{size}: written in {taken.write_seconds:.0f} s{others}"
    return CheckpointPlan(**{**taken.__dict__, "reason": reason})


def _to(storage: Storage, size: int, machine: Machine, rates: Rates, *, asynchronous: bool) -> CheckpointPlan | None:
    snapshot = snapshot_seconds(size, machine, rates.gpus)
    quick = daly_interval(snapshot, rates.together.mid) / WRITES_AN_INTERVAL
    tib = _ordered(storage, KEPT * size / TIB, size / quick)
    write = write_seconds(size, storage, machine, rates.machines, tib=tib)
    if write is None or (storage.step and tib is None):
        return None
    cost = saving(snapshot, write, asynchronous=asynchronous)
    recovery = Recovery(restart_seconds=RESTART_SECONDS + write)
    interval = chosen_interval(cost, recovery, rates.together.mid)
    goodput = goodput_range(interval.seconds, cost, recovery, rates.together)
    warnings = (*rates.warnings, *_warnings(storage, cost, rates, goodput))
    return CheckpointPlan(
        size, storage, tib, cost, recovery, write, interval, rates, goodput, interval.reason, warnings
    )


def _ordered(storage: Storage, tib: float, bandwidth: float) -> float | None:
    """As large as there is room to need, and as fast as it should be; else the largest that there is; None: too small even so."""
    if not storage.step:
        return None
    return capacity_for(storage, tib, bandwidth) or (storage.largest if tib <= storage.largest else None)


def _warnings(storage: Storage, cost: Saving, rates: Rates, goodput: Shares) -> list[str]:
    messages = []
    if not storage.durable:
        messages.append(
            f"{storage.name} goes with its machine: copy checkpoints elsewhere, or a lost machine takes them along"
        )
    if rates.evictions and cost.stall_seconds + cost.lag_seconds > SPOT_NOTICE_SECONDS:
        seconds = cost.stall_seconds + cost.lag_seconds
        messages.append(
            f"a save takes {seconds:.0f} s, an eviction's notice is {SPOT_NOTICE_SECONDS:.0f} s: work is lost each time"
        )
    if goodput.low < 0.5:
        messages.append(f"with failures as frequent as they may be, only {goodput.low:.0%} of the time is useful")
    return messages
